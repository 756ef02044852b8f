"""A light SGLang server for tests: the same HTTP, the same traps, no model. Starts in milliseconds.

It speaks the dialect of the version it is given, holds weights, generates tokens that depend on every one of them, and
fails on demand: ``fake.inject("/update_weights_from_tensor", "die", after=2)``. That it behaves like the real server is
proven by running one contract on both (tests/engine_agent/engines/engine_contract.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from weightbus.engine_agent.engines.sglang.compatibility import dialect_of

from .fake_weights import FakeWeights, ServerDied, decode, read

Fault = Literal["die", "hang", "refuse", "swallow", "corrupt"]
"""End the server; never answer; answer 400; answer 200 and load nothing; load and spoil one tensor."""

ADMIN = (
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weight_version",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
)


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class FakeSGLang:
    """One server. `start` and `restart` launch it with the checkpoint's weights; `die` ends it without a word."""

    def __init__(
        self,
        checkpoint: Path,
        version: str = "0.5.23",
        tp: int = 1,
        *,
        dp: int = 1,
        pp: int = 1,
        api_key: str = "",
        admin_key: str = "",
        token_s: float = 0.0,
    ) -> None:
        self.checkpoint, self.version, self.tp, self.dp, self.pp = checkpoint, version, tp, dp, pp
        self.dialect = dialect_of(version)
        self.api_key, self.admin_key, self.token_s = api_key, admin_key, token_s
        self.starting = False
        self.memory_saver = True
        self.calls: list[str] = []
        """Every path that was asked for by POST, in order."""
        self.port = 0
        self._faults: dict[str, tuple[Fault, int]] = {}
        self._seen: Counter[str] = Counter()
        self._http: _Http | None = None
        self._resumed = threading.Condition()
        self._replace_in = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> FakeSGLang:
        """Launch: a new identity, launch weights, label ``default``, nothing paused."""
        self._launch()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = _Http(("127.0.0.1", self.port), handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def _launch(self) -> None:
        self.weights = FakeWeights(self.checkpoint, self.tp)
        self.label, self.session, self.mode, self.running = "default", False, "", 0
        self.model_path = str(self.checkpoint)
        self.lent: set[str] = set()
        self.seed, self.started = random.SystemRandom().randint(0, 2**30), time.time()

    def replace(self, at: int = 0) -> None:
        """Launch again behind a proxy of HTTP: connections stay. At once, or before the POST number `at` from now."""
        self._replace_in = at
        if not at:
            self._launch()

    def die(self) -> None:
        """Like kill -9: connections break, nothing is answered, the weights are gone."""
        http, self._http = self._http, None
        if http is not None:
            # Nobody may see a broken connection and still find somebody who listens.
            http.shutdown()
            http.server_close()
            http.hang_up()

    stop = die

    def restart(self) -> None:
        """Die, and launch again on the same port."""
        self.die()
        self._faults.clear()
        self.start()

    def inject(self, path: str, fault: Fault, after: int = 0) -> None:
        """Let `fault` happen at the call of `path` that follows the next `after` ones, once."""
        self._faults[path] = (fault, self._seen[path] + after)

    def fault(self, path: str) -> Fault | None:
        """What happens to this call."""
        seen = self._seen[path]
        self._seen[path] += 1
        planned = self._faults.get(path)
        if planned is None or planned[1] != seen:
            return None
        del self._faults[path]
        return planned[0]

    # -- answers ----------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """Carry out one request. Raises `Refusal` or `ServerDied`."""
        if method == "POST":
            self.calls.append(path)
            self._replace_in -= 1
            if not self._replace_in:
                self._launch()
        fault = self.fault(path)
        if fault == "die":
            raise ServerDied(path)
        if fault == "hang":
            time.sleep(3600)
        if fault == "refuse":
            raise Refusal(400, "injected")
        if fault in {"swallow", "corrupt"} and path in {"/update_weights_from_tensor", "/update_weights_from_disk"}:
            return self._badly(fault, path, body)
        return getattr(self, path.lstrip("/"))(body)

    def _badly(self, fault: Fault, path: str, body: dict[str, Any]) -> Any:
        if fault == "corrupt":
            getattr(self, path.lstrip("/"))(body)
            self.weights.spoil()
        return {"success": True, "message": "Success."}

    def health(self, _: dict[str, Any]) -> str:
        if self.starting:
            raise Refusal(503, "")
        with self._resumed:
            self._resumed.wait_for(lambda: not self.mode, 20)
        return ""

    health_generate = health

    def ready(self, _: dict[str, Any]) -> str:
        """Without its workers; older releases have no such route."""
        if not self.dialect.tells_ready:
            raise Refusal(404, "Not Found")
        if self.starting or self.mode:
            raise Refusal(503, "")
        return ""

    def server_info(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "version": self.version,
            "tp_size": self.tp,
            "pp_size": self.pp,
            "dp_size": self.dp,
            "device": "cpu",
            "dtype": "auto",
            "model_path": str(self.checkpoint),
            "random_seed": self.seed,
            "startup_time": {"tokenizer_e2e": self.started},
            "speculative_algorithm": None,
            "quantization": None,
            "enable_memory_saver": self.memory_saver,
        }

    def loads(self, _: dict[str, Any]) -> dict[str, Any]:
        """``/v1/loads``."""
        return {
            "loads": [{"dp_rank": 0, "num_running_reqs": self.running, "num_waiting_reqs": 0, "num_used_tokens": 0}]
        }

    def model_info(self, _: dict[str, Any]) -> dict[str, Any]:
        config = json.loads((self.checkpoint / "config.json").read_text())
        return {
            "model_path": self.model_path,
            "weight_version": self.label,
            "architectures": config["architectures"],
        }

    def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._resumed:
            self.mode = body.get("mode", "abort")
            self._resumed.notify_all()
            if self.mode == "abort":
                self._resumed.wait_for(lambda: not self.running, 30)
        return {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, _: dict[str, Any]) -> dict[str, Any]:
        with self._resumed:
            self.mode = ""
            self._resumed.notify_all()
        return {"message": "Generation continued successfully.", "status": "ok"}

    def flush_cache(self, _: dict[str, Any]) -> str:
        if self.running and self.mode in {"", "in_place"}:
            raise Refusal(400, "Flush cache failed.")
        return "Cache flushed."

    def update_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("abort_all_requests", True):
            raise ServerDied("a test would lose its requests")
        self.label = body["new_version"]
        return {"success": True, "message": "", "new_version": self.label}

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        if "action" not in body:
            raise Refusal(422, "Field required")
        if body["action"] != "checksum" or not self.dialect.cpu_checksums:
            raise Refusal(400, "Torch not compiled with CUDA enabled")
        if "weights" in self.lent:
            raise ServerDied("an illegal memory access: the weights are given back")
        without = body.get("skip_tensor_list") or () if self.dialect.partial_checksums else ()
        one = [{"checksums": self._checksums(rank, without)} for rank in range(self.tp)]
        ranks = one * self.dp  # its front asks the schedulers of all replicas
        return {"success": True, "message": "Success.", "ranks": ranks}

    def _checksums(self, rank: int, without: Iterable[str]) -> dict[str, str]:
        found = self.weights.checksums(rank)
        return {name: digest for name, digest in found.items() if not any(part in name for part in without)}

    def release_memory_occupation(self, body: dict[str, Any]) -> None:
        """Of a server that is busy: its end."""
        if self.running:
            raise ServerDied("release_memory_occupation should be called only when server is idle.")
        self.lent |= set(body["tags"])

    def resume_memory_occupation(self, body: dict[str, Any]) -> None:
        """What was not given back cannot be taken. Weights come back as anything."""
        for tag in body["tags"]:
            if tag not in self.lent:
                raise ServerDied(f"KeyError: {tag}")
            self.lent.remove(tag)
            if tag == "weights":
                self.weights.undefine()

    def begin_weight_update(self, _: dict[str, Any]) -> dict[str, Any]:
        self._needs_sessions()
        if self.session:
            raise Refusal(400, "a weight update session is already open")
        self.session = True
        return {"success": True, "message": "Success."}

    def end_weight_update(self, _: dict[str, Any]) -> dict[str, Any]:
        self._needs_sessions()
        if not self.session:
            raise Refusal(400, "no weight update session is open")
        self.session = False
        return {"success": True, "message": "Success."}

    def _needs_sessions(self) -> None:
        if not self.dialect.sessions:
            raise Refusal(404, "Not Found")

    def destroy_weights_update_group(self, _: dict[str, Any]) -> dict[str, Any]:
        raise Refusal(400, "The group to be destroyed does not exist.")

    def update_weights_from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.dp > 1:
            raise Refusal(500, "Internal Server Error")
        if self.dialect.sessions and not self.session:
            raise Refusal(400, "begin_weight_update first")
        payloads = body["serialized_named_tensors"]
        if len(payloads) != self.tp or body["load_format"] != "flattened_bucket":
            raise ServerDied("payload count or load format")
        named = [decode(payload) for payload in payloads]
        self.weights.load(named[0])
        self._updated(body)
        return {"success": True, "message": "Success."}

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        folder = Path(body["model_path"])
        if not (folder / "config.json").exists():
            raise Refusal(400, f"Failed to get model config: {folder}")
        self.model_path = str(folder)
        self.weights.load(list(read(folder).items()))
        self._updated(body)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _updated(self, body: dict[str, Any]) -> None:
        if "weights" in self.lent:
            raise ServerDied("an illegal memory access: the weights are given back")
        if body.get("flush_cache", True) and self.running and self.mode == "in_place":
            raise Refusal(400, "Cache flush failed after updating weights")
        self.label = body.get("weight_version") or self.label

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer at its end."""
        answer: dict[str, Any] = {}
        for answer in self.answers(body):  # noqa: B007
            pass
        return answer

    def answers(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Token by token, each under the weights and the label of its moment; waits while paused."""
        wanted = body["sampling_params"]["max_new_tokens"]
        tokens: list[int] = []
        spans: list[dict[str, Any]] = []
        with self._running():
            while len(tokens) < wanted:
                with self._resumed:
                    self._resumed.wait_for(lambda: self.mode in {"", "abort"})
                    if self.mode == "abort":
                        if tokens or not self._resumed.wait_for(lambda: not self.mode, 60):
                            break
                        continue
                    tokens.append(self._token(body["input_ids"], tokens))
                    if not spans or spans[-1]["version"] != self.label:
                        spans.append({"version": self.label, "start": len(tokens) - 1, "end": 0})
                    spans[-1]["end"] = len(tokens)
                    label = self.label
                if len(tokens) < wanted:
                    yield self._answer(tokens, spans, label, None)
                time.sleep(self.token_s)
        yield self._answer(tokens, spans, self.label, {"type": "length" if len(tokens) == wanted else "abort"})

    def _answer(
        self, tokens: list[int], spans: list[dict[str, Any]], label: str, finish: dict[str, Any] | None
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {"weight_version": label, "completion_tokens": len(tokens), "finish_reason": finish}
        if self.version >= "0.5.19":
            meta["weight_versions"] = spans
        return {"output_ids": tokens, "meta_info": meta}

    def _token(self, prompt: list[int], tokens: list[int]) -> int:
        if self.lent:
            raise ServerDied(f"an illegal memory access: {self.lent} is given back")
        seen = json.dumps([prompt, tokens]).encode()
        return int.from_bytes(hashlib.sha256(self.weights.digest() + seen).digest()[:4], "big") % 512

    @contextlib.contextmanager
    def _running(self) -> Any:
        self.running += 1
        try:
            yield
        finally:
            with self._resumed:
                self.running -= 1
                self._resumed.notify_all()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, *args: Any) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def hang_up(self) -> None:
        for connection in list(self.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    fake: FakeSGLang
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer is two writes: the second would wait 40 ms for the first one's receipt

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        self._serve(json.loads(raw) if raw else {})

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def _serve(self, body: dict[str, Any]) -> None:
        path = self.path.split("?")[0].removeprefix("/v1")
        known = hasattr(self.fake, path.lstrip("/")) and not path.startswith("/_")
        try:
            if not self._allowed(path):
                self._reply(401, {"error": "Unauthorized"})
            elif not known:
                self._reply(404, {"detail": "Not Found"})
            elif path == "/generate" and body.get("stream"):
                self._stream(self.fake.answers(body))
            else:
                self._reply(200, self.fake.answer(self.command, path, body))
        except Refusal as refusal:
            # The real server repeats the whole request in its validation errors.
            self._reply(refusal.status, {"success": False, "message": str(refusal), "detail": body})
        except ServerDied:
            self.close_connection = True
            self.fake.die()

    def _allowed(self, path: str) -> bool:
        if path.startswith(("/health", "/ready", "/metrics")):
            return True
        admin = path in ADMIN
        key = (self.fake.admin_key or self.fake.api_key) if admin else self.fake.api_key
        return not key or self.headers.get("Authorization") == f"Bearer {key}"

    def _stream(self, answers: Iterable[dict[str, Any]]) -> None:
        """Server-sent events, one for each token."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in itertools.chain(map(json.dumps, answers), ("[DONE]",)):
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def _reply(self, status: int, content: Any) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
