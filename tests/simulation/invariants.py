"""The judge: what must never be, by name, found out from the truth and not from what agents say.

The truth is what the servers' buckets hold, what the journal's disk holds, and what left the coordinator's socket. A
machine that believes wrong things about itself is not asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import msgspec

from weightbus.control.machine.effects import (
    AgentJoined,
    AnyObservation,
    AnyRecord,
    Committed,
    EngineAhead,
    EpochRaised,
    EpochTaken,
    ReadinessChanged,
    RoundClosed,
    RoundReadiness,
)
from weightbus.control.protocol.messages import (
    Abandon,
    Ack,
    Acquire,
    AgentId,
    Commit,
    Granted,
    HeldVersion,
    Hello,
    Offered,
    Outcome,
    Pause,
    Prepare,
    Publish,
    RefusalCode,
    Refused,
    Release,
    RoundDone,
    Sent,
    Serving,
    ToAgent,
    ToCoordinator,
    Transfer,
    Welcome,
)
from weightbus.trainer_agent.machine.events import EndReason
from weightbus.trainer_agent.machine.publication import PublicationResult

from .server_model import FOREIGN, LAUNCH

if TYPE_CHECKING:
    from .server_model import ServerModel
    from .world import World

INVARIANTS: Final = {
    "no-mixed-tokens": "a server that generates holds buckets of one version",
    "left-as-launched": "a server that generates from a version that leaves a part holds that part as it was launched",
    "true-labels": "a server that generates is labeled with the version of its buckets",
    "fresh-caches": "after a round with flush on, nothing is answered from the cache of other weights",
    "fenced-bytes": "bytes of an epoch never land on a server after bytes of a newer epoch",
    "one-holder": "an epoch is granted to one trainer and once, whatever became of the journal; on one journal epochs"
    " only grow, and only the newest commits",
    "one-run": "a channel goes to another run only where that one said that it takes it, whatever was restarted",
    "known-epochs": "no agent has seen an epoch that is not on disk, unless that was set back",
    "durable-before-said": "a Commit or a committed RoundDone leaves only when its version is on disk",
    "journal-survives": "what the journal called durable is found after every crash, and no other record",
    "record-survives": "a sidecar finds its record whole after any crash: the last one, or the one being written",
    "never-back": "the committed version of a channel never goes back, unless a trainer said so",
    "believed": "what an honest trainer signed is believed, whatever was lost, repeated or restarted in between, and no"
    " other table where signatures are asked for",
    "one-table": "a committed version has one digest table",
    "nothing-lost": "what a trainer was told to be committed is committed on disk, with that trainer's own table",
    "forgotten-is-not-told": "what a set-back journal has forgotten is not taken for committed by a trainer that has"
    " its lease, or the last answer to its `Hello`, from a later life",
    "same-answer": "the same request gets the same answer",
    "ready-is-ready": "an engine listed as ready holds the bits of the committed version, or of one that the policy"
    " still allows, and was heard of lately",
    "listed-once": "no server is listed as ready under two names; where its first agent sees no socket of it, and says"
    " nothing of its new launch, no longer than it takes to lose that agent",
    "commit-verified": "a version is committed only when a server has held exactly its buckets",
    "enough-engines": "a version is committed only with as many verified engines as its trainer asked for",
    "left-alone": "an engine without a transport is told nothing of a round, and is listed only once it said"
    " that it serves",
    "pause-lease": "a clean engine whose agent runs is not paused for longer than its lease without a coordinator",
    "orphans": "by serve_verified an engine with a verified version is not paused for long without a coordinator",
    "served-uncommitted": "a server generates from its launch weights or a committed version; by serve_verified, once"
    " no coordinator was heard of for long, from a verified one too, until a coordinator is back",
    "memory-bounded": "nothing grows with time",
    "every-wait-ends": "once faults stop, rounds end, engines serve or say why not, and a publication commits",
    "begun-anew": "a version whose table does not follow after all is announced again with it, and is not refused for"
    " its own first round",
    "understood": "no engine is told of a deferred table unless it has said that it supports that",
    "heard-out": "a round waits for its trainer's report only while that trainer is sending, asking or gone",
    "no-needless-wait": "in calm weather, once all is settled, a round waits for no deadline",
    "nothing-raises": "no machine contradicts itself, whatever it is told",
}
READY_GRACE_S: Final = 25.0
"""How long a server that changed by itself, or whose agent is silent, may stay listed: the silence after which an agent
counts as lost, twice."""
LISTED_TWICE_S: Final = 11.0
"""How long that may be: `silence_s`, and a second for the coordinator to take it up."""
REMEMBERED: Final = (Acquire, Release, Publish, Offered, Sent, Abandon)


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        self.invariant, self.what = invariant, what
        super().__init__(f"{invariant}: {what}")


class Memory(msgspec.Struct):
    """What the disk's records say. A journal that is set back to a copy forgets what came after that, answers too."""

    taken: int = 0
    """The epoch that was taken last."""
    run: str = ""
    """The run that was granted a lease last."""
    raised: int = 0
    """That to which engines raised it last."""
    tables: dict[int, str] = {}
    committed: HeldVersion | None = None
    replaced: HeldVersion | None = None
    """What was committed before."""
    allowed: list[HeldVersion] = []
    """Versions before the committed one that engines may still serve."""
    requests: dict[str | None, int] = {}
    """What was committed under which key."""
    ever: set[tuple[int, str]] = set()
    """Versions that were committed, with their tables."""
    ended: set[int] = set()
    """Epochs of rounds whose end is written down."""

    def copy(self) -> Memory:
        """As it is now."""
        return Memory(
            self.taken,
            self.run,
            self.raised,
            dict(self.tables),
            self.committed,
            self.replaced,
            list(self.allowed),
            dict(self.requests),
            set(self.ever),
            set(self.ended),
        )


class Judge:
    """Watches a world. The first violation ends it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violation: Violation | None = None
        self._disk = Memory()
        self._takeovers: set[tuple[str, int]] = set()
        """Trainers and versions whose request of the lease takes the channel; such a request may be late."""
        self._holders: dict[int, str] = {}
        """Of every epoch that was ever taken, also in lives that the journal does not know of."""
        self._lost: dict[tuple[int, str], int] = {}
        """What was committed in such lives -> which set-back took it last."""
        self._set_backs = 0
        self._told_after: dict[tuple[str, object], int] = {}
        """Trainer and epoch granted, or key of its `Hello` -> after which set-back it was answered."""
        self._rolling: str | None = None
        """The publication that was committed last, until its round is over: some may still wait for their turn."""
        self._committed_tags: set[str] = set()
        """Tags of all versions that were ever committed, in whatever life of the journal."""
        self.orphans_served: dict[str, str] = {}
        """Server -> the uncommitted version from which it generates; its coordinator has to end that, in time."""
        self._held: set[str] = set()
        """Tags that a server held as a whole."""
        self._ghosts: list[Committed] = []
        self._outcomes: dict[int, Outcome] = {}
        self._answers: dict[tuple[str, str], ToAgent] = {}
        self._asked: dict[str, type] = {}
        self._ready: dict[str, float | None] = {}
        """Engine -> since when the truth speaks against it."""
        self._twice: dict[str, float] = {}
        """Server -> since when it is listed under two names (N47)."""
        self._launches: dict[str, str] = {}
        """Engine -> the launch of its server that its last `Hello` named."""
        self._spoke_at: dict[str, float] = {}
        """Engine -> when it last said that it serves."""
        self._joined_at: dict[str, float] = {}
        """Engine -> since when the coordinator knows it, where it may have been told to pause before."""
        self._incarnations: dict[str, str] = {}
        """Engine -> the one that the coordinator knows; what that says of its server is late once there is another."""

    def broken(self, invariant: str, what: str) -> None:
        """`invariant` does not hold."""
        assert invariant in INVARIANTS
        if self.violation is None:
            self.violation = Violation(invariant, what)
            self._world.loop.halted = True
            self._world.loop.note("JUDGE", f"!! {invariant}: {what}")

    # -- servers

    def server_changed(self, server: ServerModel) -> None:
        """Whatever a token made now would be made of."""
        if not server.generates or server.foreign:
            return
        tags = server.tags
        if len(tags) != 1:
            self.broken("no-mixed-tokens", f"{server.name} generates from {tags}")
            return
        (tag,) = tags
        if self.is_committed(tag):
            self.orphans_served.pop(server.name, None)
        elif self.orphans_served.get(server.name) != tag:
            self.orphans_served[server.name] = tag
            if not self._world.may_serve_orphan(server.name):
                self.broken("served-uncommitted", f"{server.name} generates from {tag}, which was never committed")
        label = tag.partition("/")[0]
        scenario = self._world.scenario
        leaves = label.isdigit() and scenario.leaves_part(int(label))
        if scenario.leaves and not server.left_unseen and server.left != (LAUNCH if leaves else tag):
            self.broken("left-as-launched", f"{server.name} generates from {tag}, beside it from {server.left}")
        if label != server.label:
            self.broken("true-labels", f"{server.name} generates from {tag}, labeled {server.label!r}")
        if self._world.scenario.flush and server.cached - {tag}:
            self.broken("fresh-caches", f"{server.name} answers with {tag} from caches of {sorted(server.cached)}")

    def is_committed(self, tag: str) -> bool:
        """Whether weights are those of a launch, or of a version that was ever committed."""
        return tag == LAUNCH or tag in self._committed_tags

    def loaded(self, server: ServerModel, epoch: int) -> None:
        """A bucket of `epoch` landed."""
        if len(server.tags) == 1:
            self._held.add(server.tags[0])
        if epoch < server.epoch_loaded:
            self.broken("fenced-bytes", f"{server.name} took a bucket of epoch {epoch} after {server.epoch_loaded}")

    # -- the journal

    def durable(self, record: AnyRecord) -> None:
        """The disk holds `record`."""
        disk = self._disk
        if isinstance(record, EpochTaken):
            if record.epoch <= disk.taken or record.epoch in self._holders:
                self.broken("one-holder", f"{record.holder} takes epoch {record.epoch} after {disk.taken}")
            disk.taken = max(disk.taken, record.epoch)
            if record.run and not record.in_round:
                if disk.run not in ("", record.run) and (record.holder, record.version) not in self._takeovers:
                    self.broken("one-run", f"{record.run} is granted the channel of {disk.run}, and took nothing over")
                disk.run = record.run
            self._holders.setdefault(record.epoch, record.holder)
        elif isinstance(record, EpochRaised):
            disk.raised = record.epoch
        elif isinstance(record, Committed):
            disk.ended.add(record.announced)
            self._durable_commit(record)
        elif isinstance(record, RoundClosed):
            disk.ended.add(record.done.epoch)

    def memory(self) -> Memory:
        """What is known of the disk, to be given to `set_back` together with a copy of that."""
        return self._disk.copy()

    def set_back(self, memory: Memory) -> None:
        """The disk holds an older copy: what was committed or answered since is lost, and no epoch is taken again."""
        self._set_backs += 1
        self._lost |= dict.fromkeys(self._disk.ever - memory.ever, self._set_backs)
        self._disk = memory.copy()
        self._outcomes = {epoch: how for epoch, how in self._outcomes.items() if epoch in memory.ended}
        self._rolling = None

    def _durable_commit(self, record: Committed) -> None:
        disk = self._disk
        before, rollback = disk.committed, record.rollback
        if before is not None and record.version < before.version and not rollback:
            self.broken("never-back", f"the disk goes from {before.version} to {record.version}")
        if rollback:
            disk.tables.clear()
        known = disk.tables.setdefault(record.version, record.table)
        if known != record.table:
            self.broken("one-table", f"version {record.version} has two tables")
        highest = self._world.journal.channels[record.channel].epoch
        if record.epoch != highest and (record.epoch, highest) != (disk.taken, disk.raised):
            what = f"version {record.version} is committed under epoch {record.epoch}; {highest} was taken since"
            self.broken("one-holder", what)
        if len(record.engines) < self._world.scenario.min_engines:
            self.broken("enough-engines", f"version {record.version} is committed with {len(record.engines)} engines")
        if record.engines and self._world.tag_of(record.table) not in self._held:
            self.broken("commit-verified", f"version {record.version} is committed, and no server ever held it")
        disk.ever.add((record.version, record.table))
        self._committed_tags.add(self._world.tag_of(record.table))
        disk.requests[record.request] = record.version
        disk.replaced, self._rolling = before, record.request
        lag = self._world.scenario.max_lag
        known_before = [] if rollback or before is None else [*disk.allowed, before]
        disk.allowed = [each for each in known_before if 0 < record.version - each.version <= lag]
        disk.committed = HeldVersion(version=record.version, manifest=record.manifest, table=record.table)

    def resurrected(self, record: AnyRecord) -> None:
        """A write that was refused turns out to have reached the disk: what was said of it may be wrong."""
        if isinstance(record, Committed):
            self._ghosts.append(record)
            self._committed_tags.add(self._world.tag_of(record.table))

    # -- what the coordinator says

    def takes_over(self, trainer: str, version: int) -> None:
        """A trainer asks for the lease, and takes the channel."""
        self._takeovers.add((trainer, version))

    def asked(self, message: msgspec.Struct) -> None:
        """An agent made a request."""
        if isinstance(message, REMEMBERED):
            self._asked[message.request] = type(message)

    def said(self, agent: str, message: ToAgent) -> None:
        """A message left the coordinator."""
        match message:
            case Commit():
                self._claims(message.version, message.table, f"Commit to {agent}")
            case Welcome() | Granted():
                repeated = self._answers.get((agent, message.request)) == message
                if message.committed is not None and not repeated:
                    held = message.committed
                    self._claims(held.version, held.table, f"{type(message).__name__} to {agent}")
                answered = message.epoch if isinstance(message, Granted) else message.request
                self._told_after.setdefault((agent, answered), self._set_backs)
                if isinstance(message, Granted):
                    self._granted(agent, message)
            case RoundDone():
                self._round_done(agent, message)
            case Prepare() | Transfer() if not message.table and self._world.engines[agent].older:
                self.broken("understood", f"{agent} is told of {type(message).__name__} without a table")
            case Prepare() | Pause() | Transfer() if self._is_apart(agent, message.epoch):
                self.broken("left-alone", f"{agent} is told of {type(message).__name__}, and can take nothing")
            case _:
                pass
        stranger = isinstance(message, Refused) and message.code is RefusalCode.UNKNOWN_AGENT
        if isinstance(message, Ack | Granted | Refused) and message.request in self._asked and not stranger:
            self._same(agent, message)

    def heard(self, agent: str, message: ToCoordinator) -> None:
        """The coordinator takes up what an agent says."""
        if isinstance(message, Serving):
            self._spoke_at[agent] = self._world.loop.now
        if isinstance(message, Hello) and message.engine is not None:
            self._launches[agent] = message.engine.generation

    def _is_apart(self, engine: str, epoch: int) -> bool:
        """Whether the round of `epoch` is a trainer's that has no transport for the engine."""
        return self._holders.get(epoch, "") in self._world.engines[engine].apart_from

    def _claims(self, version: int, table: str, where: str) -> None:
        held = self._world.journal.channels.get(self._world.channel)
        durable = held.committed if held else None
        if durable is None or (durable.version, durable.table) != (version, table):
            found = durable.version if durable else None
            self.broken("durable-before-said", f"{where} names version {version}, on disk is {found}")

    def _granted(self, agent: str, message: Granted) -> None:
        known = self._holders.get(message.epoch)
        if known != agent:
            self.broken("one-holder", f"epoch {message.epoch} is granted to {agent}, on disk it is {known}'s")

    def _round_done(self, agent: str, message: RoundDone) -> None:
        if self._world.request_published(agent, message.epoch) == self._rolling:
            self._rolling = None
        before = self._outcomes.setdefault(message.epoch, message.outcome)
        if before is not message.outcome and not self._ghosts:
            self.broken("same-answer", f"the round of epoch {message.epoch} was {before}, now {message.outcome}")
        ours = self._world.table_published(agent, message.epoch)
        request = self._world.request_published(agent, message.epoch)
        if message.outcome is Outcome.COMMITTED:
            if ours is not None and (message.version, ours) not in self._disk.ever:
                found = self._disk.tables.get(message.version)
                self.broken("nothing-lost", f"{agent} is told that {message.version} is committed; on disk: {found}")
        elif request in self._disk.requests and not self._ghosts:
            self.broken("nothing-lost", f"{agent} is told that {message.version} came to nothing; it is on disk")

    def believes_table(self, engine: str, table: str, believed: bool) -> bool:
        """An engine that trusts signatures was given a table that followed. Whether a trainer has published it."""
        published = self._world.is_published(table)
        if believed and not published:
            self.broken("believed", f"{engine} believes table {table[:12]}, which no trainer signed")
        return published

    def publication_over(
        self, trainer: str, version: int, table: str, ending: EndReason, *, lease: int, hello: str
    ) -> None:
        """A trainer learned how its publication ended, which has `lease`; the answer to its `hello` it heard last."""
        durable = (version, table) in self._disk.ever
        if ending is EndReason.COMMITTED and not durable:
            lost = self._lost.get((version, table), 0)
            after = max(self._told_after.get((trainer, each), 0) for each in (lease, hello))
            if not lost:
                self.broken("nothing-lost", f"{trainer} takes its version {version} for committed; it never was")
            elif lost <= after:
                what = f"{trainer} takes its version {version} for committed; set-back {lost} has forgotten it"
                self.broken("forgotten-is-not-told", f"{what}, and it was told so after set-back {after}")
        if ending is EndReason.ABORTED and durable and not self._ghosts:
            self.broken("nothing-lost", f"{trainer} takes its version {version} for aborted; it was committed")

    def begun_anew(self, trainer: str, version: int, result: PublicationResult) -> None:
        """How a publication ended whose table did not follow after all."""
        if result.code is RefusalCode.NOT_ALLOWED:
            self.broken("begun-anew", f"{trainer}'s version {version} is refused: {result.reason}")

    def _same(self, agent: str, message: Ack | Granted | Refused) -> None:
        key = (agent, message.request)
        before = self._answers.get(key)
        if before is None:
            if not isinstance(message, Refused):
                self._answers[key] = message
        elif before != message:
            self.broken("same-answer", f"{agent} asked {message.request} twice: {before}, then {message}")

    def restarted(self) -> None:
        """Another life of the coordinator: what lived in memory is answered anew."""
        self._answers.clear()
        self._ready.clear()
        self._twice.clear()
        self._joined_at.clear()
        self._rolling = None

    # -- the ready list

    def observed(self, what: AnyObservation) -> None:
        """The coordinator noted something."""
        if isinstance(what, EngineAhead) and not self._set_backs:
            self.broken("known-epochs", f"{what.engine} has seen {what.epoch}, on disk is {what.known}")
        if isinstance(what, AgentJoined):
            self._incarnations[what.agent] = what.incarnation
            if self._disk.taken:  # before, it could not have been paused
                self._joined_at[what.agent] = self._world.loop.now
        if isinstance(what, ReadinessChanged):
            self._listed(what.engine, ready=what.ready)
        elif isinstance(what, RoundReadiness):
            for engine in what.engines:
                self._listed(engine, ready=what.ready)

    def _listed(self, engine: AgentId, *, ready: bool) -> None:
        if ready:
            self._ready[engine] = None
            server = self._world.server(engine)
            names = [name for name in self._ready if self._world.server(AgentId(name)) is server]
            if len(names) > 1:
                launches = {self._launches[name] for name in names}
                if len(launches) < len(names) or self._world.engines[server.name].socket:
                    self.broken("listed-once", f"{server.name} is listed as {names}")
                self._twice.setdefault(server.name, self._world.loop.now)
            silent = self._spoke_at.get(engine, 0.0) < self._joined_at.get(engine, 0.0)
            if silent and self._world.engines[engine].apart_from:
                self.broken("left-alone", f"{engine} is listed as ready, and has not said that it serves")
            strange = server.foreign or FOREIGN in server.tags
            late = self._incarnations.get(engine) != self._world.engines[engine].incarnation
            held = LAUNCH not in server.tags and not strange and not late
            if server.up and not server.frozen and server.paused and held:
                self.broken("ready-is-ready", f"{engine} is listed as ready while its server is paused")
        else:
            self._ready.pop(engine, None)

    def look_at_ready(self, *, fresh: bool) -> None:
        """Compare the ready list with the servers. `fresh`: the coordinator was away, and has just begun to listen."""
        now = self._world.loop.now
        for server, since in tuple(self._twice.items()):
            if sum(self._world.server(AgentId(name)).name == server for name in self._ready) < 2:
                del self._twice[server]
            elif now - since > LISTED_TWICE_S and not fresh:
                self.broken("listed-once", f"{server} has been listed under two names for {now - since:.0f} s")
        for name, since in self._ready.items():
            against = self._against(name)
            if not against:
                self._ready[name] = None
            elif since is None or fresh:
                self._ready[name] = now
                if against == "wrong":
                    self.broken("ready-is-ready", f"{name} is listed as ready: {self._world.server(name).tags}")
            elif now - since > READY_GRACE_S:
                self.broken("ready-is-ready", f"{name} has been listed for {now - since:.0f} s: {against}")

    def _against(self, name: str) -> str:
        """What speaks against an engine: nothing, what it did by itself and takes time to learn, or ``wrong``."""
        server, held, agent = self._world.server(name), self._disk.committed, self._world.engines[name]
        tags, running = server.tags, agent.alive and not agent.frozen
        if running and held and server.generates and tags == (self._world.tag_of(held.table),):
            return "its agent says nothing" if self._world.network.unheard(name) else ""
        disk = self._disk
        before = [*disk.allowed, disk.replaced] if self._rolling is not None else disk.allowed
        wanted = {self._world.tag_of(each.table) if each else LAUNCH for each in (*before, held)}
        if len(tags) == 1 and tags[0] in wanted:
            if not running or self._world.network.unheard(name):
                return "its agent says nothing"
            return "" if server.generates or server.frozen else "does not generate"
        if server.foreign or FOREIGN in tags:
            return "another party changed it"
        return "was launched anew" if tags == (LAUNCH,) or not server.up else "wrong"

    def ready(self) -> Iterable[str]:
        """The engines that are listed as ready."""
        return tuple(self._ready)
