"""A deployment in a storm: builds what a scenario names, lets the faults happen, and asks for calm afterwards."""

from __future__ import annotations

import random

import msgspec

from weightbus.control.machine.states import SENDING, Limits
from weightbus.control.protocol.messages import (
    Channel,
    EngineHealth,
    Outcome,
    PauseMode,
    Policy,
    RoundDone,
    TransportKind,
)

from .coordinator_process import CoordinatorProcess
from .disks import JournalDisk
from .engine_process import ORPHANED_S, EngineProcess
from .invariants import Judge
from .loop import Loop
from .network import Network, Weather
from .process import Process, Trap
from .scenario import DIRECT, SECOND, EngineSpec, Fault, Scenario
from .seals import trust_of
from .server_model import ServerModel
from .trainer_process import TrainerProcess
from .transfer_model import Outlet

LIMITS = Limits(
    heartbeat_s=2.0,
    takeover_s=5.0,
    publish_s=60.0,
    prepare_s=10.0,
    pause_s=10.0,
    offer_s=10.0,
    verify_s=15.0,
    commit_s=10.0,
    resume_s=20.0,
    abort_s=10.0,
    straggle_s=4.0,
    answers=128,
    blob_bytes=16 * 1024,
    forget_s=120.0,
)
"""Waits as in a deployment, shortened where a deployment waits for gigabytes. The ratios are what matters."""
SETTLE_S = 240.0
"""Within so long after the last fault every wait has ended: the longest round, a silent trainer, and a re-drive."""
QUIET_ROUND_S = 15.0
"""Of a round that nothing disturbs; most take two."""
TRANSFER_S = 20.0
RESTART_S = 1.0
LOOK_S = 1.0
MEMORY_LOOKS = 5
LEASE_SLACK_S = 13.0
HEARD_S = 8.0
"""An engine that got a message within so long hears its coordinator: two answered heartbeats."""
ORPHAN_SETTLED_S = 30.0
"""Time for an engine that serves an uncommitted version to be told otherwise, over a network that loses messages."""
FOREIGN_S = 6.0
"""Time for an agent that has nothing else to do to find out what another party did, and to pause the server."""
UNSAID_S = 8.0
"""How long a trainer may have nothing to say to a round that waits for its report: its report may be on the way."""
INBOX = 256
"""More unread messages than any agent may gather."""


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended."""

    seed: int
    trace: str
    faults: int
    messages: int
    steps: int
    committed: int
    violation: str = ""
    """Empty, or the invariant and what was found."""


class World:
    """Everything there is."""

    def __init__(self, scenario: Scenario, *, telling: bool = False) -> None:
        self.scenario = scenario
        self.limits = LIMITS
        self.channel = Channel("policy")
        self.loop = Loop(telling=telling)
        self.judge = Judge(self)
        self.data_rng = self.rng("data")
        self._dice = self.rng("dice")
        self.network = Network(self.loop, self.judge, self.rng("network"))
        self.journal = JournalDisk(self, self.rng("journal"))
        drift = self.rng("clocks")
        self.coordinator = CoordinatorProcess(self, self.network, self.journal, drift.uniform(-0.01, 0.01))
        self.network.coordinator = self.coordinator
        self.servers = {spec.name: ServerModel(self, spec.name, scenario.buckets) for spec in scenario.engines}
        self.engines = {
            spec.name: EngineProcess(
                self,
                self.servers[spec.name],
                spec.drift,
                spec.transports,
                live=spec.live,
                older=spec.older,
                apart_from=spec.apart_from,
            )
            for spec in scenario.engines
        }
        self.seconds: dict[str, EngineProcess] = {}
        """A second sidecar of some servers, by the first one's name: it has another name, record and address."""
        for spec in scenario.engines:
            if any(fault.kind in SECOND and fault.target == spec.name for fault in scenario.faults):
                self.seconds[spec.name] = self._second_of(spec)
        self.trainers = {
            name: TrainerProcess(self, name, drift.uniform(-0.01, 0.01), self._transports_of(name))
            for name in scenario.trainers
        }
        self.outlets: dict[str, Outlet] = {}
        self.cut_off: set[str] = set()
        """Engines whose data plane is parted from every trainer's."""
        self.trust = trust_of(scenario.trainers) if scenario.sealed else None
        """The allow-list on every engine's host; null where no keys are used."""
        self.faults = 0
        self._corrupt_next: int | None = None
        self._forge_next = self._mute_next = ""
        """The fault of the next deferred table, and its engine."""
        self._awaited: list[Fault] = []
        """Faults that wait for their moment."""
        self._restart_s: dict[str, float] = {}
        self._tables: dict[tuple[str, int], str] = {}
        self._requests: dict[tuple[str, int], str] = {}
        self._tags: dict[str, str] = {}
        self._holding = False
        """Trainers begin nothing new."""
        self._commits_in_calm = 0
        self._looks = 0
        self._quiet = False
        """All has settled after the storm: from here on no process has a reason to wait for a deadline."""
        self.rounds: list[RoundDone] = []
        """Every round that was closed."""
        self._paused_since: dict[str, float] = {}
        self._foreign_since: dict[str, float] = {}
        """Engine -> since when its agent could have done something about what another party did."""
        self._foreign_in: dict[str, int] = {}
        """Engine -> life of its agent in which another party loaded its server: a later one cannot tell (N57)."""
        self._orphan_since: dict[tuple[str, int], float] = {}
        """Engine and life of its agent -> since when it is against the promises of an orphan."""
        self._unsaid_since: float | None = None

    def _second_of(self, spec: EngineSpec) -> EngineProcess:
        second = EngineProcess(
            self,
            self.servers[spec.name],
            -spec.drift,
            spec.transports,
            live=spec.live,
            older=spec.older,
            apart_from=spec.apart_from,
            name=f"x{spec.name}",
        )
        self.engines[second.name] = second
        return second

    def _transports_of(self, trainer: str) -> tuple[TransportKind, ...]:
        specs = [spec for spec in self.scenario.engines if trainer not in spec.apart_from]
        kinds = dict.fromkeys(kind for spec in specs for kind in spec.transports)
        return tuple(sorted(kinds, key=lambda kind: kind is not DIRECT))  # first, if an engine takes it

    def rng(self, stream: str) -> random.Random:
        """The random numbers of one concern."""
        return random.Random(f"{self.scenario.seed}-{stream}")

    # -- a run

    def run(self) -> Ended:
        """The whole course: a storm, then calm."""
        try:
            return self._run()
        finally:
            if self.journal.sqlite is not None:
                self.journal.sqlite.discard()

    def _run(self) -> Ended:
        self._begin()
        loop = self.loop
        loop.run(self.scenario.calm_from)
        self._calm()
        self._holding = True
        self._wait("ends every round and settles every engine", self._unsettled)
        self._holding = False
        self._commits_in_calm, self._quiet = 0, True
        for engine in self.engines.values():
            if engine.apart_from and self.coin():  # it says nothing from here on, and no process waits for it
                engine.freeze()
        self._wait("publishes a version that every engine serves", self._unserved)
        if loop.endless:
            self.judge.broken("every-wait-ends", f"{loop.steps} steps, and no end: a process goes round in circles")
        self.coordinator.look()
        self._look_at_memory()
        violation = self.judge.violation
        return Ended(
            seed=self.scenario.seed,
            trace=loop.trace,
            faults=self.faults + self.network.faults,
            messages=self.network.messages,
            steps=loop.steps,
            committed=self.committed_version(),
            violation=f"{violation.invariant}: {violation.what}" if violation else "",
        )

    def _begin(self) -> None:
        self.network.weather = self.scenario.weather
        for fault in self.scenario.faults:
            self.loop.at(fault.at, lambda each=fault: self._due(each))
        for process in self.processes:
            if process not in self.seconds.values():
                self._watch_over(process)
        self.coordinator.start()
        for name, server in self.servers.items():
            self.loop.after(self._dice.random() * 2.0, server.start)
            self.loop.after(self._dice.random() * 2.0, self.engines[name].start)
        for trainer in self.trainers.values():
            self.loop.after(self._dice.random() * 3.0, trainer.start)
        self.loop.after(LOOK_S, self._look)

    def _wait(self, what: str, unfinished: object) -> None:
        """Run until `unfinished` finds nothing more; that it does within `SETTLE_S` is the liveness promise."""
        assert callable(unfinished)
        until = self.loop.now + SETTLE_S
        while not self.loop.halted and (left := unfinished()):
            if self.loop.now >= until:
                self.judge.broken("every-wait-ends", f"{SETTLE_S:.0f} s after the last fault no process {what}: {left}")
                return
            self.loop.run(self.loop.now + 0.25)

    # -- what is asked of the calm

    def _unsettled(self) -> str:  # noqa: PLR0911  # a list of what may be left
        server = self.coordinator.server
        channel = server.machine.channels.get(self.channel) if server else None
        if channel is None:
            return "the coordinator does not know the channel"
        if channel.round is not None:
            return f"the round of version {channel.round.version} is {channel.round.state}"
        for trainer in self.trainers.values():
            if trainer.busy:
                return f"{trainer.name} is still publishing"
        for name in self.servers:
            engine = self.engines[name]
            known = channel.engines.get(name)
            if known is None or not known.alive:
                return f"{name} has not joined"
            machine = engine.machine
            view = machine.view() if machine is not None else None  # a server that another party paused is said pending
            if view is None or view.health is not known.health:
                return f"{name} is {view and view.health}, and taken for {known.health}"
            if view.health is EngineHealth.CLEAN and not self.servers[name].generates:
                return f"{name} is clean, and does not generate"
            if view.health is not EngineHealth.CLEAN and not (view.reason and not self.servers[name].generates):
                return f"{name} is {view.health.value} without a reason, or generates"
        return ""

    def _unserved(self) -> str:
        if not self._commits_in_calm:
            return "nothing was committed"
        if left := self._unsettled_but_publishing():
            return left
        held = self.journal.channels[self.channel].committed
        wanted = (self._tags[held.table],) if held else ()
        for name, server in self.servers.items():
            engine = self.engines[name]
            if engine.apart_from:  # no round brings it anything: it goes on as it was settled
                machine = engine.machine
                if machine is None or (machine.health is EngineHealth.CLEAN) is not server.generates:
                    return f"{name} is {machine and machine.health}, generates: {server.generates}"
                continue
            if server.tags != wanted or not server.generates:
                return f"{name} holds {server.tags}, committed is {wanted}"
            if name not in self.judge.ready():
                return f"{name} is not listed as ready"
        return ""

    def _unsettled_but_publishing(self) -> str:
        server = self.coordinator.server
        channel = server.machine.channels.get(self.channel) if server else None
        return "" if channel and channel.round is None else "a round is running"

    # -- what machines and models ask

    @property
    def processes(self) -> tuple[Process, ...]:
        """The processes that can be killed."""
        return (self.coordinator, *self.engines.values(), *self.trainers.values())

    def coin(self) -> bool:
        """One of two."""
        return self._dice.random() < 0.5

    def journal_s(self) -> float:
        """How long a write and its fsync take."""
        return 0.0002 + 0.003 * self._dice.random()

    def server(self, name: str) -> ServerModel:
        """The server of an engine."""
        return self.engines[name].server

    def policy(self) -> Policy:
        """What trainers of this scenario ask for."""
        scenario = self.scenario
        return Policy(
            pause=PauseMode.RETRACT if scenario.flush else PauseMode.IN_PLACE,
            flush=scenario.flush,
            retries=scenario.redrives,
            min_engines=scenario.min_engines,
            transfer_timeout_s=TRANSFER_S,
            slow=scenario.slow,
            quorum=scenario.quorum,
            slow_s=scenario.slow_s,
            max_paused=scenario.max_paused,
            max_lag=scenario.max_lag,
        )

    def publishes(self, trainer: str, epoch: int, request: str, table: str, tag: str) -> None:
        """A trainer announces a version under `epoch`."""
        self._tables[trainer, epoch] = table
        self._requests[trainer, epoch] = request
        self._tags[table] = tag

    def table_published(self, trainer: str, epoch: int) -> str | None:
        """The table that `trainer` announced under `epoch`."""
        return self._tables.get((trainer, epoch))

    def request_published(self, trainer: str, epoch: int) -> str | None:
        """The key under which `trainer` announced a version under `epoch`."""
        return self._requests.get((trainer, epoch))

    def tag_of(self, table: str) -> str:
        """What a bucket of that table holds."""
        return self._tags.get(table, "unknown/table")

    def is_published(self, table: str) -> bool:
        """A trainer has announced a version that has this table."""
        return table in self._tags

    def committed_version(self) -> int:
        """What the journal's disk holds; 0 for nothing."""
        known = self.journal.channels.get(self.channel)
        return known.committed.version if known and known.committed else 0

    def may_begin(self) -> bool:
        """Whether trainers may begin a publication."""
        return not self._holding

    def opened(self, outlet: Outlet) -> None:
        """A trainer has something on offer."""
        outlet.corrupt, self._corrupt_next = self._corrupt_next, None
        if outlet.corrupt is not None:
            self.loop.note(outlet.trainer.name, f"** bucket {outlet.corrupt} of epoch {outlet.epoch} is corrupted")
        self.outlets[self.address(outlet)] = outlet

    def tabled(self, outlet: Outlet) -> None:
        """... the table of which follows."""
        outlet.forged_for, self._forge_next = self._forge_next, ""
        outlet.mute_for, self._mute_next = self._mute_next, ""
        for engine, what in ((outlet.forged_for, "is given another table"), (outlet.mute_for, "hears of no table")):
            if engine:
                self.loop.note(outlet.trainer.name, f"** in epoch {outlet.epoch} {engine} {what}")

    @staticmethod
    def address(outlet: Outlet) -> str:
        """Where it can be had: the same place in every epoch, as a Unix socket's path is."""
        return f"{outlet.trainer.name}/{outlet.kind.value}"

    def round_ended(self, done: RoundDone) -> None:
        """The coordinator closed a round."""
        self.rounds.append(done)
        self._commits_in_calm += done.outcome is Outcome.COMMITTED
        if self._quiet and (took := done.seconds["total"]) > QUIET_ROUND_S:
            what = f"the round of version {done.version} took {took:.1f} s in calm weather: {done.seconds}"
            self.judge.broken("no-needless-wait", what)

    # -- looking around

    def _look(self) -> None:
        self.loop.after(LOOK_S, self._look)
        self._look_at_leases()
        self._look_at_orphans()
        self._look_at_strangers()
        self._look_at_reports()
        self._looks += 1
        if self._looks % MEMORY_LOOKS == 0:
            self._look_at_memory()

    def _look_at_leases(self) -> None:
        now = self.loop.now
        for name, engine in self.engines.items():
            server, machine = engine.server, engine.machine
            held_up = (
                machine is not None
                and not engine.frozen
                and server.up
                and not server.frozen
                and server.paused
                and machine.up
                and machine.health is EngineHealth.CLEAN
                and machine.pause_lease.given
                and not self._hears(engine)
            )
            if not held_up:
                self._paused_since.pop(name, None)
                continue
            since = self._paused_since.setdefault(name, now)
            if now - since > self.limits.lease_s + LEASE_SLACK_S:
                self.judge.broken("pause-lease", f"{name} is clean and has been paused for {now - since:.0f} s")

    def _look_at_reports(self) -> None:
        """A trainer that has reported, and hears no answer, asks; so one that waits says nothing of its own accord."""
        server = self.coordinator.server
        channel = server.machine.channels.get(self.channel) if server and not self.coordinator.frozen else None
        round_ = channel.round if channel else None
        holder = self.trainers.get(round_.holder) if round_ else None
        awaited = (
            round_ is not None and holder is not None and round_.state in SENDING and round_.waits_for(round_.holder)
        )
        if not (awaited and holder is not None and holder.alive and not holder.frozen and holder.says_nothing):
            self._unsaid_since = None
            return
        self._unsaid_since = self.loop.now if self._unsaid_since is None else self._unsaid_since
        if self.loop.now - self._unsaid_since > UNSAID_S:
            what = f"the round waits for the report of {holder.name}, which waits for the round"
            self.judge.broken("heard-out", what)

    def may_serve_orphan(self, name: str) -> bool:
        """Whether an engine may generate from a version that was never committed."""
        silent_s = max(self._unheard_s(each) for each in self.engines.values() if each.server.name == name)
        return self.scenario.orphaned == "serve_verified" and silent_s >= ORPHANED_S - 1.0

    def _unheard_s(self, engine: EngineProcess) -> float:
        """Seconds since the coordinator last said anything but a refusal to this engine."""
        return self.loop.now - self.network.heard_at.get(engine.name, 0.0)

    def _look_at_orphans(self) -> None:
        now = self.loop.now
        for name, engine in self.engines.items():
            if not engine.server.generates:
                self.judge.orphans_served.pop(name, None)
            server, machine = engine.server, engine.machine
            runs = machine is not None and not engine.frozen and server.up and not server.frozen and machine.up
            generates = server.generates and len(server.tags) == 1 and not self.judge.is_committed(server.tags[0])
            stands = (
                self.scenario.orphaned == "serve_verified"
                and machine is not None
                and machine.health is EngineHealth.PENDING
                and machine.held is not None
                and server.paused
                and self._unheard_s(engine) > HEARD_S
                and self.network.refused_server.get(name) != engine.life
            )
            settled = generates and self._unheard_s(engine) < HEARD_S
            if not runs or not (settled or stands):
                self._orphan_since.pop((name, engine.life), None)
                continue
            since = self._orphan_since.setdefault((name, engine.life), now)
            if stands and now - since > ORPHANED_S + LEASE_SLACK_S:
                self.judge.broken("orphans", f"{name} holds a verified version, and is paused for {now - since:.0f} s")
            if settled and now - since > ORPHAN_SETTLED_S:
                self.judge.broken("served-uncommitted", f"{name} generates from {server.tags}, and is told otherwise")

    def _look_at_strangers(self) -> None:
        """What another party did is held against an agent that ran for so long without anything else to do.

        While a clean server is paused for a round no look at its weights is taken (N57); once it generates, one is.
        """
        for name, engine in self.engines.items():
            server, machine = engine.server, engine.machine
            runs = machine is not None and not engine.frozen and server.up and not server.frozen and machine.up
            view = machine.view() if machine is not None else None
            free = runs and view is not None and machine.pause_lease.given and not view.doing
            rests = view is not None and view.paused and server.paused and view.health is EngineHealth.CLEAN
            if not server.foreign or not free or rests or self._foreign_in.get(name, engine.life) != engine.life:
                self._foreign_since.pop(name, None)
            elif self.loop.now - self._foreign_since.setdefault(name, self.loop.now) > FOREIGN_S:
                server.foreign = False
                self.judge.server_changed(server)

    def _hears(self, engine: EngineProcess) -> bool:
        if engine.name in self.network.revoked:  # it is refused, which is no news of what is paused or committed
            return False
        heard = engine.client.heard_at if engine.client else None
        return heard is not None and engine.clock() - heard < self.limits.lease_s

    def _look_at_memory(self) -> None:
        sizes: dict[str, tuple[int, int]] = {}
        if self.coordinator.server is not None:
            machine = self.coordinator.server.machine
            machine.status(self.coordinator.clock())  # a reader finds it in one piece
            sizes["answers"] = (len(machine.replies), self.limits.answers)
            sizes["blobs"] = (machine.blobs.held_bytes, self.limits.blob_bytes)
            waits = machine._journal_writer.writing is not None  # for a disk, for `HUNG_S` at most
            sizes["waiting events"] = (len(machine._queued_work), 200 if waits else 0)
        for agent in (*self.engines.values(), *self.trainers.values()):
            if agent.client is not None:
                sizes[f"inbox of {agent.name}"] = (len(agent.client._receive_queue), INBOX)
                sizes[f"requests of {agent.name}"] = (len(agent.client._session.pending), 8)
        for engine in self.engines.values():
            if engine.machine is not None:
                sizes[f"answers of {engine.name}"] = (engine.unsaid, INBOX)
        for what, (found, bound) in sizes.items():
            if found > bound:
                self.judge.broken("memory-bounded", f"{what}: {found}, at most {bound} are expected")

    # -- faults

    def _due(self, fault: Fault) -> None:
        if fault.moment:
            self._awaited.append(fault)
        else:
            self._befalls(fault)

    def entered(self, state: str) -> None:
        """A round came so far: what waited for that happens now, or in a moment."""
        due = [fault for fault in self._awaited if fault.moment == state]
        for fault in due:
            self._awaited.remove(fault)
            if fault.kind == "stall":  # before what the state has to say is sent
                self._befalls_in_time(fault)
                continue
            self.loop.after(self._dice.choice((0.0, 0.004, 0.02, 0.1)), lambda each=fault: self._befalls_in_time(each))

    def _befalls_in_time(self, fault: Fault) -> None:
        if self.loop.now < self.scenario.calm_from:
            self._befalls(fault)

    def _befalls(self, fault: Fault) -> None:  # noqa: C901, PLR0912, PLR0915  # one case per kind
        self.faults += 1
        target, lasts = fault.target, fault.lasts
        match fault.kind:
            case "trap":
                process = self._process(target)
                self._restart_s[target] = lasts
                if process.alive:
                    process.trap = Trap(fault.point, fault.count, fault.where, power=fault.power)
            case "kill":
                self._restart_s[target] = lasts
                self._process(target).die("SIGKILL")
            case "record-lost":
                self._restart_s[target] = lasts
                self._process(target).die("SIGKILL")
                self.loop.note(target, "** its record is gone")
                self.engines[target].record.vanish()
            case "renamed" | "second":
                if fault.kind == "renamed":
                    self._restart_s[target] = lasts + 0.5
                    self._process(target).die("SIGKILL")
                self.loop.after(0.05, self.seconds[target].start)
                self.loop.after(lasts, lambda: self.seconds[target].die("SIGKILL"))
            case "setback":
                self._restart_s[target] = lasts
                self._process(target).die("SIGKILL")
                self.journal.set_back(fault.count)
            case "power":
                self._restart_s[target] = lasts
                self._process(target).lose_power()
            case "freeze":
                self._process(target).freeze()
                self.loop.after(lasts, self._process(target).thaw)
            case "cut" | "cut-up" | "cut-down":
                self.network.cut(target, up=fault.kind != "cut-down", down=fault.kind != "cut-up")
                self.loop.after(lasts, lambda: self.network.heal(target))
            case "stall":
                self.network.stall(target, lasts)
            case "revoke":
                self.network.revoke(target)
                self.loop.after(lasts, lambda: self.network.trust_again(target))
            case "data-cut":
                self.loop.note(target, "** its data plane is cut off")
                self.cut_off.add(target)
                self.loop.after(lasts, lambda: self.cut_off.discard(target))
            case "disconnect":
                self.loop.note(target, "** its connection breaks")
                self.network.disconnect(target)
            case "server-kill" | "host-kill":
                if fault.kind == "host-kill":
                    self._restart_s[target] = lasts
                    self.engines[target].lose_power()
                self._kill_server(target, lasts)
            case "server-kill-unseen":
                self.engines[target].freeze()
                self._kill_server(target, 1.0)
                self.loop.after(max(1.5, lasts), self.engines[target].thaw)
            case "server-freeze":
                self.servers[target].freeze()
                self.loop.after(lasts, self.servers[target].thaw)
            case "server-dies-loading":
                self.servers[target].die_half_loaded(fault.count)
                self.loop.after(lasts + 5.0, lambda: self._revive(target))
            case "foreign-load":
                if self.engines[target].watches:
                    label = self.servers[target].label if self.engines[target].knows_weights else "77"
                    self.servers[target].load_foreign(label=label)
                    self._foreign_in[target] = self.engines[target].life
                    self._foreign_since.pop(target, None)  # what it did before may have been undone unseen
            case "foreign-resume":
                self._resume_foreign(target, self.loop.now + lasts)
            case "corrupt":
                self._corrupt_next = fault.count
            case "wrong-table":
                self._forge_next = target
            case "table-lost":
                self._mute_next = target
            case "disk-full":
                self._fill(target, full=True)
                self.loop.after(lasts, lambda: self._fill(target, full=False))
            case "disk-hang" if target:
                self.engines[target].record.hang(min(lasts, self.scenario.calm_from - self.loop.now))
                self.loop.note(target, f"** the disk of its record hangs for {lasts:.1f} s")
                self.loop.after(lasts, self.engines[target].record.goes_on)
            case "disk-hang":
                self.journal.hangs_until = min(self.loop.now + lasts, self.scenario.calm_from)
                self.loop.note("coordinator", f"** its disk hangs for {lasts:.1f} s")
            case "wall-jump":
                self.loop.note("coordinator", f"** the wall clock jumps by {lasts:g} s")
                self.journal.wall_offset += lasts
            case "mislabel":  # never drawn: shows that the judge sees
                self.servers[target].set_label("a lie")
            case "stop":
                self._restart_s[target] = lasts
                self.coordinator.stop()
            case _:
                raise ValueError(fault.kind)

    def _calm(self) -> None:
        """Everything works again."""
        self._awaited.clear()
        self.cut_off.clear()
        self.network.weather = Weather()
        self.loop.note("world", "-- from here on nothing goes wrong any more")
        for second in self.seconds.values():
            second.thaw()
            second.die("SIGKILL")
        for process in self.processes:
            process.trap = None
            process.thaw()
            self._restart_s[process.name] = RESTART_S
            self.network.heal(process.name)
            self.network.trust_again(process.name)
        for name, server in self.servers.items():
            server.thaw()
            server.spare()
            self._fill(name, full=False)
            self._revive(name)
        self._fill("coordinator", full=False)
        self._corrupt_next, self._forge_next, self._mute_next = None, "", ""

    def _watch_over(self, process: Process) -> None:
        """A supervisor: what dies is started again."""
        name = process.name
        process.on_death = lambda: self.loop.after(self._restart_s.get(name, RESTART_S), process.start)

    def _resume_foreign(self, name: str, until: float) -> None:
        """Now if that hits a transfer; else as soon as the server is held for long, its agent having nothing to do."""
        machine = self.engines[name].machine
        held = machine is not None and machine.up and not machine.view().doing and machine.health is EngineHealth.DIRTY
        if held or until <= self.loop.now:
            self.servers[name].resume_foreign()
        else:
            self.loop.after(0.5, lambda: self._resume_foreign(name, until))

    def _kill_server(self, name: str, lasts: float) -> None:
        self.servers[name].die()
        self.loop.after(max(1.0, lasts), lambda: self._revive(name))

    def _revive(self, name: str) -> None:
        server = self.servers[name]
        if not server.up:
            server.start()

    def _fill(self, target: str, *, full: bool) -> None:
        disk = self.journal if target == "coordinator" else self.engines[target].record.files
        if disk.full is not full:
            disk.full = full
            self.loop.note(target, "** its disk is full" if full else "** its disk has room again")

    def _process(self, name: str) -> Process:
        return self.coordinator if name == "coordinator" else self.engines.get(name) or self.trainers[name]


def simulate(scenario: Scenario, *, tracing: bool = False) -> Ended:
    """Run a scenario; `tracing` makes the hash of its course, too."""
    return World(scenario, telling=tracing).run()
