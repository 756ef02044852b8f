"""What versions leave at a server: that it is still that of the launch checkpoint, and the proof of it (N64).

A server has its launch checkpoint's tensors from its launch on, until a version sends them or its memory is released.
While that is not known not to have happened, the server loads its launch checkpoint from its files before a version
that leaves a part. Then it is proven, once for each process generation and each set of what is left, by live digests
where these can be predicted from the files; `verified_by` says where they cannot.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NoReturn

import msgspec
import torch

from weightbus.control.log import get_log
from weightbus.dataplane.digest import SglangDigester, SglangDigestPlan
from weightbus.dataplane.tensors import Manifest, StoredTensor, TensorSpec, stored_tensors

from ..engines import Engine
from ..errors import UnfitManifest, WrongWeights
from ..machine import LeftRecord

_PIECE_BYTES: Final = 64 * 1024 * 1024
_SHOWN: Final = 4
"""Entries in a message."""
UNPROVEN: Final = "what is left was not compared"
_log = get_log(__name__)


class _Config(msgspec.Struct, frozen=True):
    head_dim: int | None = None
    hidden_size: int = 0
    num_attention_heads: int = 0


class LeftPart:
    """What one server has of its launch checkpoint. Used from the thread that calls the server."""

    def __init__(self, server: Engine) -> None:
        self._server = server
        self._record = LeftRecord()
        self._used: tuple[str, frozenset[str], frozenset[str]] = "", frozenset(), frozenset()
        """A process generation, tensors that its loader was recorded with, and those of them that it keeps."""
        self._predicted: tuple[tuple[str, str], dict[str, tuple[str, ...]] | None] | None = None

    def begin(self, layout: Manifest, folder: str, label: str, deadline_s: float) -> None:
        """A version of `layout` is about to change the server, which was launched with the checkpoint in `folder`.

        `label` is the server's from before it was marked as being changed.
        Where what it leaves may have changed, the server loads its launch checkpoint first. Raises `ServerError`, and
        `UnfitManifest` for a server that cannot be brought back.
        """
        self.require(layout, label)
        if layout.left and not self._known(layout, label):
            self._record.doubt()
            _log.warning("launch_checkpoint_loaded_again", folder=folder, left=len(layout.left_names))
            self._server.load_checkpoint(folder, deadline_s)
        self._record.begin(layout.left_names, self._server.facts.identity if layout.left else "")

    def note_used(self, recorded: frozenset[str], used: frozenset[str]) -> None:
        """The server's loader was recorded with the tensors `recorded`, and loads memory from those `used`."""
        self._used = self._server.facts.identity, recorded, used
        self._predicted = None

    def require(self, layout: Manifest, label: str) -> None:
        """Raise `UnfitManifest` where `begin` would have to bring a server back that cannot be.

        Also for a server that was seen to have memory of its own for a copy.
        """
        if layout.copies and (apart := sorted(layout.copied.keys() & self._kept_apart)):
            raise UnfitManifest(
                f"{apart[0]} follows {layout.copied[apart[0]]}, which alone is sent, and the server keeps memory of its"
                " own for it, as its loader was recorded: have the trainer send it, too"
            )
        if layout.left and self._server.drafts and not self._known(layout, label):
            left = ", ".join(sorted(layout.left_names)[:_SHOWN])
            raise UnfitManifest(
                f"this version leaves {left} as the server was launched, which an earlier version, released memory or"
                " a sidecar before this one may have changed, and SGLang loads a launch checkpoint again without its"
                " draft models: launch the server anew, without speculation, or have the trainer send that part"
            )

    @property
    def _kept_apart(self) -> frozenset[str]:
        """Tensors that the server keeps memory for, as far as its loader was recorded."""
        identity, _, used = self._used
        return used if identity == self._server.facts.identity else frozenset()

    @property
    def _unused(self) -> frozenset[str]:
        """Tensors that the server keeps no memory for, as far as its loader was recorded."""
        identity, recorded, used = self._used
        return recorded - used if identity == self._server.facts.identity else frozenset()

    def _known(self, layout: Manifest, label: str) -> bool:
        facts = self._server.facts
        return self._record.known(layout.left_names, facts.identity, label, undefined=facts.undefined)

    def predicted(self, layout: Manifest, checkpoint: Path) -> dict[str, tuple[str, ...]] | None:
        """Live digests of the parameters that are left, by the files of `checkpoint`; None if nothing predicts them.

        Empty where the server was seen to keep nothing of what is left: a prediction layer without speculation.
        """
        key = (self._server.facts.identity, layout.digest())
        if self._predicted is None or self._predicted[0] != key:
            self._predicted = key, self._predict(layout, checkpoint)
        return self._predicted[1]

    def proven(self, layout: Manifest) -> bool:
        """Whether what `layout` leaves was proven in this process generation, and has not changed since."""
        return self._record.proven(layout.left_names, self._server.facts.identity)

    def check_files(self, layout: Manifest, folder: Path, checkpoint: Path) -> None:
        """The server has loaded `folder`. Raises `WrongWeights` if what `layout` does not send is another one there."""
        launched, found = stored_tensors(checkpoint), stored_tensors(folder)
        for name, each in found.items():
            if name in layout.copied and not _equal(each, found.get(of := layout.copied[name])):
                self._differs(f"{name!r}, a copy, is not in {folder} what {of!r} is there: write the folder again")
            if layout.leaves(name) and not _equal(each, launched.get(name)):
                self._differs(
                    f"{name!r}, which the version leaves, is not in {folder} what it is in {checkpoint}: give trainers"
                    " and engines the same checkpoint"
                )

    def _differs(self, detail: str) -> NoReturn:
        self.doubt()
        raise WrongWeights("/update_weights_from_disk", detail)

    def note_proven(self, layout: Manifest) -> None:
        """What `layout` leaves is that of the launch checkpoint."""
        self._record.note_proven(layout.left_names, self._server.facts.identity)

    def doubt(self) -> None:
        """It may not be: the server loads its launch checkpoint before the next version that leaves something."""
        self._record.doubt()

    def _predict(self, layout: Manifest, checkpoint: Path) -> dict[str, tuple[str, ...]] | None:
        algorithm, tp = self._server.digest_algorithm, self._server.tp
        stored = [each for name, each in stored_tensors(checkpoint).items() if layout.leaves(name)]
        if stored and all(each.spec.name in self._unused for each in stored):
            return {}
        stored = [each for each in stored if each.spec.name not in self._unused]
        held = {spec.name: spec for spec in self._server.expected_tensors(checkpoint)}
        if not algorithm or not stored or any(held.get(each.spec.name) != each.spec for each in stored):
            return None  # also where the server holds another dtype than its files
        left = Manifest.of(layout.model, [each.spec for each in stored])
        plan = SglangDigestPlan(left, [(algorithm, tp)], _head_dim(checkpoint))
        if not plan.layouts and not plan.on_gpu:
            return None  # without reading what may be gigabytes while requests wait
        digester = SglangDigester(plan)
        places = {each.spec.name: each for each in stored}
        for index in range(len(left.buckets)):
            digester.feed(index, _bucket(left.tensors_of(index), places))
        found = digester.result()
        return found[0].parameters if found else None


def _equal(one: StoredTensor, other: StoredTensor | None) -> bool:
    """Whether both have the same bytes, whatever their names."""
    if other is None or (one.spec.dtype, one.spec.shape) != (other.spec.dtype, other.spec.shape):
        return False
    pieces = zip(one.read(_PIECE_BYTES), other.read(_PIECE_BYTES), strict=True)
    return all(mine == others for mine, others in pieces)


def _bucket(tensors: tuple[TensorSpec, ...], places: dict[str, StoredTensor]) -> torch.Tensor:
    data = b"".join(part for spec in tensors for part in places[spec.name].read(_PIECE_BYTES))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _head_dim(checkpoint: Path) -> int | None:
    config = msgspec.json.decode((checkpoint / "config.json").read_bytes(), type=_Config)
    return config.head_dim or (config.hidden_size // config.num_attention_heads if config.num_attention_heads else None)
