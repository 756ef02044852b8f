"""Requests the demo's rollouts from the engines that the coordinator lists as ready, over plain HTTP.

Every response names the versions that wrote it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import httpx
import msgspec

from .toy_task import RESPONSE_TOKENS

_LOOK_S: Final = 0.02
LAUNCH_LABEL: Final = "default"
"""SGLang's label of the weights that it was started with."""


class NotReady(Exception):
    """The coordinator lists too few engines as ready."""


class BadRollout(Exception):
    """An engine answered something that is not a rollout."""


class EngineState(msgspec.Struct, frozen=True):
    """One engine in the status document; other fields are ignored."""

    lag: int | None = None
    ready: bool = False
    version: int | None = None


class ChannelState(msgspec.Struct, frozen=True):
    """One channel in the status document."""

    engines: dict[str, EngineState] = {}
    ready: tuple[str, ...] = ()


class CoordinatorState(msgspec.Struct, frozen=True):
    """The fields of the status document that the demo reads."""

    channels: dict[str, ChannelState] = {}


class Response(msgspec.Struct, frozen=True):
    """One response of ``/generate``."""

    output_ids: list[int]
    meta_info: dict[str, object]
    """``meta_info`` as SGLang wrote it, for `Lineage.of`."""

    @property
    def label(self) -> object:
        """Label of the weights that wrote its last token."""
        return self.meta_info.get("weight_version")


class RolloutClient:
    """The engines of one channel, as a client of the coordinator sees them. Close it after use."""

    def __init__(self, status_url: str, channel: str, timeout_s: float) -> None:
        self._status_url = status_url
        self._channel = channel
        self._http = httpx.Client(timeout=timeout_s, trust_env=False)
        self._threads = ThreadPoolExecutor(thread_name_prefix="rollout")

    def close(self) -> None:
        """Drop the connections."""
        self._threads.shutdown()
        self._http.close()

    def state(self) -> ChannelState:
        """The channel, as the coordinator sees it now. Raises `httpx.HTTPError` or `msgspec.ValidationError`."""
        document = self._http.get(self._status_url).raise_for_status().content
        return msgspec.json.decode(document, type=CoordinatorState).channels.get(self._channel, ChannelState())

    def wait_ready(self, count: int, deadline_s: float, version: int = 0) -> tuple[str, ...]:
        """Addresses of the ready engines, once `count` serve `version` or a later one. Raises `NotReady`."""
        until = time.monotonic() + deadline_s
        while True:
            state = self.state()
            served = [engine.version or 0 for engine in state.engines.values() if engine.ready]
            if len(state.ready) >= count and min(served, default=0) >= version:
                return state.ready
            if time.monotonic() >= until:
                found = f"{len(state.ready)} engines are ready with versions {served}"
                raise NotReady(f"{found} after {deadline_s:.0f} s, expected {count} with {version} or later")
            time.sleep(_LOOK_S)

    def generate(self, urls: Sequence[str], prompts: Sequence[list[int]]) -> list[Response]:
        """One response to each prompt, the prompts shared out among `urls` in equal runs, in order."""
        share = -(-len(prompts) // len(urls))
        jobs = [
            self._threads.submit(self._ask, url, prompts[at : at + share])
            for url, at in zip(urls, range(0, len(prompts), share), strict=False)
        ]
        return [response for job in jobs for response in job.result()]

    def _ask(self, url: str, prompts: Sequence[list[int]]) -> list[Response]:
        sampling = {"temperature": 1.0, "max_new_tokens": RESPONSE_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling}
        answer = self._http.post(f"{url}/generate", json=body).raise_for_status().content
        responses = msgspec.json.decode(answer, type=list[Response])
        for response in responses:
            if len(response.output_ids) != RESPONSE_TOKENS:
                raise BadRollout(f"{url} wrote {len(response.output_ids)} tokens, {RESPONSE_TOKENS} were asked for")
        return responses
