"""Quantization schemes, the config that names them, and the kernels."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import hf_quantization_config as hf_quantization_config
    from .fused_digests import Summed as Summed, Words as Words, complete as complete, words_of as words_of
    from .hf_quantization_config import Quantization as Quantization, outputs as outputs, read as read
    from .quantize_cuda import tile_of as tile_of
    from .quantize_tasks import PreparedTasks as PreparedTasks, Sums as Sums, Task as Task, prepare as prepare
    from .schemes import (
        Element as Element,
        QuantizedPart as QuantizedPart,
        Scheme as Scheme,
        UnknownScheme as UnknownScheme,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
