"""Assembly: shards of many ranks become buckets on one, by a gather plan, messages and uploads from host memory."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .assembler import (
        DTYPES as DTYPES,
        Assembler as Assembler,
        BucketPlanCache as BucketPlanCache,
        GatherExchange as GatherExchange,
        MemoryAccess as MemoryAccess,
        Uploads as Uploads,
        UploadSpans as UploadSpans,
        check_manifest as check_manifest,
        has_plain_memory as has_plain_memory,
        is_pinned as is_pinned,
        unreadable_reason as unreadable_reason,
        upload_spans_of as upload_spans_of,
    )
    from .gather_plan import BucketPlan as BucketPlan, StridedCopy as StridedCopy, plan as plan
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
