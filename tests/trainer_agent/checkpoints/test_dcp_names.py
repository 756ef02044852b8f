"""Keys as trainers write them: below which prefix the model is, and when that is not to be guessed."""

from __future__ import annotations

import pytest

from weightbus.trainer_agent.checkpoints.dcp_files import NoSuchModel, check_complete, chosen, normal

MODEL = ("model.embed.weight", "model.norm.weight", "lm_head.weight")
FUSED = ("model.experts.gate_up", "model.norm.weight")
SPLIT = ("model.experts.0.gate", "model.norm.weight")


def below(prefix: str, names: tuple[str, ...] = MODEL) -> set[str]:
    return {prefix + name for name in names}


@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
def test_the_only_prefix_is_found(prefix: str) -> None:
    """Whatever else is saved, as long as it is no copy of the model."""
    keys = below(prefix) | {"optimizer.model.embed.weight", "optimizer.step"}
    assert chosen([MODEL, MODEL], keys, "") == (0, prefix)


def test_of_several_models_none_is_guessed() -> None:
    """An average beside the weights, the old policy, the optimizer's moments: all have the names."""
    keys = below("model.") | below("ema.") | below("")
    with pytest.raises(NoSuchModel, match=r"3 prefixes \('\.', 'ema\.', 'model\.'\).*--dcp-prefix"):
        chosen([MODEL, MODEL], keys, "")
    for wanted, prefix in (("model", "model."), ("ema.", "ema."), (".", "")):
        assert chosen([MODEL, MODEL], keys, wanted) == (0, prefix)


def test_copies_in_different_forms_are_several_models_too() -> None:
    """One by its names in memory, one by those of its checkpoint."""
    keys = below("model.", FUSED) | below("ema.", SPLIT)
    with pytest.raises(NoSuchModel, match=r"'ema\.', 'model\.'"):
        chosen([FUSED, SPLIT], keys, "")
    assert chosen([FUSED, SPLIT], keys, "ema") == (1, "ema.")


def test_a_prefix_without_the_model_is_refused() -> None:
    """With those that have it."""
    with pytest.raises(NoSuchModel, match=r"not below the prefix 'actor'; below these it is: 'model\.'"):
        chosen([MODEL, MODEL], below("model."), "actor")
    with pytest.raises(NoSuchModel, match="they are not all among its keys"):
        chosen([MODEL, MODEL], below("model.") - {"model.lm_head.weight"}, "")


def test_what_is_below_the_prefix_must_be_known() -> None:
    """A value head, scales, more layers: serving the rest would be another model. Beside the prefix anything may be."""
    check_complete(below("model.") | {"optimizer.step", "lr"}, "model.", MODEL)
    check_complete(below("") | {"optimizer.step"}, "", MODEL)
    for prefix, odd in (("app.", "v_head.weight"), ("model.", "lm_head.weight_scale"), ("", "model.extra")):
        with pytest.raises(NoSuchModel, match=f"'{prefix}{odd}': not in the model"):
            check_complete(below(prefix) | {prefix + odd}, prefix, MODEL)


def test_dots_at_the_end_of_a_prefix_may_be_left_out() -> None:
    """And a dot alone is no prefix at all."""
    assert [normal(each) for each in ("model", "model.", "a.b", ".")] == ["model.", "model.", "a.b.", ""]
