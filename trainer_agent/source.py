"""The interface between a training framework and the rounds of the trainer agent.

A `Source` turns the live parameters of a group of training ranks into Hugging Face tensors, packed into the buckets
of a manifest. It decides nothing about versions, engines or transports, and never sees the control plane.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.tensors import (
    FLOAT_DTYPES,
    Left,
    LeftReason,
    Manifest,
    TensorSpec,
    covering,
    shortest_prefixes,
    stored_tensors,
)

if TYPE_CHECKING:  # what reads configs of served models alone has no torch
    import torch


class SourceError(Exception):
    """Root of the errors of a source."""


class UnsupportedModel(SourceError):
    """The served model, or a feature of the trained one, has no rule here."""


class UnknownParameter(SourceError):
    """A parameter that no rule names: nothing is skipped in silence."""

    def __init__(self, name: str, shape: Sequence[int], detail: str, advice: str) -> None:
        self.name = name
        self.shape = tuple(shape)
        super().__init__(f"no rule names the parameter {name!r} {self.shape} ({detail}): {advice}")


class LayoutMismatch(SourceError):
    """The trained model is not the one that the Hugging Face config describes."""


class RanksDisagree(SourceError):
    """The ranks of the group do not hold parts of one model."""


class AssemblyFailed(SourceError):
    """A collective broke off. Its group may still hold half of a message: build a new source."""


SERVABLE_DTYPES: Final = FLOAT_DTYPES
"""dtypes that parameters may be cast to, by torch's names."""


def check_dtype(dtype: str, where: str) -> None:
    """Raise `UnsupportedModel` unless `dtype`, which `where` asks for, is one of `SERVABLE_DTYPES`."""
    if dtype not in SERVABLE_DTYPES:
        raise UnsupportedModel(f"{where} asks for {dtype!r}: parameters can be served in {', '.join(SERVABLE_DTYPES)}")


def check_manifestable(tensors: Sequence[TensorSpec]) -> None:
    """Raise `UnsupportedModel` for a tensor whose name, dtype or shape no manifest can hold."""
    try:
        Manifest.of("", tensors)
    except ManifestError as error:
        raise UnsupportedModel(
            f"{error}: rename the tensor as checkpoints would, or leave it out of the state dict if it is not served"
        ) from error


class Source(Protocol):
    """The live weights of one model, spread over the ranks of one group.

    Every rank of the group holds a source and makes the same calls in the same order; `tensors` and `assemble` have
    the same arguments everywhere, but for `out`. Parameters are read where they are, at the moment of the call: a
    caller that steps the optimizer between two buckets packs two versions.
    """

    @property
    def model(self) -> str:
        """Architecture as the served checkpoint's config names it, for example ``Qwen3ForCausalLM``."""
        ...

    @property
    def root(self) -> bool:
        """True on exactly one rank, which assembles the buckets and speaks for the group."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the parameters, and of the buffer `out` of `assemble`."""
        ...

    def tensors(self) -> Sequence[TensorSpec]:
        """Tensors that are served, by Hugging Face names: identical and in the same order on every rank."""
        ...

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` of `manifest` into the first bytes of `out` (uint8, root only, None elsewhere).

        Collective. On a GPU the bytes are complete in the order of the current stream. Raises `LayoutMismatch` when
        the manifest names other tensors than `tensors`, and `AssemblyFailed` when a peer failed or was too slow.
        """
        ...

    def agree(self, blob: bytes | None) -> bytes:
        """Hand the root's `blob` to every rank and return it; the others pass None. Collective.

        Raises `AssemblyFailed` when the root died or was silent for the source's timeout.
        """
        ...


@runtime_checkable
class PipelineSource(Source, Protocol):
    """A source whose ranks are stages of a pipeline, each of which can assemble what it holds without the others."""

    @property
    def rank(self) -> int:
        """Rank of this process in the source's group."""
        ...

    def roots(self) -> Sequence[int]:
        """Rank that assembles each tensor of `tensors` where every stage assembles its own. Equal on all ranks.

        A tensor that several stages hold, such as tied embeddings, has the rank of one of them.
        """
        ...

    def assemble(
        self, manifest: Manifest, index: int, out: torch.Tensor | None, roots: Sequence[int] | None = None
    ) -> None:
        """As `Source.assemble`; with `roots`, the rank of each bucket, `out` is given on that of bucket `index`.

        Ranks that hold nothing of the bucket return at once, so that stages work beside each other.
        """
        ...

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """Blobs of all ranks, by rank. Collective."""
        ...


def head_dim_of(source: Source) -> int | None:
    """Elements of an attention head, which shapes do not tell (sglang_checksum.py); None if `source` does not know."""
    head_dim: int | None = getattr(source, "head_dim", None)
    return head_dim


_TOWERS: Final = tuple(
    f"{outer}{inner}."
    for outer in ("", "model.", "thinker.")
    for inner in (
        "visual", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "audio_model", "audio_encoder",
        "multi_modal_projector", "mm_projector", "vision_projection", "audio_projection", "mlp1", "connector",
        "embed_vision", "embed_audio", "patch_merger", "patch_merge_mlp",
    )
)  # fmt: skip
"""Parts of multimodal checkpoints beside the language model, by the prefixes of Hugging Face's files."""
_PREDICTIONS: Final = ("mtp.", "model.mtp.", "model.mtp_layers.", "model.mtp_block.")
"""Prediction layers outside of the decoder's layers."""
_LAYER: Final = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")


def left_of(source: Source, further: Sequence[str] = (), served: Path | None = None) -> tuple[Left, ...]:
    """What a publication of `source` leaves as engines were launched with it. Collective where `served` is given.

    That is what the source says, what `further` names (tensors, or prefixes that end in a dot), and of the checkpoint
    in the folder `served` the parts of which nothing is sent and that are known to be often untrained: vision and audio
    towers, and prediction layers. Anything else that is missing there is a mistake, and is refused by engines.
    """
    own: Sequence[Left] = getattr(source, "left", ())
    if served is not None:
        blob = msgspec.json.encode((*own, *_untrained(source, served))) if source.root else None
        own = msgspec.json.decode(source.agree(blob), type=tuple[Left, ...])
    found = {name: Left(name, LeftReason.NOT_TRAINED) for name in further}
    for each in own:
        if not covering(found, each.name):
            found[each.name] = each
    return tuple(found.values())


def _untrained(source: Source, served: Path) -> tuple[Left, ...]:
    """Known parts of the checkpoint in `served` of which `source` sends nothing."""
    try:
        stored = stored_tensors(served).keys()
        config = msgspec.json.decode((served / "config.json").read_bytes(), type=_Layers)
    except (ManifestError, OSError, ValueError):
        return ()  # the folder has what engines read, or they say what is wrong with it
    sent = {spec.name for spec in source.tensors()}
    layers = config.num_hidden_layers or (config.text_config or _Layers()).num_hidden_layers
    known = [
        name
        for name in stored
        if name not in sent and (name.startswith((*_TOWERS, *_PREDICTIONS)) or _beyond(name, layers))
    ]
    return tuple(
        Left(name, LeftReason.NOT_TRAINED) for name in shortest_prefixes(known, sent.union(stored - set(known)))
    )


class _Layers(msgspec.Struct, frozen=True):
    num_hidden_layers: int = 0
    text_config: _Layers | None = None


def _beyond(name: str, layers: int) -> bool:
    """Whether tensor `name` is of a layer behind the decoder's last one."""
    found = _LAYER.match(name)
    return found is not None and 0 < layers <= int(found[1])
