"""`Fleet`: a client of the engines of one channel, for rollout code, with and without asyncio.

    with Fleet("policy") as fleet:
        rollout = fleet.generate([1, 2, 3], {"max_new_tokens": 8}, min_version=7)

One thread reads the ready list; requests look at what it has read. `dispatch` decides, this module carries out.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, Self, TypedDict, cast

import httpx
import msgspec

from weightbus.control.security import check_url

from ..staleness import Lineage, Staleness, StalenessVerdict, UnknownLineage
from .dispatch import Attempts, FleetError, FleetView, NoEngineReady, ReadyEngine, RolloutRefused, Send, Wait, shares

HURRY_S: Final = 0.05
"""Seconds between two looks at the ready list while a request waits for it."""
_LOOK_S: Final = 5.0
"""Deadline of a look."""
_CONNECT_S: Final = 5.0
_THREADS: Final = 32
"""Parts of batches that are under way at a time."""
MIN_VERSION_HEADER: Final = "Weightbus-Min-Version"
"""Where a proxy before the engine admits requests by it."""

Prompt = str | Sequence[int]
"""A text, or token ids."""


class Rollout(msgspec.Struct, frozen=True):
    """One response."""

    output_ids: list[int]
    meta_info: dict[str, Any]
    """As SGLang wrote it."""
    lineage: Lineage
    """The versions that wrote it, token by token."""
    engine: str
    """Name of the engine."""
    text: str = ""
    """The tokens as text, where the server has a tokenizer."""
    verdict: StalenessVerdict | None = None
    """What the fleet's `Staleness` says of it; None without one, or without the version in training."""


class _Answer(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: dict[str, Any]
    text: str = ""

    @property
    def aborted(self) -> bool:
        """Whether a pause in the mode ``abort``, or another party, ended it early."""
        finish: object = self.meta_info.get("finish_reason")
        return isinstance(finish, Mapping) and cast("Mapping[str, object]", finish).get("type") == "abort"


class _EngineState(msgspec.Struct, frozen=True):
    url: str = ""
    ready: bool = False
    version: int | None = None


class _Committed(msgspec.Struct, frozen=True):
    version: int


class _ChannelState(msgspec.Struct, frozen=True):
    engines: dict[str, _EngineState] = {}
    committed: _Committed | None = None


class _Status(msgspec.Struct, frozen=True):
    """The fields of the coordinator's status document that are read here."""

    channels: dict[str, _ChannelState] = {}
    stands_by: bool = False


class Fleet:
    """The engines of one channel. Any thread, and any number of tasks, may use it. Close it after use."""

    def __init__(
        self,
        channel: str,
        *,
        url: str = "http://127.0.0.1:5752",
        staleness: Staleness | None = None,
        api_key: str = "",
        timeout_s: float = 600.0,
        watch_s: float = 0.5,
    ) -> None:
        """Begin to watch the ready list of `channel`.

        `url` is the coordinator's HTTP port; of several coordinators, all of them, separated by commas. `staleness`
        judges every response of a request that names the version in training. `api_key` is that of the servers, or of a
        proxy before them. `timeout_s` is the deadline of a request, waits and retries included; `watch_s` how often the
        ready list is read, unless a request waits for it.
        """
        self._channel, self._staleness = channel, staleness
        self._timeout_s, self._watch_s = timeout_s, watch_s
        self._urls = [each.strip().rstrip("/") for each in url.split(",")]
        for each in self._urls:
            check_url("url", each)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._http = httpx.Client(trust_env=False, limits=self._limits)
        self._async: tuple[asyncio.AbstractEventLoop, httpx.AsyncClient] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rollout")
        self._changed = threading.Condition()  # its lock is reentrant
        self._view = FleetView()
        self._load: Counter[str] = Counter()
        self._waiting = 0
        """Requests that wait for the ready list."""
        self._closed = False
        self._watcher = threading.Thread(target=self._watch, name="fleet-watch", daemon=True)
        self._watcher.start()

    # -- the ready list ------------------------------------------------------------------------------------------------

    def ready(self, min_version: int | None = None) -> tuple[ReadyEngine, ...]:
        """Engines to which requests may go, as read last: with `min_version`, those that serve it or a later one."""
        return self._view.serving(min_version)

    @property
    def committed(self) -> int | None:
        """The version that was committed last, as read last."""
        return self._view.committed

    def wait_ready(
        self, count: int = 1, *, min_version: int | None = None, timeout_s: float | None = None
    ) -> tuple[ReadyEngine, ...]:
        """Ready engines, once there are `count` with `min_version` or later. Raises `NoEngineReady`."""
        until = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        with self._changed, self._hurried():
            while len(found := self._view.serving(min_version)) < count:
                self._still_open()
                if (left := until - time.monotonic()) <= 0:
                    wanted = f"{count} engines" + ("" if min_version is None else f" with {min_version} or later")
                    raise NoEngineReady(f"expected {wanted}: {self._view.told()}. See `weightbus status`")
                self._changed.wait(min(left, self._watch_s))
        return found

    def _watch(self) -> None:
        with httpx.Client(trust_env=False, timeout=_LOOK_S) as http:
            while not self._closed:
                view = self._look(http)
                with self._changed:
                    self._view = view
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closed or self._waiting > 0, self._watch_s)
                    if self._waiting and not self._closed:
                        self._changed.wait_for(lambda: self._closed, HURRY_S)

    def _look(self, http: httpx.Client) -> FleetView:
        """Read the list. While no coordinator answers, engines go on serving, and the list read before stands."""
        problems: list[str] = []
        for url in tuple(self._urls):
            try:
                page = http.get(f"{url}/status").raise_for_status().content
                status = msgspec.json.decode(page, type=_Status)
            except (httpx.HTTPError, msgspec.DecodeError) as problem:
                problems.append(f"{url}: {problem or type(problem).__name__}")
                continue
            if status.stands_by:
                problems.append(f"{url} stands by")
                continue
            self._urls.sort(key=url.__ne__)
            channel = status.channels.get(self._channel, _ChannelState())
            engines = (
                ReadyEngine(name, each.url, each.version) for name, each in channel.engines.items() if each.ready
            )
            committed = channel.committed.version if channel.committed else None
            known = "" if self._channel in status.channels else f"the coordinator knows no channel {self._channel!r}"
            return FleetView(tuple(engines), committed, known)
        return msgspec.structs.replace(self._view, problem="; ".join(problems))

    # -- requests ------------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: Mapping[str, Any],
        *,
        min_version: int | None = None,
        current: int | None = None,
        timeout_s: float | None = None,
    ) -> Rollout:
        """The response to one prompt, a text or token ids, that begins with `min_version` or a later one.

        `current` is the version in training, for the fleet's `Staleness`. Raises `NoEngineReady` or `RolloutRefused`.
        """
        return self._ask(self._attempts(min_version, timeout_s), _body([prompt], sampling_params), current)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Mapping[str, Any],
        *,
        min_version: int | None = None,
        current: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """A response to each prompt, in order. The prompts are shared out among the engines that are ready now."""
        engines = self.wait_ready(min_version=min_version, timeout_s=timeout_s)
        jobs = [
            self._threads.submit(
                self._ask, self._attempts(min_version, timeout_s), _body(prompts[part], sampling_params), current
            )
            for part in shares(len(prompts), len(engines))
        ]
        return [rollout for job in jobs for rollout in job.result()]

    async def agenerate(
        self,
        prompt: Prompt,
        sampling_params: Mapping[str, Any],
        *,
        min_version: int | None = None,
        current: int | None = None,
        timeout_s: float | None = None,
    ) -> Rollout:
        """As `generate`, for asyncio."""
        found = await self._aask(self._attempts(min_version, timeout_s), _body([prompt], sampling_params), current)
        return found[0]

    async def agenerate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling_params: Mapping[str, Any],
        *,
        min_version: int | None = None,
        current: int | None = None,
        timeout_s: float | None = None,
    ) -> list[Rollout]:
        """As `generate_batch`, for asyncio."""
        engines = len(self._view.serving(min_version))
        jobs = [
            self._aask(self._attempts(min_version, timeout_s), _body(prompts[part], sampling_params), current)
            for part in shares(len(prompts), engines)
        ]
        return [rollout for job in await asyncio.gather(*jobs) for rollout in job]

    def _attempts(self, min_version: int | None, timeout_s: float | None) -> Attempts:
        return Attempts(min_version, time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s))

    def _ask(self, attempts: Attempts, body: _Body, current: int | None) -> list[Rollout]:
        while True:
            self._still_open()
            step = self._next(attempts)
            if isinstance(step, Wait):
                with self._changed, self._hurried():
                    self._changed.wait(min(step.seconds, self._watch_s))
                continue
            try:
                answer = self._http.post(**self._request(step, body, attempts))
            except httpx.TransportError as problem:
                attempts.failed(step.engine, _said(problem), time.monotonic())
                continue
            finally:
                self._done(step.engine)
            if found := self._settled(attempts, step.engine, answer, body.count, current):
                return found

    async def _aask(self, attempts: Attempts, body: _Body, current: int | None) -> list[Rollout]:
        while True:
            self._still_open()
            step = self._next(attempts)
            if isinstance(step, Wait):
                with self._hurried():
                    await asyncio.sleep(min(step.seconds, HURRY_S))
                continue
            try:
                answer = await self._client().post(**self._request(step, body, attempts))
            except httpx.TransportError as problem:
                attempts.failed(step.engine, _said(problem), time.monotonic())
                continue
            finally:
                self._done(step.engine)
            if found := self._settled(attempts, step.engine, answer, body.count, current):
                return found

    def _next(self, attempts: Attempts) -> Send | Wait:
        """The next step; an engine that is chosen has one request more, until `_done`."""
        with self._changed:
            step = attempts.next(self._view, self._load, time.monotonic())
            if isinstance(step, Send):
                self._load[step.engine.name] += 1
            return step

    def _done(self, engine: ReadyEngine) -> None:
        with self._changed:
            self._load[engine.name] -= 1

    def _request(self, step: Send, body: _Body, attempts: Attempts) -> _Request:
        headers = self._headers
        if attempts.min_version is not None:
            headers = {**headers, MIN_VERSION_HEADER: str(attempts.min_version)}
        timeout = httpx.Timeout(step.timeout_s, connect=min(_CONNECT_S, step.timeout_s))
        return {"url": f"{step.engine.url}/generate", "json": body.json, "headers": headers, "timeout": timeout}

    def _settled(
        self, attempts: Attempts, engine: ReadyEngine, answer: httpx.Response, count: int, current: int | None
    ) -> list[Rollout]:
        """The rollouts of an answer; none if it is to be asked for again. Raises `RolloutRefused`."""
        now = time.monotonic()
        if answer.status_code != HTTPStatus.OK:
            attempts.answered(engine, answer.status_code, answer.text, _retry_after(answer), now)
            return []
        try:
            answers = msgspec.json.decode(answer.content, type=list[_Answer])
            found = [self._rollout(each, engine, current) for each in answers]
        except (msgspec.DecodeError, UnknownLineage) as problem:
            raise RolloutRefused(engine.name, answer.status_code, f"its answer is no rollout: {problem}") from problem
        if len(found) != count:
            raise RolloutRefused(engine.name, answer.status_code, f"{len(found)} responses came to {count} prompts")
        if any(each.aborted for each in answers):
            attempts.failed(engine, "was paused, and ended its requests", now, 0.0)
            return []
        began = [each.lineage.versions[0] for each in found if each.lineage.versions]
        if wrong := [version for version in began if not attempts.within(version)]:
            attempts.failed(engine, f"answered with version {wrong[0]}", now)
            return []
        return found

    def _rollout(self, answer: _Answer, engine: ReadyEngine, current: int | None) -> Rollout:
        lineage = Lineage.of(answer.meta_info, len(answer.output_ids))
        policy = self._staleness if current is not None else None
        verdict = policy.judge(lineage, current) if policy is not None and current is not None else None
        return Rollout(answer.output_ids, answer.meta_info, lineage, engine.name, answer.text, verdict)

    @contextmanager
    def _hurried(self) -> Generator[None]:
        """Have the ready list read more often."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1

    # -- life ----------------------------------------------------------------------------------------------------------

    def _client(self) -> httpx.AsyncClient:
        """The client of the running loop: connections belong to one."""
        loop = asyncio.get_running_loop()
        if self._async is None or self._async[0] is not loop:
            self._async = loop, httpx.AsyncClient(trust_env=False, limits=self._limits)
        return self._async[1]

    def _still_open(self) -> None:
        if self._closed:
            raise FleetError("this Fleet was closed: make a new one")

    def close(self) -> None:
        """Stop watching and drop the connections; requests that wait raise `FleetError`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._watcher.join(_LOOK_S + 1)
        self._threads.shutdown()
        self._http.close()

    async def aclose(self) -> None:
        """As `close`, for asyncio."""
        if self._async is not None and self._async[0] is asyncio.get_running_loop():
            await self._async[1].aclose()
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _Body(msgspec.Struct, frozen=True):
    """A request for `count` responses."""

    json: dict[str, Any]
    count: int


class _Request(TypedDict):
    """Arguments of `post`."""

    url: str
    json: dict[str, Any]
    headers: dict[str, str]
    timeout: httpx.Timeout


def _body(prompts: Sequence[Prompt], sampling_params: Mapping[str, Any]) -> _Body:
    key = "text" if all(isinstance(each, str) for each in prompts) else "input_ids"
    sent = [each if isinstance(each, str) else list(each) for each in prompts]
    return _Body({key: sent, "sampling_params": dict(sampling_params)}, len(sent))


def _said(problem: httpx.TransportError) -> str:
    return f"{type(problem).__name__}: {problem}"


def _retry_after(answer: httpx.Response) -> float | None:
    value = answer.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdecimal() else None
