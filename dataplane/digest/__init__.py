"""Digests of tensors, and the checksums that SGLang gives of its own parameters, with the layout behind them."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import digest_triton as digest_triton, sglang_checksum as sglang_checksum, tensor_digest as tensor_digest
    from .expected_sglang_digests import (
        SHA256 as SHA256,
        EngineKind as EngineKind,
        SglangDigester as SglangDigester,
        SglangDigestPlan as SglangDigestPlan,
        merge_live_digests as merge_live_digests,
    )
    from .nonfinite import Words as Words, add_counts as add_counts, masks_of as masks_of
    from .sglang_checksum import parameters_with as parameters_with
    from .tensor_digest import (
        ALGORITHM as ALGORITHM,
        DIGEST_BYTES as DIGEST_BYTES,
        LANE_B as LANE_B,
        PHI as PHI,
        check_digests as check_digests,
        mix_words as mix_words,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
