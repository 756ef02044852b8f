"""One SGLang server over HTTP: what it is, and everything the agent asks of it.

Nothing here decides: it makes calls in the order in which it is told, each with its own deadline, and keeps the two
facts that only the caller of the server can know: whether a weight-update session is open, and whether any weight may
have changed (`touched`).
"""

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from weightbus.dataplane.processes import bracket_ipv6, parse_tcp_address
from weightbus.dataplane.tensors import TensorSpec
from weightbus.dataplane.transports import Address, SharedBucket
from weightbus.dataplane.transports.distributed import StoreProxy

from ...errors import AnotherGeneration, NothingToGive, ServerError, ServerRefused, ServerSilent
from .api_versions import Dialect, dialect_of
from .group_watchdog import GroupWatchdog
from .http_client import HttpClient, Keys, Observer
from .memory_occupation import TAGS, WEIGHTS, MemoryOccupation
from .pickle_payload import LOAD_FORMAT, LOADER, invitation, serialized
from .reachability_probe import reached_at
from .server_identity import ServerFacts, facts_of, start_time

CALL_S: Final = 30.0
"""For calls that only change a flag. The server answers them at once unless its scheduler is stuck."""
_JOIN: Final = "/init_weights_update_group"
_REQUESTS: Final = ("num_running_reqs", "num_waiting_reqs")
_TOKENS: Final = "num_used_tokens"
"""In use, and not only cached. Also of a request that is being prefilled, which is no running and no waiting one."""
_FLUSH_STEP_S: Final = 0.1
_LEFT: Final = 256
"""More than a session has groups: one for each stage of a pipeline."""
_LOOK_S: Final = 0.5
"""How long a look at the launch holds good. A server needs seconds from its start to its first answer."""


class SGLangServer:
    """Implements `weightbus.dataplane.transports.interface.EngineServer`, and the rest of what a round needs.

    `connect` must come first. One thread makes the calls; `alive` and `label` may come from another.
    """

    def __init__(
        self, url: str, keys: Keys | None = None, dialect: str = "", lending: MemoryOccupation | None = None
    ) -> None:
        """`lending` knows what memory the server has given back."""
        self.url = url
        self._lending = lending or MemoryOccupation()
        self._wire = HttpClient(url, keys or Keys())
        self._stand_in = GroupWatchdog(url, keys or Keys())
        self._override = dialect
        self._facts: ServerFacts | None = None
        self._unrecordable = ("", "")
        """Of which launch nothing can be copied straight into its parameters, and why."""
        self._dialect: Dialect | None = None
        self._session = False
        self._touched = False
        self._relay: StoreProxy | None = None
        self._left: deque[str] = deque(maxlen=_LEFT)
        """Groups that are not to be joined any more: who joins waits on another thread than who leaves."""
        self._opens = ("", "")
        """Of which launch it is known, and where memory lies that its workers open."""
        self._launch = ""
        self._looked_at = float("-inf")
        """When the server was last found to be the launch that is meant."""
        self.last_label = ""
        """As last read by `connect` or set by us: any other is the work of somebody else, or of a new launch."""

    # -- what it is

    def connect(self, deadline_s: float = CALL_S) -> ServerFacts:
        """Read what the server is, and choose the dialect. Raises `UnknownDialect` or `ServerError`."""
        facts = facts_of(
            self._wire.get("/server_info", deadline_s), self._wire.get("/model_info", deadline_s), self.url
        )
        identity = self._lending.named(facts.identity)
        launch, reason = self._unrecordable
        facts = msgspec.structs.replace(
            facts,
            identity=identity,
            undefined=self._lending.undefined,
            unrecordable=reason if launch == identity else "",
        )
        self._dialect = dialect_of(facts.version, self._override)
        if self._facts is not None and self._facts.identity != facts.identity:
            self._session, self._touched = False, False
            self._cut()
            self._wire.trust()
        self._facts = facts
        self.last_label = facts.label
        return facts

    def give_up_on(self, reason: str) -> None:
        """A worker of this launch has died: who waits for an answer waits in vain, and nothing more is asked of it."""
        self._wire.give_up(reason)

    def expect(self, identity: str) -> None:
        """From now on change this launch of the server and no other; an empty `identity` means any."""
        if identity != self._launch:
            self._launch, self._looked_at = identity, float("-inf")

    def observe(self, observer: Observer) -> None:
        """Tell `observer` of every call."""
        self._wire.observer = observer

    def unrecordable(self, reason: str) -> None:
        """Remember for this launch that its loader cannot be recorded."""
        self._unrecordable = self.facts.identity, reason
        self._facts = msgspec.structs.replace(self.facts, unrecordable=reason)

    @property
    def facts(self) -> ServerFacts:
        """What `connect` read last."""
        if self._facts is None:
            raise ServerError("/server_info", "not read yet: connect first")
        return self._facts

    @property
    def dialect(self) -> Dialect:
        """How this server's version speaks."""
        if self._dialect is None:
            raise ServerError("/server_info", "not read yet: connect first")
        return self._dialect

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks: how many payloads a call carries."""
        return self.facts.tp

    @property
    def drafts(self) -> bool:
        """It speculates: calls of a loader are for its draft models too."""
        return bool(self.facts.speculative)

    @property
    def launch(self) -> str:
        """Tells this launch of the server from every other one."""
        return self.facts.identity

    @property
    def opens(self) -> str:
        """See `EngineServer`."""
        identity, where = self._opens
        return where if identity == self.facts.identity else ""

    def found(self, identity: str, opens: str) -> None:
        """What has been found out about a launch: where memory has to lie for its workers to open it."""
        self._opens = identity, opens

    @property
    def updating(self) -> bool:
        """A session is open, which `end_update` has to close before anything generates."""
        return self._session

    @property
    def touched(self) -> bool:
        """A call that changes weights has been made since `untouched`."""
        return self._touched

    def untouched(self) -> None:
        """Forget earlier updates: a new transfer begins."""
        self._touched = False

    def label(self, deadline_s: float = CALL_S) -> str:
        """The server's ``weight_version``. Answered without its scheduler, so it does not prove that it generates."""
        return str(self._wire.get("/model_info", deadline_s).get("weight_version", ""))

    def alive(self, deadline_s: float = CALL_S) -> None:
        """Raise `ServerError` unless the HTTP side answers."""
        self._wire.alive("/health", deadline_s)

    def answers(self, deadline_s: float = CALL_S) -> None:
        """Raise `ServerError` unless its workers answer. A paused server's do."""
        self._wire.get("/server_info", deadline_s)

    def generates(self, deadline_s: float = CALL_S) -> None:
        """Raise `ServerError` unless its workers generate something now. A paused server does not."""
        self._wire.alive("/health_generate", deadline_s)

    def idle(self, deadline_s: float = CALL_S) -> bool:
        """Whether it has no request now. Raises `ServerError` where it does not say.

        It says how it was when it last ended a batch: a first batch of a long prompt does not show before its end.
        """
        loads = self._wire.get("/v1/loads", deadline_s).get("loads")
        if not isinstance(loads, list) or not loads:
            raise ServerRefused("/v1/loads", 200, "no list of loads in the answer")
        return not any(map(_requests_of, loads))  # pyright: ignore[reportUnknownArgumentType]

    @property
    def lent(self) -> bool:
        """It has given memory back."""
        return bool(self._lending.tags)

    @property
    def lent_weights(self) -> bool:
        """That of its weights is among it."""
        return WEIGHTS in self._lending.tags

    def checksums(self, deadline_s: float = CALL_S) -> list[dict[str, str]]:
        """By rank: the digest of every live parameter under SGLang's own names."""
        answer = self._wire.admin("/weights_checker", {"action": "checksum"}, deadline_s)
        ranks = answer.get("ranks")
        if not isinstance(ranks, list):
            raise ServerRefused("/weights_checker", 200, "no list of ranks in the answer")
        return [_checksums_of(rank) for rank in ranks]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]

    # -- pausing and labeling

    def pause(self, mode: str, deadline_s: float = CALL_S) -> None:
        """pause_generation: when it returns, whatever is asked next finds the server paused.

        Any launch may be paused. It is looked at while it still generates, unless it was a moment ago (`look_ahead`):
        the calls which follow at once, and are for one launch only, need not do it then while requests wait. A look
        that fails keeps no server from its pause: those calls look for themselves then.
        """
        if time.monotonic() >= self._looked_at + _LOOK_S / 2:  # the other half is for the calls that follow
            self.look_ahead(deadline_s)
        self._wire.admin("/pause_generation", {"mode": mode}, deadline_s)

    def look_ahead(self, deadline_s: float = CALL_S) -> None:
        """Look now whether this is the launch that is meant: a pause may follow, and nobody waits yet.

        Nothing is made of what is found, but that `pause` need not look when it was this launch.
        """
        if self._launch:
            with contextlib.suppress(ServerError):
                self._look(min(deadline_s, _LOOK_S))

    def resume(self, deadline_s: float = CALL_S) -> None:
        """continue_generation, with all memory. Harmless when nothing is paused."""
        self._check_launch("/continue_generation", deadline_s)
        self.take_rest_back(deadline_s)
        self._wire.admin("/continue_generation", {"torch_empty_cache": False}, deadline_s)

    def flush(self, deadline_s: float = CALL_S) -> None:
        """flush_cache until it succeeds: it is refused while a request runs, and a retract takes its time."""
        until = time.monotonic() + deadline_s
        refused: ServerRefused | None = None
        while (left := until - time.monotonic()) > 0 or refused is None:
            try:
                return self._wire.post("/flush_cache", max(left, 0.001))
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
        self._check_launch("/update_weight_version", deadline_s)
        body = {"new_version": label, "abort_all_requests": False}
        self._wire.admin("/update_weight_version", body, deadline_s)
        self.last_label = label

    # -- memory

    def give_up(self, deadline_s: float = CALL_S) -> ServerFacts:
        """End every request and name the server anew: its weights are about to be given back.

        Raises `NothingToGive` for a server that cannot, or has nothing left to give.
        """
        if not self.facts.gives_back:
            raise NothingToGive(
                "this server keeps its memory whatever it is asked: launch it with --enable-memory-saver"
            )
        if self._lending.tags:
            raise NothingToGive(f"the server has given {', '.join(self._lending.tags)} back already")
        self._wire.admin("/pause_generation", {"mode": "abort"}, deadline_s)
        self._lending.begin()
        return self.connect(deadline_s)

    def give_back(self, deadline_s: float = CALL_S) -> None:
        """release_memory_occupation, of everything. After `give_up`: a server that is not idle would end by it."""
        self._lending.give()
        try:
            self._wire.order("/release_memory_occupation", {"tags": list(TAGS)}, deadline_s)
        except ServerRefused:
            for tag in TAGS:
                self._lending.took(tag)
            raise

    def take_weights_back(self, deadline_s: float = CALL_S) -> None:
        """resume_memory_occupation of the weights, if they were given back. What they are then is undefined."""
        self._take_back((WEIGHTS,), deadline_s)

    def take_rest_back(self, deadline_s: float = CALL_S) -> None:
        """... and of all the rest. Raises `ServerError` where the weights are still given back."""
        if WEIGHTS in self._lending.tags:
            raise ServerError("/resume_memory_occupation", "not made: the server has given its weights back")
        self._take_back(TAGS, deadline_s)

    def _take_back(self, tags: Sequence[str], deadline_s: float) -> None:
        for tag in self._lending.tags:
            if tag in tags:
                self._wire.order("/resume_memory_occupation", {"tags": [tag]}, deadline_s)
                self._lending.took(tag)

    # -- weights

    def load_shared(self, bucket: SharedBucket, deadline_s: float) -> None:
        """update_weights_from_tensor with a bucket that every rank maps by itself."""
        body: dict[str, object] = {
            "serialized_named_tensors": serialized(bucket, self.tp),
            "load_format": LOAD_FORMAT,
            "flush_cache": False,
        }
        self._update("/update_weights_from_tensor", body, deadline_s)

    def load_direct(self, socket: str, deadline_s: float) -> None:
        """update_weights_from_tensor with our loader: each worker connects to `socket`, and returns when it is let go.

        By itself it changes nothing, so `touched` is left to whoever leads the workers. The server must have been
        started with ``--custom-weight-loader`` and this loader: an unknown one ends it.
        """
        started = time.monotonic()
        path = "/update_weights_from_tensor"
        self._check_launch(path, deadline_s)
        self._begin_update(deadline_s)
        body: dict[str, object] = {
            "serialized_named_tensors": invitation(socket, self.tp),
            "load_format": LOADER,
            "flush_cache": False,
        }
        self._wire.admin(path, body, max(deadline_s - (time.monotonic() - started), 0.001))

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
        self._check_launch("/update_weights_from_disk", deadline_s)
        self._touched = True
        body = {"model_path": path, "load_format": "auto", "flush_cache": False}
        self._wire.admin("/update_weights_from_disk", body, deadline_s)

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
        self._wire.admin(_JOIN, body, deadline_s)

    def leave_group(self, group: str, deadline_s: float) -> None:
        """destroy_weights_update_group; no error when the server is not in it (an agent before us may have left it).

        One that forms does not form any more, which frees the server to do as it is told.
        """
        self._left.append(group)  # first: whoever looks for a way to it at this moment finds one of the two
        self._cut()
        try:
            self._wire.admin("/destroy_weights_update_group", {"group_name": group}, deadline_s)
        except ServerRefused as refused:
            if refused.status != 400:
                raise

    def entrust(self, groups: Sequence[str], *, used: bool) -> bool:
        """Another process leaves these groups if this one ends or, while they are `used`, stands still.

        False where it may have left those that were named before.
        """
        return self._stand_in.entrust(groups, used=used)

    def end_update(self, deadline_s: float = CALL_S) -> None:
        """Close the session, if one is open. Says nothing about whether the updates in it worked."""
        if self._session:
            self._session = False
            self._wire.admin("/end_weight_update", {}, deadline_s)

    def close(self) -> None:
        """Drop the connections."""
        self._cut()
        self._stand_in.close()
        self._wire.close()

    def _met_at(self, address: Address) -> tuple[str, int]:
        """Where the server finds the store of a group; all groups of a session are met in one.

        Raises `ServerError` for a group that was left meanwhile: nothing would end the server's wait in it.
        """
        to = parse_tcp_address(address.address)
        relay = self._relay
        if relay is None or relay.to != to:
            self._cut()
            relay = None
            if at := reached_at(self.url):
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
        self._check_launch(path, deadline_s)
        self._begin_update(deadline_s)
        self._touched = True
        self._wire.admin(path, body, max(deadline_s - (time.monotonic() - started), 0.001))

    def _check_launch(self, path: str, deadline_s: float) -> None:
        """Raise `AnotherGeneration` unless the server is still the one that was meant.

        A server that was launched anew generates, from weights of its own: a bucket or a label would make them lie.
        The agent may have been stopped while that happened, so this is asked right before the call, unless it was a
        moment ago, in which no server can have been started.
        """
        if self._launch and time.monotonic() >= self._looked_at + _LOOK_S and not self._look(deadline_s):
            raise AnotherGeneration(path)

    def _look(self, deadline_s: float) -> bool:
        """Is this the launch that is meant? Another shows by its process, where that can be seen, and by its label."""
        process, now = self.facts.process, time.monotonic()
        ended = process is not None and start_time(process[0]) != process[1]
        if ended or self.facts.identity != self._launch or self.label(min(deadline_s, CALL_S)) != self.last_label:
            return False
        self._looked_at = now
        return True

    def _begin_update(self, deadline_s: float) -> None:
        """Open a session where the dialect has them. One left open by an agent that died is closed first."""
        if self._session or not self.dialect.sessions:
            return
        try:
            self._wire.admin("/begin_weight_update", {}, min(deadline_s, CALL_S))
        except ServerRefused:
            self._wire.admin("/end_weight_update", {}, min(deadline_s, CALL_S))
            self._wire.admin("/begin_weight_update", {}, min(deadline_s, CALL_S))
        self._session = True


def _requests_of(load: object) -> int:
    """How many requests one scheduler has, and tokens of requests."""
    keys = [*_REQUESTS, *([_TOKENS] if isinstance(load, dict) and _TOKENS in load else [])]
    counts: list[object] = [load.get(key) for key in keys] if isinstance(load, dict) else [None]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    numbers = [count for count in counts if isinstance(count, int)]
    if len(numbers) != len(counts):
        raise ServerRefused("/v1/loads", 200, "no numbers of requests in the answer")
    return sum(numbers)


def _checksums_of(rank: object) -> dict[str, str]:
    found: object = rank.get("checksums") if isinstance(rank, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(found, dict):
        raise ServerRefused("/weights_checker", 200, "a rank without checksums in the answer")
    return {str(name): str(value) for name, value in found.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
