"""The Megatron-core source, its family tables, and the HF model it is compared with."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .cpu_emulation import CONFIG as CONFIG, install as install
    from .hf_model import (
        LayerPlace as LayerPlace,
        Model as Model,
        body as body,
        decoder_layer as decoder_layer,
        head as head,
        prediction_layer as prediction_layer,
        prediction_parts as prediction_parts,
        served_tensors as served_tensors,
    )
    from .megatron_source import MegatronSource as MegatronSource
    from .parameter_mapping import (
        Fusion as Fusion,
        Heads as Heads,
        LocalParameter as LocalParameter,
        MappedShare as MappedShare,
        MappingRule as MappingRule,
        Norm as Norm,
        TensorCut as TensorCut,
        pieces_of as pieces_of,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
