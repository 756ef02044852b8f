"""Load trace x shards -> plan -> schedule, and the verification of what arrived."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .digest_shares import DigestDivision as DigestDivision, DigestShare as DigestShare, divide as divide
    from .load_trace import (
        Cause as Cause,
        Constant as Constant,
        LoadedTensor as LoadedTensor,
        LoadTrace as LoadTrace,
        Patch as Patch,
        Target as Target,
    )
    from .reshard_plan import (
        PlanReader as PlanReader,
        ReshardPlan as ReshardPlan,
        distances as distances,
        make_plan as make_plan,
        staging_of as staging_of,
    )
    from .send_schedule import (
        MIN_PAIR_BYTES as MIN_PAIR_BYTES,
        NOWHERE as NOWHERE,
        Messages as Messages,
        Schedule as Schedule,
        alone_bytes_on as alone_bytes_on,
        pair_bytes_of as pair_bytes_of,
        schedule as schedule,
    )
    from .share_digester import PASS_BYTES as PASS_BYTES, ShareDigest as ShareDigest
    from .verification import (
        RankVerification as RankVerification,
        Verification as Verification,
        make_proof as make_proof,
        provable as provable,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
