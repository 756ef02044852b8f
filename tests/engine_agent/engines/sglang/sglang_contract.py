"""What is SGLang's own in the contract, on the fake (fast, every dialect) and on the real server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from weightbus.engine_agent.engines.sglang.http_client import HttpClient
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.errors import ServerError, ServerRefused

from ....kit.fake_weights import FakeWeights
from ..engine_contract import CALL_S, Bench, EngineContract, Generated

PROMPT = [5, 6, 7]


class HttpProcess:
    """A server behind a port. `again` launches it again, where that takes no time."""

    def __init__(self, url: str, again: Callable[[], None] | None = None) -> None:
        self._url, self._again = url, again

    def answer(self, count: int) -> dict[str, Any]:
        """Greedy tokens with their account of versions."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling}
        answer = httpx.post(f"{self._url}/generate", json=body, timeout=CALL_S, trust_env=False)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def generate(self, count: int) -> Generated:
        found = self.answer(count)
        return Generated(found["output_ids"], found["meta_info"]["weight_version"])

    def restart(self) -> None:
        if self._again is None:
            pytest.skip("a real server takes minutes to start again")
        self._again()


class SGLangBench(Bench):
    """The same with SGLang's own side in sight."""

    def __init__(
        self, url: str, first: Path, second: Path, runtime_dir: Path, again: Callable[[], None] | None = None
    ) -> None:
        self.url, self.server, self.http = url, SGLangServer(url), HttpProcess(url, again)
        super().__init__(self.server, self.http, first, second, runtime_dir)


class SGLangContract(EngineContract):
    """Subclasses give the fixture `bench`, an `SGLangBench`."""

    def test_live_digests_are_those_of_the_files(self, bench: SGLangBench) -> None:
        """What weights_checker reports can be computed from the checkpoint, for every rank."""
        if not bench.server.dialect.cpu_checksums:
            pytest.skip("this dialect cannot report them without a GPU")
        bench.server.load_checkpoint(str(bench.first), CALL_S)
        weights = FakeWeights(bench.first, bench.server.tp)
        expected = [weights.checksums(rank) for rank in range(bench.server.tp)]
        assert bench.server.live_digests(CALL_S) == expected

    def test_every_token_tells_its_version(self, bench: SGLangBench) -> None:
        """From 0.5.19 on."""
        if bench.server.facts.version < "0.5.19":
            pytest.skip("this dialect has no spans")
        bench.server.set_label("42", CALL_S)
        meta = bench.http.answer(8)["meta_info"]
        assert meta["weight_versions"] == [{"version": "42", "start": 0, "end": 8}]

    def test_what_the_dialect_lacks_is_not_there(self, bench: SGLangBench) -> None:
        """What the table denies is refused or absent, and asking for it harms nothing."""
        server = bench.server
        if not server.dialect.cpu_checksums:
            with pytest.raises(ServerError):
                server.live_digests(CALL_S)
        if not server.dialect.sessions:
            with pytest.raises(ServerRefused) as refused:
                server._wire.admin("/begin_weight_update", {}, CALL_S)
            assert refused.value.status == 404
        assert ("weight_versions" in bench.http.answer(8)["meta_info"]) is (server.facts.version >= "0.5.19")

    def test_a_session_left_open_is_closed_first(self, bench: SGLangBench) -> None:
        """A sidecar that died between begin and end does not lock its successor out."""
        if not bench.server.dialect.sessions:
            pytest.skip("this dialect has no sessions")
        wire = HttpClient(bench.url, bench.server._wire._keys)
        wire.admin("/begin_weight_update", {}, CALL_S)
        wire.close()
        bench.load(bench.first)
        with pytest.raises(ServerRefused):
            bench.server._wire.admin("/end_weight_update", {}, CALL_S)

    def test_refusals_do_not_repeat_the_payload(self, bench: SGLangBench) -> None:
        """The server puts the whole request into its validation errors; ours stay short."""
        body = {"serialized_named_tensors": {"x": "A" * 100_000}, "load_format": 7}
        with pytest.raises(ServerError) as caught:
            bench.server._wire.admin("/update_weights_from_disk", body, CALL_S)
        assert len(str(caught.value)) < 600
        assert "AAAAAAAA" not in str(caught.value)
