"""The Megatron-core source, its family tables, and the HF model it is compared with."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .cpu_emulation import CONFIG as CONFIG, install as install
    from .hf_model import (
        HFModel as HFModel,
        has_table as has_table,
        hf_tensors as hf_tensors,
        layer_mappings as layer_mappings,
    )
    from .megatron_source import MegatronSource as MegatronSource
    from .parameter_mapping import (
        Fusion as Fusion,
        LocalParameter as LocalParameter,
        MappingRule as MappingRule,
        Norm as Norm,
        ParallelRank as ParallelRank,
        TensorCut as TensorCut,
        shards_of as shards_of,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
