"""Names, dtypes, shapes, boxes, shards, manifests, coverage. Pure data: numpy, no torch (import-linter checks it)."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import coverage as coverage
    from .coverage import (
        ReplicaSets as ReplicaSets,
        assign_balanced as assign_balanced,
        check_exact_cover as check_exact_cover,
        choose_replicas as choose_replicas,
        expected_read_bytes as expected_read_bytes,
        factorize as factorize,
        ragged_arange as ragged_arange,
    )
    from .left_tensors import (
        Copy as Copy,
        Left as Left,
        LeftReason as LeftReason,
        covering as covering,
        shortest_prefixes as shortest_prefixes,
    )
    from .manifest import (
        DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES,
        FLOAT_DTYPES as FLOAT_DTYPES,
        ITEM_BYTES as ITEM_BYTES,
        BucketSpec as BucketSpec,
        DigestTable as DigestTable,
        LiveDigests as LiveDigests,
        Manifest as Manifest,
        Sources as Sources,
        TensorSpec as TensorSpec,
        blob_digest as blob_digest,
        cut as cut,
        main_dtype as main_dtype,
    )
    from .safetensors_files import (
        STORED_DTYPES as STORED_DTYPES,
        StoredTensor as StoredTensor,
        stored_files as stored_files,
        stored_tensors as stored_tensors,
        tensors_in_file as tensors_in_file,
    )
    from .shards import (
        DTYPES as DTYPES,
        Box as Box,
        Boxes as Boxes,
        Column as Column,
        Shard as Shard,
        Shards as Shards,
        ShardView as ShardView,
        Table as Table,
        contiguous_strides as contiguous_strides,
        find_overlap as find_overlap,
        intersect as intersect,
        lexsort_rows as lexsort_rows,
        packed_strides as packed_strides,
        pad_axes as pad_axes,
        served_dtypes as served_dtypes,
        served_sizes as served_sizes,
        served_strides as served_strides,
        subtract_all as subtract_all,
        tensor_positions as tensor_positions,
        volumes as volumes,
        whole_tensor_shard as whole_tensor_shard,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
