"""What a source leaves: what it says, what the settings say, and known parts of the served checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from weightbus.dataplane.tensors import Left, LeftReason
from weightbus.trainer_agent.source import unsent_of
from weightbus.trainer_agent.sources.hf_module import HFModuleSource
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors, untrained

from ..kit.flat_module import FlatModule

TEXT = ("model.embed_tokens.weight", "model.layers.0.w", "model.layers.1.w", "lm_head.weight")


class Named:
    """A source of tensors with these names; `agree` hands on what the root says."""

    def __init__(self, names: tuple[str, ...], left: tuple[Left, ...] = ()) -> None:
        self.left, self.root, self._inner = left, True, HFModuleSource(FlatModule(_filled(names)), model="M")
        self.tensors = self._inner.tensors

    def agree(self, blob: bytes | None) -> bytes:
        """Of one rank."""
        assert blob is not None
        return blob


def _filled(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(2) for name in names}


def served(folder: Path, *more: str, config: Mapping[str, object] | None = None) -> Path:
    """A checkpoint of the text model and `more`."""
    save_file(_filled((*TEXT, *more)), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {"num_hidden_layers": 2}))
    return folder


def found(sent: tuple[str, ...], folder: Path | None, *further: str) -> set[str]:
    """Entries."""
    return {each.name for each in unsent_of(cast("Any", Named(sent)), further, folder).left}


@pytest.mark.parametrize(
    ("more", "entries"),
    [
        (("model.visual.blocks.0.w", "model.visual.merger.w"), {"model.visual."}),
        (
            ("visual.w", "audio_tower.w", "multi_modal_projector.w"),
            {"visual.", "audio_tower.", "multi_modal_projector."},
        ),
        (("mtp.fc.weight", "mtp.layers.0.w"), {"mtp."}),
        (("model.mtp_layers.0.w",), {"model.mtp_layers."}),
        (("model.layers.2.w", "model.layers.2.enorm.weight"), {"model.layers.2."}),
        (("model.layers.1.other.w",), set[str]()),
        (("score.weight",), set[str]()),
    ],
)
def test_known_parts_of_the_served_checkpoint_are_left(
    tmp_path: Path, more: tuple[str, ...], entries: set[str]
) -> None:
    """Towers, and layers behind the last; any other tensor that is missing is a mistake, and not left (N64)."""
    folder = served(tmp_path, *more)
    assert found(TEXT, folder) == entries
    assert found((*TEXT, *more), folder) == set(), "sent"


def test_a_part_that_is_sent_in_part_is_left_by_its_other_tensors(tmp_path: Path) -> None:
    """GLM-4.5's prediction layer: copies of the embedding follow the trained one, the rest stays."""
    folder = served(
        tmp_path, "model.layers.2.embed_tokens.weight", "model.layers.2.mlp.w", "model.layers.2.hnorm.weight"
    )
    sent = (*TEXT, "model.layers.2.embed_tokens.weight")
    assert found(sent, folder) == {"model.layers.2.mlp.", "model.layers.2.hnorm."}


def test_copies_in_a_prediction_layer_follow_what_is_sent(tmp_path: Path) -> None:
    """By their bytes in the served checkpoint, each the tensor of its kind; any other of that shape stays (N64)."""
    embedding, head = torch.randn(4, 2), torch.randn(4, 2)
    tensors = _filled(TEXT) | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    layer = {"embed_tokens.weight": embedding, "shared_head.head.weight": head, "mlp.w": embedding[:2] * 1,
             "other_head.weight": head + 1}  # fmt: skip
    save_file(tensors | {f"model.layers.2.{name}": each.clone() for name, each in layer.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    unsent = unsent_of(cast("Any", Named(TEXT)), (), tmp_path)
    assert unsent.left == (Left("model.layers.2."),)
    assert {each.name: each.of for each in unsent.copies} == {
        "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight": "lm_head.weight",
    }
    frozen = tuple(name for name in TEXT if "embed" not in name)
    unsent = unsent_of(cast("Any", Named(frozen)), ["model.embed_tokens.weight"], tmp_path)
    assert [each.of for each in unsent.copies] == ["lm_head.weight"], "a copy of what is left is left"


def test_a_copy_of_tied_tensors_is_told_by_its_name(tmp_path: Path) -> None:
    """An output layer with the bytes of the embedding, both sent: the copies follow their own kind."""
    same = torch.randn(4, 2)
    tensors = _filled(TEXT) | {name: same.clone() for name in ("model.embed_tokens.weight", "lm_head.weight")}
    names = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    save_file(tensors | {name: same.clone() for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    copies = unsent_of(cast("Any", Named(TEXT)), (), tmp_path).copies
    assert [each.of for each in copies] == ["model.embed_tokens.weight", "lm_head.weight"]


def test_the_layers_of_a_multimodal_config_are_counted(tmp_path: Path) -> None:
    """They stand in its text_config."""
    folder = served(tmp_path, "model.layers.2.w", config={"text_config": {"num_hidden_layers": 2}})
    assert found(TEXT, folder) == {"model.layers.2."}


def test_settings_and_source_add_to_it(tmp_path: Path) -> None:
    """An entry of the settings takes the place of those below it, and without a folder they are all there is."""
    assert found(TEXT, None, "x.", "y") == {"x.", "y"}
    own = (Left("x.a.", LeftReason.FROZEN), Left("z.", LeftReason.FROZEN))
    source = cast("Any", Named(TEXT, own))
    assert unsent_of(source, ["x."], None).left == (Left("x."), own[1])
    assert unsent_of(source, [], served(tmp_path, "visual.w")).left == (*own, Left("visual."))


def test_a_folder_without_weights_leaves_nothing_by_itself(tmp_path: Path) -> None:
    """Engines tell what is missing, and the setting."""
    assert found(TEXT, tmp_path) == set()


def test_frozen_parameters_are_left_on_request() -> None:
    """With their reason; the tensors that remain are the manifest's."""
    module = FlatModule(_filled(TEXT))
    for name in ("model.layers.1.w", "lm_head.weight"):
        module.get_parameter(name).requires_grad_(True)
    source = HFModuleSource(module, model="M", trainable_only=True)
    assert {spec.name for spec in source.tensors()} == {"model.layers.1.w", "lm_head.weight"}
    assert source.left == (
        Left("model.embed_tokens.", LeftReason.FROZEN),
        Left("model.layers.0.", LeftReason.FROZEN),
    )
    assert HFModuleSource(module, model="M").left == ()


def test_predictions_that_are_not_trained_are_left_by_the_config() -> None:
    """What Megatron serves of `mtp_num_layers=None` and what it leaves are the whole checkpoint."""
    config = {"architectures": ["MiMoForCausalLM"], "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
              "num_nextn_predict_layers": 1}  # fmt: skip
    model = HFModel.parse(config)
    names = [spec.name for spec in hf_tensors(model, "bfloat16")]
    assert untrained(model, (name for name in names if "mtp" not in name)) == (Left("model.mtp_layers."),)
    assert untrained(model, names) == ()
