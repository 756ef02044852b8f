"""What a Hugging Face config says of how its model computes, beyond the names and shapes of its tensors. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, cast

Word = bool | int | float | str

_ROUTING: Final = (
    "num_experts_per_tok",
    "scoring_func",
    "norm_topk_prob",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
)
_INDEXER: Final = ("index_topk", "indexer_rope_interleave", "index_topk_freq", "index_skip_topk_offset")
_ROTATION: Final = (
    "rope_theta",
    "rope_type",
    "type",
    "factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
)
_NESTED: Final = ("rope_scaling", "rope_parameters")
"""Where the words of the rotation are: since transformers 5 all of them in the second, before all but ``rope_theta``
in the first."""


def words_of(config: Mapping[str, object]) -> dict[str, Word]:
    """What `config`, that of a language model, says by these words of its own. What it does not say is not there."""
    words = _said(config, (*_ROUTING, *_INDEXER, "rope_theta", "use_sliding_window"))
    for section in _NESTED:
        inner = config.get(section)
        if isinstance(inner, Mapping):
            words |= _said(cast("Mapping[str, object]", inner), _ROTATION)
    return words


def _said(config: Mapping[str, object], known: tuple[str, ...]) -> dict[str, Word]:
    said = ((word, config.get(word)) for word in known)
    return {word: value for word, value in said if isinstance(value, (bool, int, float, str))}
