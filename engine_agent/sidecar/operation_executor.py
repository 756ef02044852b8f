"""Carries out the machine's operations on the engine, one at a time, and returns the result of each.

Decides nothing about rounds. Every error becomes an `OperationFailed` with the reason: an exception must not end the
sidecar, because only the sidecar knows that a server must stay paused.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from weightbus.control.bus import BusClient
from weightbus.control.log import get_log
from weightbus.control.protocol import (
    Digest,
    Endpoint,
    HeldVersion,
    Prepare,
    Publish,
    Transfer,
    TransportKind,
    WeightbusError,
)
from weightbus.control.security import (
    AllowList,
    VerificationFailure,
    verify_digest_table,
    verify_endpoint,
    verify_publication,
)
from weightbus.control.server import (
    CALL_FAILURES,
    CALL_SECONDS,
    PUBLICATIONS_REFUSED,
    STEP_FAILURES,
    STEP_SECONDS,
    Metrics,
)
from weightbus.dataplane.digest import parameters_with
from weightbus.dataplane.errors import DataplaneError, DeadlineExceeded, NotTraceable, TransferFailed, WorkerDied
from weightbus.dataplane.processes import gc_paused
from weightbus.dataplane.tensors import DigestTable, Manifest
from weightbus.dataplane.transports import (
    RETURN_S,
    Address,
    DoubleBuffering,
    LoadedBy,
    Receiver,
    Remarking,
    Returning,
    Sized,
    StallDetector,
    Tabled,
    Timed,
    TransferSession,
    registry as transports,
)
from weightbus.dataplane.transports.disk import SavedReceiver, SavedVersion

from ..engines import CALL_S, Engine
from ..errors import (
    CalledOff,
    EngineAgentError,
    NotTrusted,
    ServerDoubted,
    ServerError,
    ServerSilent,
    UnfitManifest,
    WrongWeights,
)
from ..machine import (
    INCOMPLETE,
    Label,
    Operation,
    OperationDone,
    OperationFailed,
    PauseServer,
    Receive,
    Received,
    ReceiveDoubleBuffered,
    Recognize,
    ReleaseServer,
    Result,
    Validate,
    VerificationPassed,
    Verify,
    name_of,
)
from .left_part import UNPROVEN, LeftPart
from .server_watch import KeptDigests
from .settings import VerificationMode

SAVED: Final = "saved"
"""`Endpoint.group` of a version that is on disk already (file_resync.py)."""
_ALIVE_S: Final = 5.0
"""For a call that is answered without the scheduler."""
LOOK_S: Final = 10.0
"""For a server that may be dead or stand still to generate something: a check of that takes one to two seconds."""

VERIFY_S: Final = 240.0
"""Less than the coordinator's ``verify_s``: a failure with its reason is worth more than a time-out."""
_PROOF_S: Final = 15.0
_PROOF_BYTES_S: Final = 1e8
"""Far below the rate at which any machine digests: a slower server counts as stalled."""
_ASK_S: Final = 2.0
_LATELY_S: Final = 2.0
"""A server whose workers did something within so many seconds is not asked."""
_LOOK_S: Final = 10.0
"""Deadline of the answer. A batch may have to end before it, as before a pause."""
_SHOWN: Final = 4
"""Names of tensors in a text."""
_Digests = TypeVar("_Digests", str, tuple[str, ...])

_log = get_log(__name__)


class OperationExecutor:
    """Uses one server and one receiver per transport. `perform` is called from one thread, `cancel` from any."""

    def __init__(
        self,
        name: str,
        server: Engine,
        receivers: Callable[[str], Receiver],
        checkpoint_dir: Path | None,
        metrics: Metrics,
        *,
        proof: VerificationMode = VerificationMode.REQUIRED,
        trust: AllowList | None = None,
    ) -> None:
        """Without `trust` nothing needs a signature."""
        self.blobs: BusClient | None = None
        self.saved: SavedVersion | None = None
        """A version that lies in files, and may be asked for by its own commands (file_resync.py)."""
        self._name = name
        self._server = server
        self._make = receivers
        self._receivers: dict[str, Receiver] = {}
        self._active: Receiver | None = None
        self._checkpoint_dir = checkpoint_dir
        self._metrics = metrics
        self._proof = proof
        self._trust = trust
        self._number, self._generation = 0, ""
        self._placed: tuple[str, tuple[str, ...]] = "", ()
        """Identity of a process generation, and the devices of its workers."""
        self._called_off = -1
        """Number of the last operation that was cancelled."""
        self.left = LeftPart(server)
        """What versions leave at the server."""
        self._folder = ""
        """The checkpoint that the server was launched with, by its own name."""
        self._believed: Prepare | None = None
        """The publication that was trusted last."""
        self._layouts: dict[str, Manifest] = {}
        self._table: tuple[tuple[str, str], DigestTable] | None = None
        """The last table that was read, by its manifest's digest and its own: the steps of a round read it again."""
        self._fits: set[tuple[str, str, str]] = set()
        self._cast: tuple[tuple[str, str], frozenset[str]] = ("", ""), frozenset()
        """A manifest with a process generation, and its tensors that this server holds in another dtype."""
        self.kept: KeptDigests | None = None
        """Live digests of the last version that was proven, in an earlier life of the sidecar or in this one."""
        self._returning: tuple[Returning, str] | None = None
        """The receiver of the last version, and the process generation: its call may not have returned yet."""
        self._remark = ""
        self._worker_health = WorkerHealth(server)
        self.loads = 0
        """Receptions begun: the live digests from before one tell nothing after it."""
        self.proven: tuple[int, list[dict[str, str]]] = 0, []
        """`loads` at the last proof by live digests, and those."""
        self.copied: Manifest | None = None
        """Of the last version that was copied straight into the parameters and is served."""
        self._copied: Manifest | None = None

    def perform(self, operation: Operation, identity: str = "", number: int = 0) -> Result:
        """Carry out `operation` on the process generation `identity` (empty: on any). Never raises."""
        self._number, self._generation = number, identity
        self._server.pin(identity)
        step, started = name_of(operation), time.monotonic()
        try:
            with gc_paused():
                result = self._perform(operation)
        except (EngineAgentError, DataplaneError, WeightbusError, OSError, ValueError) as error:
            if isinstance(error, NotTraceable):
                self._server.mark_unrecordable(str(error))
            self._worker_health.learn(error, identity)
            by_server = not isinstance(operation, Validate) or isinstance(error, ServerError | DataplaneError)
            result = OperationFailed(
                str(error) or type(error).__name__,
                self._left_dirty(operation),
                doubted=isinstance(error, ServerDoubted),
                by_server=by_server,
            )
        except Exception as error:  # noqa: BLE001 - the agent must outlive it, see above
            _log.exception("operation_failed_unforeseen", operation=step)
            result = OperationFailed(f"{type(error).__name__}: {error}", self._left_dirty(operation))
        self._metrics.observe(STEP_SECONDS, time.monotonic() - started, step=step)
        if isinstance(result, OperationFailed):
            self._metrics.add(STEP_FAILURES, step=step)
        elif isinstance(operation, PauseServer | Receive | ReleaseServer):
            self._worker_health.moved(identity)
        return result

    @property
    def silent(self) -> bool:
        """True if the server did not answer the last operation in time."""
        return self._worker_health.silent(self._generation)

    def remember_layout(self, layout: Manifest) -> None:
        """Keep a manifest that a version may have: it need not be fetched then."""
        self._layouts = {layout.digest(): layout}

    def look_ahead(self, operation: Operation, result: Result) -> None:
        """Ask the server ahead what a pause after `operation` would have to ask while requests wait. Never raises."""
        if not isinstance(operation, Validate) or isinstance(result, OperationFailed):
            return
        try:
            self._server.look_ahead()
        except (EngineAgentError, OSError, ValueError) as error:
            _log.info("not_looked_at", reason=str(error))

    def cancel(self, number: int | None = None) -> None:
        """Make operation `number` (null: whichever) end soon: between two waits, or by taking its connection away.

        To be repeated until the operation has ended: a connection that is just being made cannot be closed yet.
        """
        self._called_off = self._number if number is None else number
        if self._active is not None and self._called_off == self._number:
            self._active.close()

    def _unwanted(self) -> bool:
        return self._called_off == self._number

    def _go_on(self) -> None:
        """Raise `CalledOff` if the running operation was cancelled, in whichever wait that happened."""
        if self._unwanted():
            raise CalledOff

    def close(self) -> None:
        """Let go of every receiver's memory and groups."""
        for receiver in self._receivers.values():
            receiver.shutdown()
        self._receivers.clear()

    def _left_dirty(self, operation: Operation) -> bool:
        """Whether weights may have changed, by the receiver or by the engine."""
        active = self._active
        return isinstance(operation, Receive) and (self._server.dirty or (active is not None and active.touched))

    def _perform(self, operation: Operation) -> Result:  # noqa: C901  # one case per operation
        self._worker_health.require(
            self._generation, self._active if isinstance(operation, PauseServer | ReleaseServer) else None
        )
        if isinstance(operation, PauseServer | Receive):
            self._worker_health.ask(self._generation)
        match operation:
            case Validate(command, folder, serving):
                self._folder = folder
                self._believe(command, serving)
                self._worker_health.look(self._generation)
                layout, _ = self._fit(command.manifest, command.table, command.transport, folder, command.deadline_s)
                if layout.left or layout.copies:
                    self.left.require(layout, self._server.last_label)
                receiver = self._receivers.get(command.transport.value)
                return OperationDone(
                    double_buffered=isinstance(receiver, DoubleBuffering) and receiver.can_stage(layout)
                )
            case PauseServer(mode, deadline_s):
                self._server.pause(mode, min(deadline_s, CALL_S))
            case ReceiveDoubleBuffered(command, folder):
                self._settle_quietly(command.deadline_s)
                self._stage(command, folder)
            case Receive(command, folder, unknown):
                if unknown:
                    self.left.doubt()
                return self._receive(command, folder, unknown=unknown)
            case Verify(command, checked):
                proven = self._verify(command, checked=checked)
                self._server.confirm("the transfer")
                return proven
            case Recognize(held):
                proven = self._recognize(held)
                self._server.confirm("the comparison")
                return proven
            case Label(version, deadline_s):
                if self._server.updating:
                    self._settle(min(deadline_s, CALL_S))
                self._server.set_label(str(version), min(deadline_s, CALL_S))
                # The coordinator commits meanwhile: requests do not wait for these questions.
                self._server.confirm("/update_weight_version", min(deadline_s, CALL_S))
                self._server.confirm_paused("/update_weight_version", min(deadline_s, CALL_S))
            case ReleaseServer():
                self._release(operation)
        return OperationDone()

    def _believe(self, command: Prepare, serving: HeldVersion | None) -> None:
        """Raise `NotTrusted` unless a trainer that is trusted here signed this version, to follow the one served."""
        if self._trust is None:
            return
        if (saved := self._saved(command.table)) is not None and command.publication_signature is None:
            command = _announced(command, saved)
        self._object(command.version, verify_publication(command, serving, self._trust.agents()))
        self._believed = command

    def _object(self, version: int, objection: VerificationFailure | None) -> None:
        if objection is not None:
            self._metrics.add(PUBLICATIONS_REFUSED, cause=objection.kind.value)
            raise NotTrusted(version, objection)

    # -- validation ----------------------------------------------------------------------------------------------------

    def _read(self, manifest: str, table: str, deadline_s: float) -> tuple[Manifest, DigestTable | None]:
        """Both, by their digests; no table where that is open."""
        layout = self._layouts.get(manifest)
        if layout is None:
            layout = Manifest.decode(self._blob(manifest, deadline_s))
            self._layouts = {manifest: layout}
        if not table:
            return layout, None
        if self._table is None or self._table[0] != (manifest, table):
            self._table = (manifest, table), DigestTable.decode(self._blob(table, deadline_s), layout)
        return layout, self._table[1]

    def _blob(self, digest: str, deadline_s: float) -> bytes:
        if self.saved is not None and digest in self.saved.blobs:
            return self.saved.blobs[digest]
        if self.blobs is None:
            raise UnfitManifest("no coordinator to ask for the manifest")
        return self.blobs.get_blob(Digest(digest), deadline_s, self._unwanted)

    def _saved(self, table: str) -> SavedVersion | None:
        return self.saved if self.saved is not None and self.saved.notes.table == table else None

    def _fit(
        self, manifest: str, table: str, transport: TransportKind, folder: str, deadline_s: float
    ) -> tuple[Manifest, DigestTable | None]:
        """Manifest and table, which may be open, once they are known to fit this process generation of the server."""
        layout, digests = self._read(manifest, table, deadline_s)
        facts = self._server.facts
        key = (manifest, facts.identity, transport.value)
        if key not in self._fits:
            self._server.check(layout, transport.value, self._checkpoint_dir or Path(folder))
            self._casts(manifest, layout)
            self._fits = {key, *(each for each in self._fits if each[1] == facts.identity)}
        return layout, digests

    # -- the transfer --------------------------------------------------------------------------------------------------

    def _believe_offer(self, command: Transfer) -> None:
        if _is_saved(command.offer):
            if (saved := self._saved(command.table)) is None or command.offer.address != os.fspath(saved.path):
                raise UnfitManifest(f"{command.offer.address} is not where this agent found the version")
        elif self._trust is not None:
            publication = self._believed and self._believed.publication_signature
            signer = publication.signer if publication else None
            self._object(command.version, verify_endpoint(command, signer, self._trust.agents()))

    def _believe_table(self, command: Transfer, tabled: Tabled | None) -> str:
        """The digest of the table that followed to `command`, which left it open. Raises unless it is believed."""
        if tabled is None:
            raise TransferFailed("the digest table was to follow, and did not come")
        table = tabled.table
        if (table.manifest, table.version) != (command.manifest, command.version):
            raise TransferFailed(f"the digest table that came is of version {table.version}, or of another manifest")
        digest = Digest(table.digest())
        if self._trust is not None:
            signature = tabled.seal.decode("ascii", "replace")
            self._object(command.version, verify_digest_table(self._believed, digest, signature, self._trust.agents()))
        self._table = (command.manifest, digest), table
        return digest

    def _session(self, command: Transfer, folder: str) -> TransferSession:
        """The session of `command`, once its offer is believed and its version is known to fit."""
        self._active = None
        self._believe_offer(command)
        transport = command.offer.transport
        if transports.by_name(transport).loaded_by is LoadedBy.GROUP:
            # One that is gone must be found out before it comes: a collective of which it is a member waits for it.
            self._server.label(min(command.deadline_s, _ALIVE_S))
        self._go_on()
        layout, table = self._fit(command.manifest, command.table, transport, folder, command.deadline_s)
        self._go_on()
        return TransferSession(command.channel, command.epoch, command.version, layout, table)

    def _stage(self, command: Transfer, folder: str) -> None:
        """Receive into a second buffer, if that is still possible. If not, `_receive` does it."""
        until = time.monotonic() + command.deadline_s
        session = self._session(command, folder)
        receiver = self._receivers.get(command.offer.transport.value)
        if isinstance(receiver, DoubleBuffering):
            self._active = receiver
            receiver.stage(session, _address(command), self._name, max(until - time.monotonic(), 0.001))

    def _receive(self, command: Transfer, folder: str, *, unknown: bool) -> Result:
        until = time.monotonic() + command.deadline_s
        self.loads += 1
        self._settle_quietly(command.deadline_s)
        self._server.clear_dirty()
        self._folder = folder
        session = self._session(command, folder)
        kind = SAVED if _is_saved(command.offer) else command.offer.transport.value
        if kind not in self._receivers:
            self._receivers[kind] = SavedReceiver() if kind == SAVED else self._make(kind)
        self._active = receiver = self._receivers[kind]
        left = max(until - time.monotonic(), 0.001)
        launched = INCOMPLETE if unknown else self._server.last_label
        self._mark_incomplete(left)
        self._server.resume_weights_memory(min(left, CALL_S))
        self.left.begin(session.manifest, self._folder, launched, max(until - time.monotonic(), 0.001))
        before = receiver.devices if isinstance(receiver, Sized) else ()
        try:
            receipt = receiver.receive(session, _address(command), self._name, command.rank_offset, self._server, left)
        except Exception as error:
            self._worker_health.learn(error, self._generation)
            self._end_update_quietly()
            raise
        finally:
            if isinstance(receiver, Sized) and receiver.devices is not before:  # workers of this launch have come
                self._placed = self._server.facts.identity, receiver.devices
        if isinstance(receiver, Returning):
            self._returning = receiver, self._generation
        else:
            self._server.end_update()
        if session.manifest.left and transports.by_name(command.offer.transport).loaded_by is LoadedBy.FILES:
            self.left.check_files(session.manifest, Path(command.offer.address), self._checkpoint)
        self._tell_remark(receiver)
        if isinstance(receiver, Timed):
            for step, seconds in receiver.seconds.items():
                self._metrics.observe(STEP_SECONDS, seconds, step=f"transfer_{step}")
        followed = "" if command.table else self._believe_table(command, receipt.tabled)
        proves_itself = receipt.checked and transports.by_name(command.offer.transport).loaded_by is LoadedBy.LOADER
        self._copied = session.manifest if proves_itself else self._copied
        # The workers compare what they hold of the tensors that were sent, and nothing else.
        verified_by = self._with_left(session.manifest, "live-digest") if proves_itself else ""
        return Received(receipt.bytes, receipt.buckets, receipt.checked, verified_by, followed)

    def _tell_remark(self, receiver: Receiver) -> None:
        """Log a remark once."""
        remark = receiver.remark if isinstance(receiver, Remarking) else ""
        if remark and remark != self._remark:
            _log.warning("transfer_could_be_better", reason=remark)
        self._remark = remark

    def _settle(self, deadline_s: float) -> None:
        """Wait until the server has returned from the call in which the last version was taken, and end its update.

        The version was verified before. Raises the error that kept the server from returning well, and again until
        another version is received: it generates nothing before.
        """
        if self._returning is None:
            return
        receiver, generation = self._returning
        if generation == self._generation:
            began = time.monotonic()
            receiver.returned(deadline_s)
            self._metrics.observe(STEP_SECONDS, time.monotonic() - began, step="transfer_return")
            self._server.end_update()
        self._returning = None

    def _settle_quietly(self, deadline_s: float) -> None:
        """Wait for the end of the call of the version before, with any result: another version follows."""
        try:
            self._settle(min(deadline_s, RETURN_S))
        except (EngineAgentError, DataplaneError) as error:
            _log.warning("server_did_not_return", reason=str(error))
            self._end_update_quietly()
        self._returning = None

    def _end_update_quietly(self) -> None:
        """Close the session after a failure, which is reported in place of any error here."""
        with contextlib.suppress(TransferFailed):  # a call that is known to be in vain is not made
            self._worker_health.require(self._generation, self._active)
            try:
                self._server.end_update(LOOK_S)
            except ServerError as error:
                _log.warning("end_weight_update_failed", reason=str(error))

    # -- verification, release -----------------------------------------------------------------------------------------

    def _verify(self, command: Transfer, *, checked: bool) -> Result:
        layout, _ = self._read(command.manifest, command.table, VERIFY_S)
        held = HeldVersion(version=command.version, manifest=command.manifest, table=command.table)
        compared, cast = self._compared(held)
        if checked or (compared and not cast):
            rest = f"; cast tensors by bucket-digest: {len(cast)}" if cast else ""
            verified_by = f"live-digest{rest}" if compared else "bucket-digest"
            self._keep(held)
            return VerificationPassed(self._with_left(layout, verified_by))
        if self._proof is VerificationMode.AVAILABLE:
            _log.warning("version_unproven", version=command.version, transport=command.offer.transport.value)
            told = f"live-digest; cast tensors not compared: {len(cast)}"
            return VerificationPassed(self._with_left(layout, told) if compared else "")
        missing = f"its digests of {_some(cast)} are of another dtype, to which it casts" if compared else ""
        raise WrongWeights(
            "verify",
            f"{missing or self._no_digests}, and no bucket was compared before the load: serve a model whose layout is"
            " known, use the disk transport, or set verify = available to take versions that are not proven",
        )

    def _compared(self, held: HeldVersion) -> tuple[bool, frozenset[str]]:
        """Compare the live weights with a digest table, but for tensors that the server casts: it digests other bytes.

        Returns whether there is anything to compare, and the tensors that were not. Raises `WrongWeights`.
        """
        layout, digests = self._read(held.manifest, held.table, VERIFY_S)
        assert digests is not None, "a version is verified with its digest table"
        wanted = (self._server.digest_algorithm, self._server.tp)
        live = {(each.algorithm, each.tp): each for each in digests.live}.get(wanted)
        if live is None:
            return False, frozenset()
        cast = self._casts(held.manifest, layout)
        apart = parameters_with(layout.model, layout.tensors, cast) if cast else frozenset[str]()
        if apart is None or apart.issuperset(live.parameters):
            return False, cast
        found = self._server.live_digests(proof_s(layout.nbytes))
        left = self.left.predicted(layout, self._checkpoint) if layout.left else None
        compared, whole = live.parameters | (left or {}), not layout.left or left is not None
        try:
            compare(_without(compared, apart), [_without(each, apart) for each in found], whole=whole)
        except WrongWeights:
            self.left.doubt()
            raise
        if left is not None:
            self.left.note_proven(layout)
        self.proven = self.loads, found
        return True, cast

    def _keep(self, held: HeldVersion) -> None:
        """Keep the live digests of a version that was proven, for `_recognize`."""
        loads, found = self.proven
        self.kept = (
            KeptDigests(identity=self._generation, held=held, ranks=tuple(found)) if loads == self.loads else None
        )

    def _casts(self, manifest: str, layout: Manifest) -> frozenset[str]:
        """The tensors of `manifest` that this process generation casts. Said once."""
        key = manifest, self._server.facts.identity
        if self._cast[0] != key:
            names = frozenset(self._server.casts(layout, self._checkpoint))
            self._cast = key, names
            if names:
                reason = (
                    "they are not in the dtype of its launch: what its parameters cannot hold is rounded as it was then"
                )
                _log.info("tensors_are_cast", tensors=_some(names), reason=reason)
        return self._cast[1]

    def _with_left(self, layout: Manifest, verified_by: str) -> str:
        """`verified_by`, once what `layout` leaves was proven, too; else what says that it could not be."""
        if not layout.left or self.left.proven(layout):
            return verified_by
        predicted = self.left.predicted(layout, self._checkpoint)
        if predicted is None:
            return f"{verified_by}; {UNPROVEN}"
        try:
            if predicted:
                compare(predicted, self._server.live_digests(proof_s(layout.nbytes)), whole=False)
        except WrongWeights:
            self.left.doubt()
            raise
        self.left.note_proven(layout)
        return verified_by

    @property
    def _checkpoint(self) -> Path:
        """The checkpoint that the server was launched with, as this agent sees it."""
        return self._checkpoint_dir or Path(self._folder or self._server.facts.model_path)

    @property
    def _no_digests(self) -> str:
        found, tp = self._server.digest_algorithm or "none", self._server.tp
        return f"this server cannot report digests that the trainer can predict (found {found} at tp {tp})"

    def _recognize(self, held: HeldVersion) -> Result:
        """Whether the server has the committed version, which a sidecar of before brought it.

        Tensors that the server casts have to have the digests that it gave of them after that version was proven.
        """
        compared, cast = self._compared(held)
        if not compared:
            raise WrongWeights("recognize", self._no_digests)
        layout, _ = self._read(held.manifest, held.table, VERIFY_S)
        if layout.left and not self.left.proven(layout):
            raise WrongWeights("recognize", UNPROVEN)
        kept = self.kept
        if cast and (kept is None or (kept.identity, kept.held) != (self._generation, held)):
            raise WrongWeights(
                "recognize", f"it casts {_some(cast)}, and its digests of them after the proof of the version are lost"
            )
        if cast and kept is not None:
            apart = parameters_with(layout.model, layout.tensors, cast) or frozenset[str]()
            wanted = {name: tuple(rank.get(name, "") for rank in kept.ranks) for name in apart}
            compare(wanted, self.proven[1], whole=False)
        return VerificationPassed("live-digest")

    # -- the mark of weights that are being changed --------------------------------------------------------------------

    def _mark_incomplete(self, deadline_s: float) -> None:
        """Mark a server that has its launch weights, before the first byte: the label outlives any sidecar."""
        label = self._server.last_label
        if not label.isdigit() and not label.startswith(INCOMPLETE):
            self._server.set_label(f"{INCOMPLETE}{label}", min(deadline_s, CALL_S))

    def _release(self, release: ReleaseServer) -> None:
        """Label last but for the flush, flush before anything generates."""
        if isinstance(self._active, DoubleBuffering):
            self._active.close()  # a second buffer that was not swapped in is dropped
        until = time.monotonic() + release.deadline_s
        self._settle(min(release.deadline_s, RETURN_S))
        if release.version is not None and not release.labeled:
            self._server.set_label(str(release.version), min(release.deadline_s, CALL_S))
        if release.version is None and self._server.last_label.startswith(INCOMPLETE):  # nothing was changed after all
            self._server.set_label(self._server.last_label.removeprefix(INCOMPLETE), min(release.deadline_s, CALL_S))
        self._server.resume_memory(min(release.deadline_s, CALL_S))
        if release.flush:
            self._server.flush(max(until - time.monotonic(), 0.001))
        self._server.resume(min(release.deadline_s, CALL_S))
        self._server.confirm_label("/continue_generation", min(release.deadline_s, CALL_S))
        self.copied = self._copied
        if release.look:
            self._server.generates(min(release.deadline_s, LOOK_S))

    @property
    def taken(self) -> str:
        """Mode in which the last version was received, where there is a choice."""
        return next((each.mode for each in self._receivers.values() if isinstance(each, DoubleBuffering)), "")

    @property
    def cast(self) -> int:
        """Tensors of the last version that fitted the server which it holds in another dtype than they are sent in."""
        return len(self._cast[1])

    @property
    def takes(self) -> dict[str, int]:
        """Bytes of a round that the worker with most of them receives, by transport, where plans tell."""
        sized = ((kind, each.most_bytes) for kind, each in tuple(self._receivers.items()) if isinstance(each, Sized))
        return {kind: size for kind, size in sized if size}

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of this generation's workers, by rank, as they reported them in a round; none before."""
        return self._placed[1] if self._placed[0] == self._server.facts.identity else ()

    def called(self, call: str, seconds: float, *, failed: bool) -> None:
        """Count one call to the server."""
        self._metrics.observe(CALL_SECONDS, seconds, call=call)
        if failed:
            self._metrics.add(CALL_FAILURES, call=call)


def _is_saved(offer: Endpoint) -> bool:
    return offer.transport is TransportKind.DISK and offer.group == SAVED


def _announced(command: Prepare, saved: SavedVersion) -> Prepare:
    """`command` as the trainer announced and signed it, under the epoch of the round that committed it."""
    said = msgspec.json.decode(saved.publication, type=Publish)
    replaced = {name: getattr(said, name) for name in ("channel", "epoch", "version", "manifest", "table", "rollback")}
    if (said.version, said.table) != (command.version, command.table):
        raise UnfitManifest(f"{saved.path} was announced as version {said.version}, and holds {command.version}")
    return msgspec.structs.replace(command, **replaced, publication_signature=said.publication_signature)


def _address(command: Transfer) -> Address:
    offer = command.offer
    return Address(offer.address, offer.group, offer.backend, offer.world_size, offer.token)


def _without(digests: dict[str, _Digests], names: frozenset[str]) -> dict[str, _Digests]:
    return {name: each for name, each in digests.items() if name not in names} if names else digests


def _some(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} tensors ({', '.join(sorted(names)[:_SHOWN])}{more})"


def compare(wanted: dict[str, tuple[str, ...]], found: list[dict[str, str]], *, whole: bool = True) -> None:
    """Raise `WrongWeights` unless every rank reports `wanted`, and nothing else where that is the `whole` model.

    Names the first parameter and both digests.
    """
    for rank, parameters in enumerate(found):
        for name, digests in wanted.items():
            reported = parameters.get(name, "nothing")
            if rank >= len(digests) or reported != digests[rank]:
                predicted = digests[rank] if rank < len(digests) else "nothing"
                raise WrongWeights(
                    "weights_checker", f"parameter {name!r} on rank {rank} is {reported}, its digest is {predicted}"
                )
        if whole and (extra := parameters.keys() - wanted.keys()):
            raise WrongWeights("weights_checker", f"rank {rank} has parameters that were not sent: {sorted(extra)[:4]}")
    if not found or any(len(digests) != len(found) for digests in wanted.values()):
        raise WrongWeights("weights_checker", f"{len(found)} ranks reported, the digest table is for others")


class WorkerHealth:
    """Worker health of one server, over its process generations. Used from one thread.

    A server of which a worker died or stalled answers no call that needs its workers, and a round would wait for such a
    call, so it is not made: not to a process generation of which a worker has died, which the server takes seconds to
    end over, and not to one of which a worker is stalled, before that worker reports again.
    """

    def __init__(self, server: Engine) -> None:
        self._server = server
        self._silent: str | None = None
        """A process generation that did not answer a call in time."""
        self._moved: tuple[str, float] | None = None
        """A process generation whose workers answered, and when."""
        self._died: tuple[str, int] | None = None
        """A process generation, and the rank of its worker that has died."""

    def silent(self, generation: str) -> bool:
        """Whether this process generation did not answer the last call in time."""
        return self._silent == generation

    def learn(self, error: Exception, generation: str) -> None:
        """Take note of a failure with this process generation."""
        self._moved = None
        if isinstance(error, WorkerDied):
            self._died = generation, error.rank
        if isinstance(error, ServerSilent | DeadlineExceeded):  # which may be another party's: the server is asked then
            self._silent = generation

    def moved(self, generation: str) -> None:
        """Take note that its workers answered."""
        self._moved = generation, time.monotonic()

    def look(self, generation: str) -> None:
        """Raise `ServerError` for a silent server before any engine is paused for the round.

        The HTTP side answers even if the workers do not. A pause that finds it out takes half a minute, in which all
        other engines of the round are paused.
        """
        if self._silent == generation:
            self.ask(generation)
            return
        if self._moved is not None and self._moved[0] == generation and time.monotonic() - self._moved[1] < _LATELY_S:
            return
        try:
            self._server.answers(_LOOK_S)
            self.moved(generation)
        except ServerError as error:
            if isinstance(error, ServerSilent):
                raise  # any other failure shows soon enough in the pause

    def require(self, generation: str, receiver: Receiver | None) -> None:
        """Raise `TransferFailed` where a call to `generation` would be in vain, as known here or to `receiver`."""
        if self._died is not None and self._died[0] == generation:
            raise WorkerDied(self._died[1])
        if isinstance(receiver, StallDetector):
            receiver.require_moving()

    def ask(self, generation: str) -> None:
        """Raise `ServerError` if a server that was silent still is: no round has to wait for it again."""
        if self._silent == generation:
            self._server.answers(_ASK_S)
        self._silent = None


def proof_s(nbytes: int) -> float:
    """Seconds that a server may take to digest `nbytes`: beyond them its workers count as stalled."""
    return min(VERIFY_S, _PROOF_S + nbytes / _PROOF_BYTES_S)
