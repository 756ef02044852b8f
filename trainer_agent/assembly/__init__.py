"""Shards of many ranks become buckets on one: gather plan, gathers, uploads."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .assembler import (
        DTYPES as DTYPES,
        Assembler as Assembler,
        GatherExchange as GatherExchange,
        GatherReach as GatherReach,
        check_manifest as check_manifest,
        objection as objection,
    )
    from .bucket_plan_cache import BucketPlanCache as BucketPlanCache
    from .gather_plan import BucketPlan as BucketPlan, Placement as Placement, plan as plan
    from .host_uploads import UploadParts as UploadParts, Uploads as Uploads, cargo_of as cargo_of, pinned as pinned
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
