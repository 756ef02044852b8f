"""The interface between a training framework and the rounds of the trainer agent.

A `Source` turns the live parameters of a group of training ranks into Hugging Face tensors, packed into the buckets
of a manifest. It decides nothing about versions, engines or transports, and never sees the control plane.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.tensors import (
    FLOAT_DTYPES,
    Copy,
    Left,
    LeftReason,
    Manifest,
    StoredTensor,
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


_COPIED: Final = re.compile(r"(?:^|\.)(embed_tokens|word_embeddings|lm_head)\.weight$")
"""Embeddings and output layers, of which prediction layers may hold copies."""
_HEAD: Final = re.compile(r"head|output")
_PIECE_BYTES: Final = 64 * 1024 * 1024


class Unsent(msgspec.Struct, frozen=True):
    """What a publication does not send of the served checkpoint."""

    left: tuple[Left, ...] = ()
    """It stays as engines were launched with it."""
    copies: tuple[Copy, ...] = ()
    """It follows what is sent."""


def unsent_of(source: Source, further: Sequence[str] = (), served: Path | None = None) -> Unsent:
    """What a publication of `source` does not send. Collective where `served` is given.

    Left is what the source says, what `further` names (tensors, or prefixes that end in a dot), and of the checkpoint
    in the folder `served` the parts of which nothing is sent and that are known to be often untrained: vision and audio
    towers, and prediction layers. Anything else that is missing there is a mistake, and is refused by engines. A tensor
    of a prediction layer that has the bytes of the embedding or of the output layer there is a copy: where that one is
    sent, it follows.
    """
    own = Unsent(tuple(getattr(source, "left", ())))
    if served is not None:
        blob = None
        if source.root:
            known = _untrained(source, served)
            blob = msgspec.json.encode(Unsent((*own.left, *known.left), known.copies))
        own = msgspec.json.decode(source.agree(blob), type=Unsent)
    found = {name: Left(name, LeftReason.NOT_TRAINED) for name in further}
    for each in own.left:
        if not covering(found, each.name):
            found[each.name] = each
    return Unsent(tuple(found.values()), own.copies)


def _untrained(source: Source, served: Path) -> Unsent:
    """Known parts of the checkpoint in `served` of which `source` sends nothing."""
    try:
        stored = stored_tensors(served)
        config = msgspec.json.decode((served / "config.json").read_bytes(), type=_Layers)
        sent = {spec.name for spec in source.tensors()}
        layers = config.num_hidden_layers or (config.text_config or _Layers()).num_hidden_layers
        unsent = [name for name in stored if name not in sent]
        predicted = [name for name in unsent if name.startswith(_PREDICTIONS) or _beyond(name, layers)]
        copies = tuple(_copies(stored, sent, predicted))
    except (ManifestError, OSError, ValueError):
        return Unsent()  # the folder has what engines read, or they say what is wrong with it
    known = [*predicted, *(name for name in unsent if name.startswith(_TOWERS))]
    entries = shortest_prefixes(known, sent.union(stored.keys() - set(known)))
    return Unsent(tuple(Left(name, LeftReason.NOT_TRAINED) for name in entries), copies)


def _copies(stored: Mapping[str, StoredTensor], sent: Collection[str], names: Sequence[str]) -> Iterator[Copy]:
    """Those of `names` that have the bytes of an embedding or an output layer that is `sent`. Reads both."""
    originals = [name for name in stored if name in sent and _COPIED.search(name)]
    for name in names:
        copy = stored[name]
        alike = [each for each in originals if _form(stored[each]) == _form(copy)]
        alike.sort(key=lambda each: (_HEAD.search(each) is None) != (_HEAD.search(name) is None))
        if of := next((each for each in alike if _equal(stored[each], copy)), ""):
            yield Copy(name, of)


def _form(tensor: StoredTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.spec.dtype, tensor.spec.shape


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    pieces = zip(one.read(_PIECE_BYTES), other.read(_PIECE_BYTES), strict=True)
    return all(mine == others for mine, others in pieces)


class _Layers(msgspec.Struct, frozen=True):
    num_hidden_layers: int = 0
    text_config: _Layers | None = None


def _beyond(name: str, layers: int) -> bool:
    """Whether tensor `name` is of a layer behind the decoder's last one."""
    found = _LAYER.match(name)
    return found is not None and 0 < layers <= int(found[1])
