"""Settings of a trainer. Arguments of `TrainerAgent.connect` take precedence over environment, file and defaults."""

from __future__ import annotations

import enum
import re
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from weightbus.control.machine import PREFERRED
from weightbus.control.protocol import NAME_PATTERN, PauseMode, Policy, StragglerPolicy, TransportKind
from weightbus.control.security import InsecureLoopback, KeysFolder, check_endpoints, check_key_settings
from weightbus.dataplane.tensors import DEFAULT_BUCKET_BYTES
from weightbus.dataplane.transports import LoadedBy, registry as transports

from .machine import OnDifference, OnNonFinite, PublishLimits

SECTION: Final = "trainer"
"""Section of the settings file; environment variables begin with ``WEIGHTBUS_TRAINER_``."""

_DEVICE: Final = re.compile(r"cpu|cuda(:\d+)?")

Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
Wait = Annotated[float, Meta(gt=0, le=86400)]


class SendsOver(enum.StrEnum):
    """The carrier of the `sends` transport."""

    COLLECTIVE = "collective"
    """A process group of torch: gloo between CPUs, NCCL between GPUs."""
    NIXL = "nixl"
    """Engines read the ranks' memory with NIXL (``weightbus[nixl]``)."""


class Overlap(enum.StrEnum):
    """What happens to earlier snapshots that are not published yet when a new one is taken."""

    WAIT = "wait"
    """Every version is published; a new snapshot waits until a buffer is free."""
    SUPERSEDE = "supersede"
    """Waiting snapshots are dropped; a publication that has begun goes on to its end."""


class SnapshotMemory(enum.StrEnum):
    """Memory in which snapshots are kept on rank 0. Each takes as many bytes as one version."""

    HOST = "host"
    """Host memory, pinned where the weights are on a GPU; two buckets of GPU memory are borrowed while it is taken."""
    DEVICE = "device"
    """Memory of the device that holds the weights: fastest, if there is room."""


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `TrainerAgent`. Equal on every rank of a group; only rank 0's are used to connect."""

    channel: Annotated[Name, Meta(description="the model whose weights are published")]
    name: Annotated[Name, Meta(description="name of this trainer, kept across its restarts")] = "trainer"
    run: Annotated[
        Annotated[str, Meta(pattern=f"{NAME_PATTERN}|^$")] | None,
        Meta(
            description="the training run, the same when its job is started again: a channel belongs to one run;"
            " none: the trainer's name"
        ),
    ] = None
    takeover: Annotated[
        bool, Meta(description="take the channel from the run that has it, with the first lease of this agent")
    ] = False
    coordinator: Annotated[str, Meta(description="endpoint of the coordinator; of several, comma-separated")] = (
        "tcp://127.0.0.1:5750"
    )
    keys: KeysFolder = None
    insecure_loopback: InsecureLoopback = False
    transport: Annotated[
        tuple[TransportKind, ...],
        Meta(description="allowed transports, in order of preference; unset: chosen for each engine"),
    ] = ()
    left: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        Meta(
            description="tensors of the served checkpoint that are not trained, by name, or by prefix that ends in a"
            " dot: engines keep the values of their launch"
        ),
    ] = ()
    bucket_bytes: Annotated[int, Meta(description="most bytes of a bucket (a larger tensor has its own)", ge=1024)] = (
        DEFAULT_BUCKET_BYTES
    )
    slots: Annotated[
        int, Meta(description="staging buckets; a model that fits is assembled once a round", ge=1, le=64)
    ] = 2
    snapshots: Annotated[int, Meta(description="snapshots kept at most, each as large as the model", ge=1, le=8)] = 2
    snapshot_memory: Annotated[SnapshotMemory, Meta(description="where snapshots lie, on the root rank")] = (
        SnapshotMemory.HOST
    )
    overlap: Annotated[Overlap, Meta(description="a snapshot waits for earlier ones, or replaces those not begun")] = (
        Overlap.WAIT
    )
    max_lag: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="versions that an engine with requests may be behind training (snapshots); none: any"),
    ] = None
    lag_timeout_s: Annotated[Wait, Meta(description="how long training stands still for max_lag at most")] = 1800.0
    pause: Annotated[PauseMode, Meta(description="what happens to requests that are generating")] = PauseMode.RETRACT
    flush: Annotated[bool, Meta(description="drop KV and prefix caches before engines resume")] = True
    min_engines: Annotated[
        int, Meta(description="verified engines needed to commit, waited for; 0: one if any joined", ge=0)
    ] = 0
    engines_timeout_s: Annotated[
        Wait, Meta(description="how long a publication waits for min_engines, or for engines whose servers start")
    ] = 600.0
    redrives: Annotated[int, Meta(description="how often failed engines are sent everything again", ge=0, le=100)] = 1
    slow: Annotated[
        StragglerPolicy, Meta(description="wait-all, quorum or evict-after: how slow engines are waited for")
    ] = StragglerPolicy.WAIT_ALL
    quorum: Annotated[
        int, Meta(description="engines after which the others have slow_s left (slow = quorum)", ge=0)
    ] = 0
    slow_s: Annotated[Wait, Meta(description="what slow engines are given, by quorum and evict-after")] = 30.0
    max_paused: Annotated[
        int,
        Meta(
            description="engines that stand still at a time, the others take turns; when so many fail with a version,"
            " it reaches no others; 0: all at once",
            ge=0,
        ),
    ] = 0
    catch_up_s: Annotated[
        float,
        Meta(description="how often a kept snapshot is offered to engines that are behind; 0: never", ge=0, le=86400),
    ] = 1.0
    open_tables: Annotated[
        bool, Meta(description="announce a version before it is digested, where all engines know that and take direct")
    ] = True
    nonfinite: Annotated[
        OnNonFinite,
        Meta(description="a version with elements that are NaN or infinite: warn, or refuse (no open_tables then)"),
    ] = OnNonFinite.WARN
    replicas: Annotated[
        OnDifference,
        Meta(description="compare what several ranks hold of a parameter: off, warn, or refuse where they differ"),
    ] = OnDifference.WARN
    replicas_every: Annotated[
        int, Meta(description="replicas are compared in the first of so many publications of this agent", ge=1)
    ] = 50
    transfer_timeout_s: Annotated[Wait, Meta(description="deadline of one transfer")] = 600.0
    acquire_timeout_s: Annotated[Wait, Meta(description="how long the lease is asked for")] = 300.0
    round_timeout_s: Annotated[Wait, Meta(description="deadline of a round, re-drives included")] = 1800.0
    abandon_timeout_s: Annotated[Wait, Meta(description="how long the end of a round that was given up is awaited")] = (
        30.0
    )
    connect_timeout_s: Annotated[Wait, Meta(description="how long the coordinator is waited for at the start")] = 30.0
    request_timeout_s: Annotated[Wait, Meta(description="how long one answer of the coordinator is waited for")] = 10.0
    attempts: Annotated[int, Meta(description="rounds begun before a restarting coordinator is given up", ge=1)] = 3
    beat_s: Annotated[Wait, Meta(description="how often waiting ranks hear from the leader")] = 5.0
    host: Annotated[str, Meta(description="address at which engines of other hosts reach this rank")] = "127.0.0.1"
    sends_over: Annotated[
        SendsOver, Meta(description="collective: gloo or NCCL; nixl: RDMA by NIXL, which servers must have too (sends)")
    ] = SendsOver.COLLECTIVE
    keep_groups_s: Annotated[
        float,
        Meta(description="how long an unused group stays, with its memory (sends); 0: never", ge=0, le=86400),
    ] = 900.0
    runtime_dir: Annotated[Path | None, Meta(description="folder for sockets, on this host and ours alone")] = None
    checkpoint_dir: Annotated[Path | None, Meta(description="folder for checkpoints, seen by engines (disk)")] = None
    hf_config_dir: Annotated[Path | None, Meta(description="config and tokenizer files to put beside them")] = None
    save_every: Annotated[int, Meta(description="every n-th version is kept as a checkpoint; 0: none", ge=0)] = 0
    save_dir: Annotated[Path | None, Meta(description="folder for those, CHANNEL/checkpoint-VERSION below it")] = None
    keep_last: Annotated[int, Meta(description="so many of the newest of them stay", ge=1)] = 3
    keep_every: Annotated[int, Meta(description="of them, multiples of this stay for good; 0: none", ge=0)] = 0
    served: Annotated[
        Path | None, Meta(description="folder of the checkpoint that engines serve: it says how weights are quantized")
    ] = None

    def __post_init__(self) -> None:
        check_key_settings(self.keys, insecure_loopback=self.insecure_loopback)
        check_endpoints("coordinator", self.coordinator)
        if self.pause is PauseMode.IN_PLACE and self.flush:
            raise ValueError(
                "pause = in_place keeps the KV cache of running requests, so it cannot be flushed: set flush = false,"
                " or pause = retract"
            )
        if 0 < self.max_paused < self.min_engines:
            raise ValueError(
                f"min_engines = {self.min_engines} have to be verified before any serves, but only max_paused ="
                f" {self.max_paused} may stand still: raise max_paused, or lower min_engines"
            )
        if self.save_every and self.save_dir is None:
            raise ValueError("save_every needs save_dir, a folder for the checkpoints")
        if self.host.startswith("["):
            raise ValueError(f"host = {self.host}: give the address without brackets")
        transports.require_known(self.transport)
        if len(set(self.transport)) != len(self.transport):
            raise ValueError(f"transport names a kind twice: {', '.join(self.transport)}")

    def run_name(self) -> str:
        """The run as the coordinator is told it; empty: it neither needs nor takes the channel."""
        return self.name if self.run is None else self.run

    def doubt(self) -> str:
        """A warning about settings that are valid and seldom intended; empty for none."""
        if self.max_paused and not self.max_lag:
            return (
                f"max_paused = {self.max_paused} without max_lag: where a rolling round stops because its version"
                " breaks servers, the engines that it did not reach keep the version before, and get no requests"
                " until they have the committed one; set max_lag = 1 to have them served"
            )
        return ""

    def preferences(self) -> tuple[TransportKind, ...]:
        """The transports in order of preference; by default all, least traffic first."""
        return self.transport or PREFERRED

    def transports(self) -> tuple[TransportKind, ...]:
        """The transports that can be offered; files need a folder. Raises `ValueError` when none is left."""
        known = ((kind, transports.by_name(kind)) for kind in self.preferences())
        kinds = tuple(kind for kind, each in known if each.loaded_by is not LoadedBy.FILES or self.checkpoint_dir)
        if not kinds:
            raise ValueError(
                f"transport = {', '.join(self.transport)} needs checkpoint_dir, a folder that trainer and engines see"
            )
        return kinds

    def policy(self) -> Policy:
        """The policy that is sent to the coordinator."""
        return Policy(
            pause=self.pause,
            flush=self.flush,
            min_engines=self.min_engines,
            retries=self.redrives,
            transfer_timeout_s=self.transfer_timeout_s,
            slow=self.slow,
            quorum=self.quorum,
            slow_s=self.slow_s,
            max_paused=self.max_paused,
            max_lag=self.max_lag or 0,
        )

    def limits(self) -> PublishLimits:
        """Time limits of the publication machine."""
        return PublishLimits(
            acquire_s=self.acquire_timeout_s,
            round_s=self.round_timeout_s,
            abandon_s=self.abandon_timeout_s,
            attempts=self.attempts,
            engines_s=self.engines_timeout_s,
            min_engines=self.min_engines,
        )


def check_device(name: str) -> None:
    """Raise `ValueError` unless `name` is a device for buckets. Its presence on this machine is checked later."""
    if not _DEVICE.fullmatch(name):
        raise ValueError(
            f"device = {name!r} is none that buckets can be staged on: give cpu, cuda, or cuda:0 and so on"
        )
