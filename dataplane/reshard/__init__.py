"""Load trace x shards -> plan -> schedule, and the verification of the bytes that arrived."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .digest_shares import (
        PASS_BYTES as PASS_BYTES,
        DigestDivision as DigestDivision,
        DigestShare as DigestShare,
        ShareDigester as ShareDigester,
        ShareSums as ShareSums,
        divide_digest_work as divide_digest_work,
    )
    from .load_trace import (
        ConstantFill as ConstantFill,
        LoadTarget as LoadTarget,
        LoadTrace as LoadTrace,
        NotCopiedCause as NotCopiedCause,
        StagedTensor as StagedTensor,
        TargetBox as TargetBox,
    )
    from .replica_digests import (
        ReplicaUnits as ReplicaUnits,
        digest_replicas as digest_replicas,
        find_replicas as find_replicas,
    )
    from .reshard_plan import (
        PlanReader as PlanReader,
        ReshardPlan as ReshardPlan,
        make_plan as make_plan,
        rank_distances as rank_distances,
        staging_layout as staging_layout,
    )
    from .send_schedule import (
        MIN_PAIR_BYTES as MIN_PAIR_BYTES,
        NOWHERE as NOWHERE,
        SendMessages as SendMessages,
        SendSchedule as SendSchedule,
        alone_bytes_for as alone_bytes_for,
        make_send_schedule as make_send_schedule,
        pair_bytes_for as pair_bytes_for,
    )
    from .verification import (
        RankVerification as RankVerification,
        Verification as Verification,
        check_ranges as check_ranges,
        make_verification as make_verification,
        verifiable_trace as verifiable_trace,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
