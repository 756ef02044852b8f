"""Names, dtypes, shapes, boxes, shards, manifests, coverage. Pure data; numpy, no torch (a contract worth having)."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import coverage as coverage
    from .boxes import (
        Box as Box,
        Boxes as Boxes,
        Column as Column,
        all_in_order as all_in_order,
        doubly_held as doubly_held,
        intersect as intersect,
        subtract_all as subtract_all,
        volumes as volumes,
        widen as widen,
    )
    from .coverage import in_turn as in_turn, prove as prove, weights as weights
    from .grids import Grids as Grids, collapse as collapse
    from .load_balancing import Sets as Sets, deal as deal, numbered as numbered, ragged as ragged
    from .manifest import (
        DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES,
        ITEM_BYTES as ITEM_BYTES,
        BucketSpec as BucketSpec,
        DigestTable as DigestTable,
        LiveDigests as LiveDigests,
        Manifest as Manifest,
        TensorSpec as TensorSpec,
        blob_digest as blob_digest,
    )
    from .shards import (
        DTYPES as DTYPES,
        Shard as Shard,
        Shards as Shards,
        ShardView as ShardView,
        contiguous_strides as contiguous_strides,
        order_of as order_of,
        packed_strides as packed_strides,
        places_in as places_in,
        served_dtypes as served_dtypes,
        served_sizes as served_sizes,
        served_strides as served_strides,
        side_by_side as side_by_side,
        whole as whole,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
