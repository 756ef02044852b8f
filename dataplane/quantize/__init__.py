"""Quantization schemes, the config that names them, and the kernels.

schemes is pure; quantize_tasks has the arithmetic with torch, quantize_triton the kernels.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import schemes as schemes
    from .quantize_cuda import tile_shape as tile_shape
    from .quantize_tasks import (
        DigestSums as DigestSums,
        FusedDigests as FusedDigests,
        PreparedTasks as PreparedTasks,
        QuantizeTask as QuantizeTask,
        WordLayout as WordLayout,
        fully_summed_tensors as fully_summed_tensors,
        prepare_tasks as prepare_tasks,
        word_layout as word_layout,
    )
    from .schemes import (
        Element as Element,
        Quantization as Quantization,
        QuantizedPart as QuantizedPart,
        Scheme as Scheme,
        UnknownScheme as UnknownScheme,
        quantized_tensors as quantized_tensors,
        read_quantization_config as read_quantization_config,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
