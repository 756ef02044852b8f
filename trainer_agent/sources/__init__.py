"""Sources of weights: FSDP2, HF modules, gathered and exported tensors; what the ranks of a source agree on."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .checkpoint_conversion import Slice as Slice, slices as slices, stored_tensors as stored_tensors
    from .exported import ExportedSource as ExportedSource, bridge_exporter as bridge_exporter
    from .fsdp import FSDPSource as FSDPSource
    from .full_tensor import FullTensorSource as FullTensorSource
    from .hf_module import HFModuleSource as HFModuleSource
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
