"""Sources of weights: FSDP2, HF modules, gathered and exported tensors; what the ranks of a source agree on."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .checkpoint_conversion import head_dim_in as head_dim_in, slices as slices, stored_tensors as stored_tensors
    from .collective_source import CollectiveSource as CollectiveSource, SingleRank as SingleRank
    from .exported import (
        ExportedSource as ExportedSource,
        FullTensorSource as FullTensorSource,
        bridge_exporter as bridge_exporter,
    )
    from .hf_module import FSDPSource as FSDPSource, HFModuleSource as HFModuleSource
    from .tensor_dtypes import (
        TensorDtypes as TensorDtypes,
        cast_dtype as cast_dtype,
        has_files as has_files,
        transformers_class as transformers_class,
    )
    from .tensor_slices import Slice as Slice
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
