"""Pre-recording: traces the server's loader before the sidecar joins, so that its first round need not.

Transports are imported then, too, whether or not anything is recorded.

The tensors are those of the served checkpoint's files, or of the manifest of the last version that was copied here in
an earlier life of the sidecar. A version of other tensors is traced in its round. A failure here never ends the
sidecar: it is a line in the log.

A server calls a loader outside of a pause when all requests have ended, and keeps new ones waiting from the moment of
the call. So only a server without requests is called, or one that is paused anyway. A request that comes just then
holds up later ones and the tracing, which is soon given up; the call itself cannot be taken back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from weightbus.control.log import get_log
from weightbus.dataplane.errors import DataplaneError, ManifestError
from weightbus.dataplane.processes import default_runtime_dir
from weightbus.dataplane.tensors import Manifest, TensorSpec
from weightbus.dataplane.transports import PrerecordedTraces, Prerecording, registry as transports

from ..engines import Engine
from ..errors import EngineAgentError, UnfitManifest
from ..machine import ServerView
from ..state_file import write_durably
from .memory_release import Noticed
from .settings import EngineAgentSettings

_RECORD_S: Final = 120.0
"""For all models of the server. A quantized model of 48 layers took 8 s."""
_ASK_S: Final = 5.0
_AGAIN_S: Final = 0.5
"""Between two looks that have to find no request: one alone may fall between two parts of a prompt."""

_log = get_log(__name__)


class Prerecorder:
    """The pre-recording of one sidecar process. `carry_out` and `remember` run on the worker thread, `close` on any."""

    def __init__(
        self,
        settings: EngineAgentSettings,
        server: Engine,
        view: Callable[[], ServerView],
        post: Callable[[Noticed], None],
        remember_layout: Callable[[Manifest], None],
        *,
        note_used: Callable[[frozenset[str], frozenset[str]], None],
    ) -> None:
        """`view` returns the state of the engine; `post` wakes the thread that waits for `over`.

        `remember_layout` gets the manifest of the last version that was copied here, if it may come again, or else the
        one that the checkpoint suggests. `note_used` gets the names that were recorded with, and those of them that the
        server loads memory from.
        """
        self._settings, self._server, self._view = settings, server, view
        self._post, self._remember_layout, self._note_used = post, remember_layout, note_used
        self._path = settings.state_dir / f"{settings.name}.manifest"
        self._kept = ""
        """Digest of the manifest that the file has."""
        self.ahead = PrerecordedTraces()
        """Traces that were recorded. Of the worker's thread."""
        self._lock = threading.Lock()
        """Of what `close` looks at and sets."""
        self._prerecording: Prerecording | None = None
        self.over = not settings.record_ahead
        """True once nothing is recorded ahead any more."""
        self._closed = threading.Event()

    def carry_out(self) -> None:
        """Never raises."""
        try:
            transports.preload(kind.value for kind in self._settings.transports)
            if not self.over:
                self._record()
        except (EngineAgentError, DataplaneError, OSError, ValueError) as error:
            _log.info("not_recorded_ahead", reason=str(error) or type(error).__name__)
        except Exception:  # noqa: BLE001 - the agent must outlive it, see above
            _log.exception("not_recorded_ahead")
        self.over = True
        self._post(Noticed())

    def remember(self, copied: Manifest) -> None:
        """Keep the manifest of a version for the next life. Without it there are the checkpoint's files."""
        if not self._settings.record_ahead or copied.digest() == self._kept:
            return
        try:
            write_durably(self._path, copied.encode())
            self._kept = copied.digest()
        except OSError as error:
            _log.info("manifest_not_kept", reason=str(error), path=str(self._path))

    def close(self) -> None:
        """Let the server go on."""
        with self._lock:
            self._closed.set()
            prerecording = self._prerecording
        if prerecording is not None:
            prerecording.close()

    def _record(self) -> None:
        facts, server = self._server.facts, self._server
        named = [transports.by_name(kind) for kind in self._settings.transports]
        ways = [each for each in named if each.in_place and each.name in server.transports()]
        if not ways or self._closed.is_set():
            return None
        checkpoint = self._settings.model_path or Path(self._view().checkpoint)
        if objection := server.prerecording_objection(checkpoint):
            return _log.info("not_recorded_ahead", reason=objection)
        tensors = self._remembered(checkpoint, ways[0].name) or self._guessed(checkpoint)
        server.pin(facts.identity)
        if not self._view().paused and not self._idle():
            return _log.info("not_recorded_ahead", reason="the server has requests, which would have to wait for it")
        began = time.monotonic()
        folder = self._settings.runtime_dir or default_runtime_dir()
        prerecording = Prerecording(folder, sent=not all(each.reads_memory for each in ways), ahead=self.ahead)
        with self._lock:
            self._prerecording = prerecording
            if self._closed.is_set():  # while files were read and the server was asked
                return None
        try:
            models = prerecording.record(tensors, self._settings.name, server, _RECORD_S)
            server.note_held_dtypes(prerecording.held_dtypes)
            self._note_used(frozenset(spec.name for spec in tensors), prerecording.used)
        finally:
            self._prerecording = None
            if not prerecording.pending:  # else that would wait behind it, and requests behind both
                server.end_update(_ASK_S)
        seconds, unproven = round(time.monotonic() - began, 3), prerecording.unproven
        _log.info("recorded_ahead", tensors=len(tensors), models=models, seconds=seconds, unproven=unproven)
        return None

    def _idle(self) -> bool:
        if not self._server.idle(_ASK_S):
            return False
        time.sleep(_AGAIN_S)
        return self._server.idle(_ASK_S)

    def _remembered(self, checkpoint: Path, transport: str) -> tuple[TensorSpec, ...]:
        """Of the last version that was copied here, if this server would take it again."""
        try:
            manifest = Manifest.decode(self._path.read_bytes())
            self._server.check(manifest, transport, checkpoint)
        except (OSError, ManifestError, UnfitManifest):
            return ()
        self._kept = manifest.digest()
        self._remember_layout(manifest)
        return manifest.tensors

    def _guessed(self, checkpoint: Path) -> tuple[TensorSpec, ...]:
        """The checkpoint's. A trainer that names them in this order, in buckets of the usual size, has that manifest.

        Raises `UnfitManifest` where a dtype is not known.
        """
        tensors, facts = self._server.expected_tensors(checkpoint), self._server.facts
        with contextlib.suppress(ManifestError):
            self._remember_layout(Manifest.of(next(iter(facts.architectures), ""), tensors))
        return tensors
