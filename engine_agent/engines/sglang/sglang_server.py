"""One SGLang server over HTTP: `Engine` in the dialect of its version.

Calls that change the server are bound to the process generation that is pinned. SGLang takes no token of it with a
call, so the connection is what binds: it stays open only to the process that it was opened to. Where the agent sees
that the process behind the port is the server itself, it looks at that process before and after each call. Elsewhere
/server_info is asked first on each connection that such calls take, and again by `confirm`, for the sake of a proxy
that forwards each request by itself.

Calls are made in the order in which they are asked for, each with its own deadline; nothing is decided here. The server
reports neither whether a weight-update session is open nor which memory it has released, so both are kept here.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from weightbus.dataplane.processes import bracket_ipv6, parse_tcp_address
from weightbus.dataplane.tensors import Manifest, TensorSpec
from weightbus.dataplane.transports import Address, SharedBucket
from weightbus.dataplane.transports.distributed import StoreProxy

from ...errors import (
    AnotherGeneration,
    KeyRefused,
    NothingToGive,
    PauseEnded,
    ServerError,
    ServerRefused,
    ServerSilent,
    ServerUnreachable,
    StateUnreadable,
)
from ...state_file import write_durably
from .. import checkpoint_spec
from ..interface import CALL_S, Engine, Limitation, Observer, Sight
from ..local_process import ProcessesUnread, has_ended, listening_socket, loopback_of, workers_of
from ..registry import EngineConnection, Keys
from . import compatibility
from .compatibility import Dialect, dialect_of
from .group_watchdog import GroupWatchdog
from .http_client import HttpClient, NotBound, Way
from .pickle_payload import LOAD_FORMAT, LOADER, invitation, serialized
from .server_identity import WORKER, ServerFacts, facts_of, identity_of

LIVE_ON_CPU: Final = "sglang-sha256-8"
"""Digests that weights_checker reports for CPU tensors: the first 8 bytes of the SHA-256 of each parameter."""
LIVE_ON_GPU: Final = "sglang-fmix32-8"
"""... and for CUDA tensors: SGLang's gpu_tensor_hash (dataplane/digest/sglang_checksum.py predicts it)."""
_Answer = TypeVar("_Answer")
_UNAUTHORIZED: Final = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})
_API_KEY: Final = "name the file that holds the server's --api-key with --api-key-file"
_ADMIN_KEY: Final = (
    "name the file that holds the server's --admin-api-key (its --api-key, where it has no other) with"
    " --admin-api-key-file"
)
_JOIN: Final = "/init_weights_update_group"
_FLUSH_STEP_S: Final = 0.1
_LEFT: Final = 256
"""More than a session has groups: one for each stage of a pipeline."""
_LOOK_S: Final = 0.5
"""Deadline of the question before a pause: it is not put off for a server that is busy."""
_BINDINGS: Final = 3
"""Tries to find a connection for one call: a server closes idle ones when it likes."""
_HEALTH_S: Final = 1.8
"""A server that generates answers its health check after one second."""
_HEALTH_AGAIN_S: Final = 20.0
"""A paused server works on each health check for so long."""
_OTHERS: Final = 4
"""Connections over which a new address is asked who answers: a balancer that takes turns shows with the second."""


class SGLangServer:
    """Implements `Engine`, which says what each call promises, and from which thread it may come."""

    def __init__(
        self, url: str, keys: Keys | None = None, dialect: str = "", memory: MemoryOccupation | None = None
    ) -> None:
        """`memory` knows what the server has released; without one nothing outlives this object."""
        self.url = url
        self._memory = memory or MemoryOccupation()
        self._guarded = bool(keys and keys.admin)
        self._wire = HttpClient(url, keys or Keys())
        self._watchdog = GroupWatchdog(url, keys or Keys())
        self._override = dialect
        self._facts: ServerFacts | None = None
        self._unrecordable = ("", "")
        """Identity of the process generation whose loader cannot be traced, and the reason."""
        self._dialect: Dialect | None = None
        self._session = False
        self._dirty = False
        self._relay: StoreProxy | None = None
        self._left: deque[str] = deque(maxlen=_LEFT)
        """Groups that must not be joined any more: the thread that joins waits while another one leaves."""
        self._opens = ("", "")
        """Identity of a process generation, and where memory lies that its workers open."""
        self._held_dtypes: tuple[str, Mapping[str, frozenset[str]]] = "", {}
        """Identity of a process generation, and the dtypes that it holds each served tensor in."""
        self._pinned = ""
        self._seen = ("", False)
        """Identity of a process generation, and whether the process behind the port was seen to be the server."""
        self._health_at = float("-inf")
        """When a health check of a server that is not ready was last begun."""
        self.last_label = ""
        """The label as `identify` read it or `set_label` set it."""

    # -- identity

    def identify(self, deadline_s: float = CALL_S) -> ServerFacts:
        """Read what the server is, and choose the dialect. Raises `UnknownDialect` or `ServerError`."""
        try:
            server, model = self._wire.get("/server_info", deadline_s), self._wire.get("/model_info", deadline_s)
        except ServerRefused as refused:
            if self._facts is None and refused.status in _UNAUTHORIZED:
                raise KeyRefused(self.url, str(refused), _API_KEY) from refused
            raise
        facts = facts_of(server, model, self.url)
        identity = self._memory.identity_of(facts.identity)
        reason = self._unrecordable[1] if self._unrecordable[0] == identity else ""
        before = self._facts if self._facts is not None and self._facts.identity == identity else None
        socket = before.socket if before else listening_socket(self.url)
        facts = msgspec.structs.replace(
            facts, identity=identity, socket=socket, undefined=self._memory.undefined, unrecordable=reason
        )
        self._dialect = dialect_of(facts.version, self._override)
        known = before is not None
        if self._facts is not None and not known:
            self._session, self._dirty = False, False
            self._cut()
            self._wire.trust()
        if not known:
            self.last_label = facts.label
        self._facts = facts
        return facts

    def abandon(self, reason: str) -> None:
        """A worker of this process generation has died: calls under way end, and no more are made."""
        self._wire.give_up(reason)

    def pin(self, identity: str) -> None:
        """Change this process generation and no other from now on; an empty `identity` means any."""
        if identity != self._pinned:
            self._pinned = identity
            self._wire.unbind()

    def check_keys(self, deadline_s: float = CALL_S) -> None:
        """Call an admin endpoint without what it needs: the server looks at the key first, and carries out nothing."""
        try:
            self._wire.post("/weights_checker", None, deadline_s)
        except ServerRefused as refused:
            if refused.status in _UNAUTHORIZED:
                raise KeyRefused(self.url, str(refused), _ADMIN_KEY) from refused
        except ServerError:
            pass  # the monitor finds out what is wrong with it

    def explain(self, error: ServerError) -> str:
        """See `Engine`."""
        if isinstance(error, ServerRefused):
            if error.status in _UNAUTHORIZED:
                return f"the server at {self.url} refuses this agent: {error}; {_API_KEY}"
            if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
                return f"the server at {self.url} has not started: {error}"
            return f"{self.url} does not answer as an SGLang server: {error}; name the server's address with --server"
        if isinstance(error, ServerSilent):
            return f"the server at {self.url} has answered nothing: {error}"
        reason = error.reason.removeprefix(f"no connection to {self.url}: ")
        return f"no connection to {self.url}: {reason}; launch the server there, or name its address with --server"

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every call."""
        self._wire.observer = observer

    def mark_unrecordable(self, reason: str) -> None:
        """Note that the loader of this process generation cannot be traced."""
        self._unrecordable = self.facts.identity, reason
        self._facts = msgspec.structs.replace(self.facts, unrecordable=reason)

    @property
    def facts(self) -> ServerFacts:
        """The facts that `identify` read last."""
        if self._facts is None:
            raise ServerError("/server_info", "not read yet: identify first")
        return self._facts

    @property
    def dialect(self) -> Dialect:
        """How this server's version speaks."""
        if self._dialect is None:
            raise ServerError("/server_info", "not read yet: identify first")
        return self._dialect

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks: how many payloads a call carries."""
        return self.facts.tp

    @property
    def drafts(self) -> bool:
        """True with speculative decoding: calls of a loader are for the draft models too."""
        return bool(self.facts.speculative)

    @property
    def launch(self) -> str:
        """Identity of this process generation."""
        return self.facts.identity

    @property
    def opens(self) -> str:
        """See `EngineServer`."""
        identity, where = self._opens
        return where if identity == self.facts.identity else ""

    def set_reachable_memory(self, identity: str, where: str) -> None:
        """Note where memory has to lie for the workers of one process generation to open it."""
        self._opens = identity, where

    def workers(self) -> Mapping[int, int]:
        """Start time of each worker by its process id; none of a server that lives on without some of its workers."""
        facts = self.facts
        return workers_of(facts.process[0], WORKER) if facts.process and not facts.moves_experts else {}

    # -- what fits it

    def transports(self) -> tuple[str, ...]:
        """Transports that can serve it, best first."""
        return compatibility.transports_of(self.facts)

    def missing_transports(self) -> Mapping[str, Limitation]:
        """The other transports, each with the reason."""
        return compatibility.missing(self.facts)

    def limitations(self) -> Iterable[Limitation]:
        """Reasons why `transports` has fewer than it might have."""
        return compatibility.limits(self.facts)

    def refusals(self, checkpoint: Path) -> Iterable[str]:
        """Reasons why every version will be refused, as far as the served checkpoint tells."""
        return compatibility.refusals(self.facts, self.dialect, checkpoint)

    def check(self, manifest: Manifest, transport: str, checkpoint: Path) -> None:
        """Raise `UnfitManifest` with everything that speaks against loading `manifest`; see `Engine.check`."""
        expected = checkpoint_spec.expected(checkpoint)
        compatibility.check(manifest, self.facts, self.dialect, expected, transport, held=self._held())

    def casts(self, manifest: Manifest, checkpoint: Path) -> Mapping[str, str]:
        """See `Engine`."""
        return compatibility.casts(manifest, self.facts, checkpoint_spec.expected(checkpoint), self._held())

    def note_held_dtypes(self, held: Mapping[str, frozenset[str]]) -> None:
        """Note the dtypes of the parameters that each tensor of a version is loaded into, of this generation."""
        self._held_dtypes = self.facts.identity, held

    def _held(self) -> Mapping[str, frozenset[str]]:
        identity, held = self._held_dtypes
        return held if identity == self.facts.identity else {}

    def expected_tensors(self, checkpoint: Path) -> tuple[TensorSpec, ...]:
        """The checkpoint's tensors in the dtypes that are served. Raises `UnfitManifest` if one is not known."""
        return compatibility.tensors_of(self.facts, checkpoint_spec.expected(checkpoint))

    def prerecording_objection(self, checkpoint: Path) -> str:
        """Why the loader must not be called outside of a round; empty when it may be."""
        if self._memory.released or self.facts.undefined:
            return "the server has released its memory"
        return compatibility.prerecording_objection(self.facts, self.dialect, checkpoint_spec.expected(checkpoint))

    # -- health

    def label(self, deadline_s: float = CALL_S) -> str:
        """The server's ``weight_version``. Answered without its scheduler, so it does not prove that it generates."""
        return str(self._wire.get("/model_info", deadline_s).get("weight_version", ""))

    def alive(self, deadline_s: float = CALL_S) -> None:
        """Raise `ServerError` unless the HTTP side answers."""
        self._wire.alive("/health", deadline_s)

    def answers(self, deadline_s: float = CALL_S) -> None:
        """Raise `ServerError` unless its workers answer. A paused server's do."""
        if self._pinned:
            self._bind("/server_info", deadline_s)  # the same question
        else:
            self._wire.get("/server_info", deadline_s)

    def generates(self, deadline_s: float = CALL_S) -> None:
        """Raise `ServerError` unless its workers generate something now. A paused server does not."""
        self._wire.alive("/health_generate", deadline_s)

    def idle(self, deadline_s: float = CALL_S) -> bool:
        """Whether it has no request now. Raises `ServerError` where the answer does not tell.

        The answer is of the end of the last batch: a first batch of a long prompt does not show before its end.
        """
        loads = _read("/v1/loads", self._wire.get("/v1/loads", deadline_s).get("loads"), list[_Load])
        if not loads:
            raise ServerRefused("/v1/loads", HTTPStatus.OK, "no list of loads in the answer")
        return not any(each.num_running_reqs or each.num_waiting_reqs or each.num_used_tokens for each in loads)

    # -- pausing and labeling

    def look_ahead(self, deadline_s: float = CALL_S) -> None:
        """Bind a connection now, so that no call of the pause that follows has to ask."""
        if self._pinned and not self._is_seen() and not self._wire.bound:
            with contextlib.suppress(ServerError):
                self._bind("/pause_generation", min(deadline_s, _LOOK_S))

    def pause(self, mode: str, deadline_s: float = CALL_S) -> None:
        """pause_generation: when it returns, any further call finds the server paused.

        A question that is not answered in time keeps no server from its pause: the calls that follow ask then.
        """
        path, body, way = "/pause_generation", {"mode": mode}, Way.ANY
        if self._pinned and not self._is_seen() and not self._wire.bound:
            try:
                self._bind(path, min(deadline_s, _LOOK_S))
            except AnotherGeneration:
                raise
            except ServerError:
                return self._wire.post(path, body, deadline_s, way)
        return self._bound(path, deadline_s, lambda left, way: self._wire.post(path, body, left, way))

    def resume(self, deadline_s: float = CALL_S) -> None:
        """continue_generation, with all memory. Harmless when nothing is paused."""
        self.resume_memory(deadline_s)
        self._admin("/continue_generation", {"torch_empty_cache": False}, deadline_s)

    def flush(self, deadline_s: float = CALL_S) -> None:
        """flush_cache until it succeeds: it is refused while a request runs, and a retract takes its time."""
        until = time.monotonic() + deadline_s
        refused: ServerRefused | None = None
        while (left := until - time.monotonic()) > 0 or refused is None:
            try:
                return self._post("/flush_cache", None, max(left, 0.001))
            except ServerRefused as error:
                refused = error
            except ServerSilent:
                if refused is None:
                    raise
                break
            time.sleep(_FLUSH_STEP_S)
        raise refused

    def set_label(self, label: str, deadline_s: float = CALL_S) -> None:
        """update_weight_version, without aborting requests (its default would)."""
        self._admin("/update_weight_version", {"new_version": label, "abort_all_requests": False}, deadline_s)
        self.last_label = label

    def confirm(self, call: str, deadline_s: float = CALL_S) -> None:
        """See `Engine`. Asks nothing where the process behind the port is seen to be the server."""
        if self._pinned:
            self._require_pinned(call, asked=True)
            if not self._is_seen():
                self._bind(call, deadline_s, asked=True)

    def confirm_paused(self, call: str, deadline_s: float = CALL_S) -> None:
        """See `Engine`. Not asked where an admin key keeps strangers out, or where SGLang does not tell."""
        if not self._guarded and self.dialect.tells_ready and self._ready(deadline_s):
            raise PauseEnded(call)

    def confirm_label(self, call: str, deadline_s: float = CALL_S) -> None:
        """See `Engine`. Asks nothing where the process behind the port is seen to be the server.

        Another launch has another label than a version's. The label is answered without the scheduler, which has
        requests to work on by now.
        """
        if not self._pinned or self._is_seen():
            return
        info = self._bound("/model_info", deadline_s, lambda left, way: self._wire.get("/model_info", left, way))
        if str(info.get("weight_version", "")) != self.last_label:
            self._wire.unbind()
            raise AnotherGeneration(call, asked=True)

    # -- watching

    @property
    def samples(self) -> int:
        """See `Engine`. Servers that move experts change their own weights."""
        facts, dialect = self.facts, self.dialect
        able = dialect.checksums if facts.device == "cuda" else dialect.cpu_checksums
        if not able or facts.moves_experts or self._memory.released:
            return 0
        return 2 if dialect.partial_checksums else 1

    def sample(self, without: Sequence[str], deadline_s: float) -> list[dict[str, str]]:
        """By rank: digests of the live parameters whose names have none of the parts `without`."""
        body: dict[str, object] = {"action": "checksum"}
        if without:
            body["skip_tensor_list"] = list(without)
        return _checksums(self._wire.admin("/weights_checker", body, deadline_s))

    def look(self, deadline_s: float) -> Sight:
        """See `Engine`. A server whose scheduler does not answer in time has no identity in the answer."""
        identity, facts = self.facts.identity, self.facts
        if not self._is_seen():
            try:
                info = self._wire.get("/server_info", deadline_s)
                identity = self._memory.known_as(identity_of(info, facts.process))
            except ServerSilent:
                identity = ""
        generates = self._generates(deadline_s) if self.dialect.tells_ready else None
        return Sight(identity, self.label(deadline_s), generates)

    def answering(self, deadline_s: float) -> set[str]:
        """See `Engine`."""
        facts = self.facts
        if self._is_seen():
            return {facts.identity}
        said = [self._wire.get("/server_info", deadline_s, Way.NEW) for _ in range(_OTHERS)]
        return {self._memory.known_as(identity_of(info, facts.process)) for info in said}

    def _generates(self, deadline_s: float) -> bool:
        """Whether it is ready. SGLang also answers 503 while its last health check got no answer: that is repeated."""
        if self._ready(deadline_s):
            return True
        if time.monotonic() < self._health_at + _HEALTH_AGAIN_S:
            return False
        self._health_at = time.monotonic()
        try:
            self._wire.alive("/health", min(deadline_s, _HEALTH_S))
        except ServerError:
            return False
        self._health_at = float("-inf")
        return True

    def _ready(self, deadline_s: float) -> bool:
        return self._wire.status("/ready", deadline_s) == HTTPStatus.OK

    # -- memory

    @property
    def weights_released(self) -> bool:
        """True while the server has released the memory of the weights."""
        return WEIGHTS in self._memory.released

    def prepare_release(self, deadline_s: float = CALL_S) -> ServerFacts:
        """End every request and take another identity: the weights are about to be released."""
        if not self.facts.gives_back:
            raise NothingToGive(
                "this server keeps its memory whatever it is asked: launch it with --enable-memory-saver"
            )
        if self._memory.released:
            raise NothingToGive(f"the server has given {', '.join(self._memory.released)} back already")
        self.pause("abort", deadline_s)
        self._memory.begin_release()
        return self.identify(deadline_s)

    def release_memory(self, deadline_s: float = CALL_S) -> None:
        """release_memory_occupation, of everything. After `prepare_release`: a server that is not idle ends by it."""
        self._memory.note_released()
        try:
            self._post("/release_memory_occupation", {"tags": list(TAGS)}, deadline_s)
        except ServerRefused:
            for tag in TAGS:
                self._memory.note_resumed(tag)
            raise

    def resume_weights_memory(self, deadline_s: float = CALL_S) -> None:
        """resume_memory_occupation of the weights, if they were released. Their content is undefined then."""
        self._resume_memory((WEIGHTS,), deadline_s)

    def resume_memory(self, deadline_s: float = CALL_S) -> None:
        """... and of all the rest. Raises `ServerError` while the weights are still released."""
        if self.weights_released:
            raise ServerError("/resume_memory_occupation", "not made: the server has given its weights back")
        self._resume_memory(TAGS, deadline_s)

    def _resume_memory(self, tags: Sequence[str], deadline_s: float) -> None:
        for tag in self._memory.released:
            if tag in tags:
                self._post("/resume_memory_occupation", {"tags": [tag]}, deadline_s)
                self._memory.note_resumed(tag)

    # -- weights

    @property
    def updating(self) -> bool:
        """True while a session is open, which `end_update` has to close before anything generates."""
        return self._session

    @property
    def dirty(self) -> bool:
        """True once a call that changes weights has been made since `clear_dirty`."""
        return self._dirty

    def clear_dirty(self) -> None:
        """Forget earlier updates: a new transfer begins."""
        self._dirty = False

    @property
    def digest_algorithm(self) -> str:
        """Algorithm of `live_digests`; empty when the server cannot report them, or the trainer not predict them.

        Predictions follow the tensor-parallel size, which does not tell how attention data parallelism cuts weights. Of
        several replicas or stages every rank reports, and predicted are those of one.
        """
        dialect, facts = self.dialect, self.facts
        if facts.dp_attention or facts.dp > 1 or facts.pp > 1:
            return ""
        if facts.device == "cuda" and dialect.checksums:
            return LIVE_ON_GPU
        return LIVE_ON_CPU if facts.device == "cpu" and dialect.cpu_checksums else ""

    def live_digests(self, deadline_s: float = CALL_S) -> list[dict[str, str]]:
        """By rank: the digest of every live parameter under SGLang's own names."""
        return _checksums(self._admin("/weights_checker", {"action": "checksum"}, deadline_s))

    def load_shared(self, bucket: SharedBucket, deadline_s: float) -> None:
        """update_weights_from_tensor with a bucket that every rank maps by itself."""
        body: dict[str, object] = {
            "serialized_named_tensors": serialized(bucket, self.tp),
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
        }
        self._update("/update_weights_from_tensor", body, deadline_s)

    def load_direct(self, socket: str, deadline_s: float) -> None:
        """update_weights_from_tensor with our loader: each worker connects to `socket` until it is let go.

        By itself it changes nothing, so the receiver that leads the workers tells whether weights are dirty. The server
        must have been started with ``--custom-weight-loader`` and this loader: an unknown one ends it.
        """
        started = time.monotonic()
        path = "/update_weights_from_tensor"
        self._begin_update(deadline_s)
        body: dict[str, object] = {
            "serialized_named_tensors": invitation(socket, self.tp),
            "load_format": LOADER,
            "flush_cache": False,
        }
        self._admin(path, body, max(deadline_s - (time.monotonic() - started), 0.001))

    def load_broadcast(self, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """update_weights_from_distributed; the group's rank 0 broadcasts the packed tensors meanwhile."""
        body: dict[str, object] = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
        }
        self._update("/update_weights_from_distributed", body, deadline_s)

    def load_checkpoint(self, path: str, deadline_s: float) -> None:
        """update_weights_from_disk. Needs no session. The server must see `path` under the same name.

        The load format is named, because a server that was started with ``--load-format dummy`` refuses its own.
        """
        self._admin(
            "/update_weights_from_disk",
            {"model_path": path, "load_format": "auto", "flush_cache": False},
            deadline_s,
            touches=True,
        )

    def join_group(self, address: Address, rank_offset: int, deadline_s: float) -> None:
        """init_weights_update_group. Stops the server's scheduler until the whole group has come, or `leave_group`."""
        host, port = self._met_at(address)
        body = {
            "master_address": bracket_ipv6(host),
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": address.world_size,
            "group_name": address.group,
            "backend": address.backend,
        }
        self._admin(_JOIN, body, deadline_s)

    def leave_group(self, group: str, deadline_s: float) -> None:
        """destroy_weights_update_group; no error when the server is not in it (an agent before us may have left it).

        A group that is still forming does not form any more, which frees the server for other calls.
        """
        self._left.append(group)  # first: a `join_group` on another thread finds this or the cut relay
        self._cut()
        try:
            self._wire.admin("/destroy_weights_update_group", {"group_name": group}, deadline_s)
        except ServerRefused as refused:
            if refused.status != HTTPStatus.BAD_REQUEST:
                raise

    def watch_groups(self, groups: Sequence[str], *, used: bool) -> bool:
        """Have the watchdog leave these groups if this process ends or, while they are `used`, stands still."""
        return self._watchdog.watch_groups(groups, used=used)

    def end_update(self, deadline_s: float = CALL_S) -> None:
        """Close the session, if one is open. Does not tell whether the updates in it worked."""
        if self._session:
            self._session = False
            self._admin("/end_weight_update", {}, deadline_s)

    def close(self) -> None:
        """Drop the connections."""
        self._cut()
        self._watchdog.close()
        self._wire.close()

    def _met_at(self, address: Address) -> tuple[str, int]:
        """Host and port where the server finds the store of a group; all groups of a session share one store.

        Raises `ServerError` for a group that was left meanwhile: nothing would end the server's wait in it.
        """
        to = parse_tcp_address(address.address)
        relay = self._relay
        if relay is None or relay.to != to:
            self._cut()
            relay = None
            if at := loopback_of(self.url):
                with contextlib.suppress(OSError):  # then it is met as it was before there were relays
                    relay = self._relay = StoreProxy(*to, at)
        if address.group in self._left:
            self._cut()
            raise ServerError(_JOIN, f"not made: {address.group} was left before")
        return relay.at if relay is not None else to

    def _cut(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.cut()

    def _update(self, path: str, body: dict[str, object], deadline_s: float) -> None:
        started = time.monotonic()
        self._begin_update(deadline_s)
        self._admin(path, body, max(deadline_s - (time.monotonic() - started), 0.001), touches=True)

    def _begin_update(self, deadline_s: float) -> None:
        """Open a session where the dialect has them. One left open by an agent that died is closed first."""
        if self._session or not self.dialect.sessions:
            return
        try:
            self._admin("/begin_weight_update", {}, min(deadline_s, CALL_S))
        except ServerRefused:
            self._admin("/end_weight_update", {}, min(deadline_s, CALL_S))
            self._admin("/begin_weight_update", {}, min(deadline_s, CALL_S))
        self._session = True

    # -- one process generation

    def _admin(
        self, path: str, body: Mapping[str, object], deadline_s: float, *, touches: bool = False
    ) -> dict[str, object]:
        """A call to the pinned process generation. `touches`: weights count as changed once it may have arrived."""

        def make(left_s: float, way: Way) -> dict[str, object]:
            before, self._dirty = self._dirty, self._dirty or touches
            try:
                return self._wire.admin(path, body, left_s, way)
            except NotBound:
                self._dirty = before
                raise

        return self._bound(path, deadline_s, make)

    def _post(self, path: str, body: Mapping[str, object] | None, deadline_s: float) -> None:
        self._bound(path, deadline_s, lambda left, way: self._wire.post(path, body, left, way))

    def _bound(self, path: str, deadline_s: float, make: Callable[[float, Way], _Answer]) -> _Answer:
        """Make a call that meets the process generation that is pinned, or raise `AnotherGeneration` instead.

        A server that was launched anew generates from weights of its own: a bucket or a label would make them lie. The
        sidecar may have been stopped while that happened.
        """
        if not self._pinned:
            return make(deadline_s, Way.ANY)
        self._require_pinned(path)
        if self._is_seen():
            answer = make(deadline_s, Way.ANY)
            self._require_pinned(path, asked=True)
            return answer
        until = time.monotonic() + deadline_s
        for _ in range(_BINDINGS):
            try:
                return make(max(until - time.monotonic(), 0.001), Way.BOUND)
            except NotBound:
                self._bind(path, max(min(until - time.monotonic(), CALL_S), 0.001))
        raise ServerUnreachable(path, "the server closes every connection")

    def _require_pinned(self, path: str, *, asked: bool = False) -> None:
        """Raise `AnotherGeneration` where it is known without a question that the pinned one is gone."""
        process = self.facts.process
        if self.facts.identity != self._pinned or (process is not None and has_ended(*process)):
            raise AnotherGeneration(path, asked=asked)

    def _bind(self, path: str, deadline_s: float, *, asked: bool = False) -> None:
        """Ask who answers, on a bound connection or one that is bound from now on. Raises `AnotherGeneration`."""
        self._require_pinned(path, asked=asked)
        try:
            info = self._wire.get("/server_info", deadline_s, Way.BINDING)
        except ServerError:
            self._wire.unbind()
            raise
        if self._memory.known_as(identity_of(info, self.facts.process)) != self._pinned:
            self._wire.unbind()
            raise AnotherGeneration(path, asked=asked)

    def _is_seen(self) -> bool:
        """Whether the process behind the port is the server: its workers are below it, so that it forwards nothing."""
        facts = self.facts
        if self._seen[0] != facts.identity:
            process = facts.process
            try:
                self._seen = facts.identity, process is not None and bool(workers_of(process[0], WORKER))
            except ProcessesUnread:
                return False  # for this call
        return self._seen[1]


def open_engine(connection: EngineConnection) -> Engine:
    """The server behind `connection`. Raises `StateUnreadable` for a memory file that cannot be read."""
    memory = MemoryOccupation(connection.memory_file)
    return SGLangServer(connection.url, connection.keys, connection.dialect, memory)


class _Load(msgspec.Struct):
    """Work of one scheduler, in the answer of /v1/loads."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int = 0
    """In use, not only cached. Also of a request in its prefill, which counts neither as running nor as waiting."""


class _Rank(msgspec.Struct):
    """Digests of one rank, in the answer of /weights_checker."""

    checksums: dict[str, str | int]


def _checksums(answer: Mapping[str, object]) -> list[dict[str, str]]:
    ranks = _read("/weights_checker", answer.get("ranks"), list[_Rank])
    return [{name: str(value) for name, value in rank.checksums.items()} for rank in ranks]


def _read(path: str, answer: object, kind: type[_Answer]) -> _Answer:
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise ServerRefused(path, HTTPStatus.OK, f"not an answer of a known SGLang: {error}") from error


WEIGHTS: Final = "weights"
TAGS: Final = ("kv_cache", WEIGHTS, "cuda_graph")
"""SGLang's names, in the order of release."""


class _Released(msgspec.Struct, frozen=True):
    """The content of the file."""

    launch: str = ""
    """Identity of the launch, without releases."""
    times: int = 0
    """Releases of this launch."""
    tags: tuple[str, ...] = ()
    """Memory that is released now."""


class MemoryOccupation:
    """The released GPU memory of one server, by its tags. Used by the thread that calls the server.

    SGLang does not report what it has released, and ends when it is asked to resume something twice. So a release is
    written to disk before the server is asked, by launch; another launch has all of its memory.

    Resumed memory has undefined content, so a server that has released its weights gets another identity: facts about
    the one before, its committed version above all, do not hold of it. Then the rule for every server that is launched
    again applies: it generates nothing until a version was received, verified and committed.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Kept in the file `path`; in memory alone without one. Raises `StateUnreadable`."""
        self._path = path
        self._content = _released_in(path)

    @property
    def released(self) -> tuple[str, ...]:
        """Tags of the memory that is released now."""
        return self._content.tags

    @property
    def undefined(self) -> bool:
        """True if the weights were released since the launch."""
        return self._content.times > 0

    def identity_of(self, launch: str) -> str:
        """Identity of a server of this launch, another one after each release. Forgets other launches."""
        if launch != self._content.launch:
            self._content = _Released(launch)
        return f"{launch}+{self._content.times}" if self._content.times else launch

    def known_as(self, launch: str) -> str:
        """As `identity_of`, without forgetting anything."""
        times = self._content.times if launch == self._content.launch else 0
        return f"{launch}+{times}" if times else launch

    def begin_release(self) -> None:
        """The weights are about to be released: from now on `identity_of` gives another identity. Raises OSError."""
        self._keep(msgspec.structs.replace(self._content, times=self._content.times + 1))

    def note_released(self) -> None:
        """All memory is about to be released. Raises OSError."""
        self._keep(msgspec.structs.replace(self._content, tags=TAGS))

    def note_resumed(self, tag: str) -> None:
        """The server has the memory of `tag` again. Raises OSError."""
        self._keep(msgspec.structs.replace(self._content, tags=tuple(each for each in self.released if each != tag)))

    def _keep(self, content: _Released) -> None:
        if self._path is not None:
            write_durably(self._path, msgspec.json.encode(content))
        self._content = content


def _released_in(path: Path | None) -> _Released:
    if path is None:
        return _Released()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Released)
    except FileNotFoundError:
        return _Released()
    except (OSError, ValueError) as error:
        raise StateUnreadable(
            f"cannot tell from {path} what memory the server has given back ({error}): restart the server, then delete"
            " the file"
        ) from error
