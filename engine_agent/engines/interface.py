"""The seam between the sidecar and an inference server: `Engine`, and the plain data that it reports.

One implementation lies in a folder of its own (sglang/) and is named in registry.py; the sidecar imports neither. The
contract that all of them satisfy is tests/engine_agent/engines/engine_contract.py.

An `Engine` makes calls in the order in which it is told, each with its own deadline, and decides nothing about rounds.
It keeps the facts that only the caller of the server can know: the process generation that is meant, whether an update
session is open, whether a weight may have changed (`dirty`), and which memory the server has released.

The calls have counterparts in SGLang's HTTP interface and in vLLM's weight-transfer routes:

    Engine                          SGLang                              vLLM (VLLM_SERVER_DEV_MODE=1)
    identify, label                 /server_info, /model_info           /weight_info
    pause(in_place/retract/abort)   /pause_generation                   /pause?mode=keep/wait/abort
    load_direct                     /update_weights_from_tensor         /start_weight_update, /update_weights
    end_update                      /end_weight_update                  /finish_weight_update
    set_label                       /update_weight_version              weight_version of /finish_weight_update
    live_digests                    /weights_checker                    /weight_checker
    resume                          /continue_generation                /resume (/is_paused tells)
    release_memory, resume_memory   /release_memory_occupation, ...     sleep mode
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol

import msgspec

from weightbus.dataplane.tensors import Manifest, TensorSpec
from weightbus.dataplane.transports import EngineServer

from ..errors import ServerError

CALL_S: Final = 30.0
"""Deadline of a call that only changes a flag. The server answers it at once unless its scheduler is stuck."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one process generation of a server. `label` and `model_path` as they were when read."""

    ONE_GPU_VARIABLE: ClassVar[str] = ""
    """Environment variable of the server that hides from each worker all GPUs but its own; empty if there is none."""

    identity: str
    """Tells this process generation from every other one, and from itself before it released its weights."""
    generation: str = ""
    """Process generation by the server's own account: the same for every agent that reaches it, at whatever address.

    Empty where the server tells nothing that another launch would not tell too."""
    socket: str = ""
    """`local_process.listening_socket` of the server; empty where it is not seen from here."""
    version: str
    """Of the server's software."""
    tp: int
    """Tensor-parallel ranks."""
    pp: int
    """Pipeline stages."""
    dp: int
    """Replicas that are loaded apart."""
    device: str
    """``cpu`` or ``cuda``."""
    model_path: str
    """Checkpoint, under the server's own name for it."""
    architectures: tuple[str, ...]
    label: str
    """Version of the weights as the server reports it to clients."""
    process: tuple[int, int] | None = None
    """Process id and start time behind the port, where this machine can see them."""
    undefined: bool = False
    """True if the weights were released since the launch: their content is undefined until a version is loaded."""
    unrecordable: str = ""
    """Why the loader cannot be traced, once that has been found out; empty before."""
    gpus: tuple[int, ...] = ()
    """Index of each worker's GPU among those that the server sees, by rank; empty where the settings do not tell."""

    @property
    def layout(self) -> tuple[object, ...]:
        """The part of the facts that the coordinator is told once: while it is equal the sidecar need not rejoin."""
        return self.version, self.device, self.tp, self.pp, self.dp


class Limitation(NamedTuple):
    """Why a server cannot take some transport."""

    found: str
    needed: str
    """The change that would lift it."""


class Sight(NamedTuple):
    """What a server reveals of itself at one moment."""

    identity: str
    """`EngineFacts.identity`; empty where the workers did not answer in time."""
    label: str
    generates: bool | None
    """False for a server that is paused; None where the engine does not tell."""


class Observer(Protocol):
    """Is told of every call, on the thread that made it."""

    def __call__(self, call: str, seconds: float, *, failed: bool) -> None:
        """`call` took that many seconds."""
        ...


class Engine(EngineServer, Protocol):
    """One inference server. `EngineServer`, its base, has the calls that transports make.

    `identify` must come first. One thread makes the calls; `label`, `alive`, `identify` and `abandon` may come from
    another. Every call blocks at most until its deadline (seconds from the call) and raises `ServerError` on failure.
    """

    # -- identity

    @property
    def facts(self) -> EngineFacts:
        """The facts that `identify` read last. Raises `ServerError` before."""
        ...

    @property
    def last_label(self) -> str:
        """The label as `identify` read it or `set_label` set it; any other is the work of a stranger."""
        ...

    def identify(self, deadline_s: float = CALL_S) -> EngineFacts:
        """Read what the server is. A new process generation has no open session and is not dirty."""
        ...

    def pin(self, identity: str) -> None:
        """Change this process generation and no other from now on; an empty `identity` means any."""
        ...

    def workers(self) -> Mapping[int, int]:
        """Start time of each worker process by its id, where one that ends takes the server along and is seen here."""
        ...

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every call."""
        ...

    def set_reachable_memory(self, identity: str, where: str) -> None:
        """Note where memory has to lie for the workers of one process generation to open it (`opens`)."""
        ...

    def mark_unrecordable(self, reason: str) -> None:
        """Note that the loader of this process generation cannot be traced."""
        ...

    def abandon(self, reason: str) -> None:
        """End calls under way and make no more: a worker of this process generation has died. From any thread."""
        ...

    def close(self) -> None:
        """Drop the connections. The server is left as it is."""
        ...

    def check_keys(self, deadline_s: float = CALL_S) -> None:
        """Raise `KeyRefused` if the server does not let this agent change it. Changes nothing."""
        ...

    def explain(self, error: ServerError) -> str:
        """Why the server cannot be used, and what to do. Its duration may be put before the first colon and space."""
        ...

    # -- what fits it

    def transports(self) -> tuple[str, ...]:
        """Transports that can serve it, best first."""
        ...

    def missing_transports(self) -> Mapping[str, Limitation]:
        """The other transports, each with the reason."""
        ...

    def limitations(self) -> Iterable[Limitation]:
        """Reasons why `transports` has fewer than it might have."""
        ...

    def refusals(self, checkpoint: Path) -> Iterable[str]:
        """Reasons why every version will be refused, as far as the served checkpoint tells; empty where it is fine."""
        ...

    def check(self, manifest: Manifest, transport: str, checkpoint: Path) -> None:
        """Raise `UnfitManifest` with everything that speaks against loading `manifest`. Asks the server nothing."""
        ...

    def casts(self, manifest: Manifest, checkpoint: Path) -> Mapping[str, str]:
        """Tensors of `manifest` that the server casts, as far as that is known, and the dtype in which it holds each.

        Its digests of them are of other bytes than the trainer's.
        """
        ...

    def note_held_dtypes(self, held: Mapping[str, frozenset[str]]) -> None:
        """Note the dtypes of the parameters that each tensor of a version is loaded into, of this generation."""
        ...

    def expected_tensors(self, checkpoint: Path) -> tuple[TensorSpec, ...]:
        """Tensors of the served checkpoint, in the dtypes that are served. Raises `UnfitManifest` if not known."""
        ...

    def prerecording_objection(self, checkpoint: Path) -> str:
        """Why the loader must not be called outside of a round; empty when it may be."""
        ...

    # -- health

    def label(self, deadline_s: float = CALL_S) -> str:
        """The label now. Answered without the workers, so it does not prove that they generate."""
        ...

    def alive(self, deadline_s: float = CALL_S) -> None:
        """Return if the server has started. Refused at once while it starts, unanswered while it is paused."""
        ...

    def answers(self, deadline_s: float = CALL_S) -> None:
        """Return if its workers answer. A paused server's do."""
        ...

    def generates(self, deadline_s: float = CALL_S) -> None:
        """Return if its workers generate something now. A paused server does not."""
        ...

    def idle(self, deadline_s: float = CALL_S) -> bool:
        """Return whether it has no request now."""
        ...

    # -- pausing and labeling

    def look_ahead(self, deadline_s: float = CALL_S) -> None:
        """Look now whether this is the process generation that is pinned, so that `pause` need not."""
        ...

    def confirm(self, call: str, deadline_s: float = CALL_S) -> None:
        """Raise `AnotherGeneration` unless every call since the pin met the process generation that is pinned.

        For engines whose calls do not tell that by themselves, behind a proxy say. `call` is named in the error.
        """
        ...

    def confirm_paused(self, call: str, deadline_s: float = CALL_S) -> None:
        """Raise `PauseEnded` if another party let the server generate, where such a party could and that shows."""
        ...

    def confirm_label(self, call: str, deadline_s: float = CALL_S) -> None:
        """As `confirm`, once the server generates: by its label, without its workers."""
        ...

    def pause(self, mode: str, deadline_s: float = CALL_S) -> None:
        """Stop generating: ``abort`` ends requests, ``retract`` recomputes them afterwards, ``in_place`` keeps them.

        When it returns, any further call finds the server paused. A server that is too busy to say who it is is paused
        all the same.
        """
        ...

    def resume(self, deadline_s: float = CALL_S) -> None:
        """Generate again, with all memory. Harmless when nothing is paused."""
        ...

    def flush(self, deadline_s: float = CALL_S) -> None:
        """Drop the KV cache, which was computed with other weights."""
        ...

    def set_label(self, label: str, deadline_s: float = CALL_S) -> None:
        """Set the version that the server reports to clients. Ends no request."""
        ...

    # -- weights

    @property
    def updating(self) -> bool:
        """True while an update session is open, which `end_update` has to close before anything generates."""
        ...

    @property
    def dirty(self) -> bool:
        """True once a call that changes weights has been made since `clear_dirty`."""
        ...

    def clear_dirty(self) -> None:
        """Forget earlier updates: a new transfer begins."""
        ...

    def end_update(self, deadline_s: float = CALL_S) -> None:
        """Close the update session, if one is open."""
        ...

    @property
    def digest_algorithm(self) -> str:
        """Algorithm of `live_digests`; empty when the server cannot report them, or the trainer not predict them."""
        ...

    def live_digests(self, deadline_s: float = CALL_S) -> list[dict[str, str]]:
        """By rank: the digest of every live parameter under the server's own names."""
        ...

    # -- watching: from another thread, without changing anything

    def look(self, deadline_s: float) -> Sight:
        """Return what the server reveals now."""
        ...

    def answering(self, deadline_s: float) -> set[str]:
        """Identities that answer at the address, asked over several connections."""
        ...

    @property
    def samples(self) -> int:
        """Whether live digests may be asked for while the server serves: 0 not, 1 all at once, 2 also of some."""
        ...

    def sample(self, without: Sequence[str], deadline_s: float) -> list[dict[str, str]]:
        """By rank: digests of the live parameters whose names contain none of `without`. Predicted by no trainer."""
        ...

    # -- memory

    @property
    def weights_released(self) -> bool:
        """True while the server has released the memory of the weights."""
        ...

    def prepare_release(self, deadline_s: float = CALL_S) -> EngineFacts:
        """End every request and take another identity: the weights are about to be released.

        Raises `NothingToGive` for a server that cannot release memory, or has none left to release.
        """
        ...

    def release_memory(self, deadline_s: float = CALL_S) -> None:
        """Release all GPU memory, after `prepare_release`."""
        ...

    def resume_weights_memory(self, deadline_s: float = CALL_S) -> None:
        """Take the memory of the weights again, if it was released. The content of the weights is undefined then."""
        ...

    def resume_memory(self, deadline_s: float = CALL_S) -> None:
        """Take all other memory again. Raises `ServerError` while that of the weights is still released."""
        ...
