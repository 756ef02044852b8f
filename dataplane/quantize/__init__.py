"""Quantization schemes, the config that names them, and the kernels.

schemes and hf_quantization_config are pure; quantize_torch is the arithmetic's reference, quantize_triton the kernels.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import hf_quantization_config as hf_quantization_config
    from .fused_digests import (
        FusedDigests as FusedDigests,
        WordLayout as WordLayout,
        fully_summed_tensors as fully_summed_tensors,
        word_layout as word_layout,
    )
    from .hf_quantization_config import (
        Quantization as Quantization,
        quantized_tensors as quantized_tensors,
        read_quantization_config as read_quantization_config,
    )
    from .quantize_cuda import tile_shape as tile_shape
    from .quantize_tasks import (
        DigestSums as DigestSums,
        PreparedTasks as PreparedTasks,
        QuantizeTask as QuantizeTask,
        prepare_tasks as prepare_tasks,
    )
    from .schemes import (
        Element as Element,
        QuantizedPart as QuantizedPart,
        Scheme as Scheme,
        UnknownScheme as UnknownScheme,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
