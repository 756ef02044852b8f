"""What is known of one channel: its committed version, its lease, its round and its engines. Pure.

Nothing in here changes any of it: channel.py does.

Its epochs: `epoch` is the highest ever taken, and none of its own is above that. A lease has one, and `first_epoch`, as
which it was granted; a round that of its attempt, and each member that of the attempt that it was last asked to join;
`committed_epoch` is the one under which the committed version was. Of an engine outside of rounds is known which it has
`seen`, which may be above all of them, at which it answered last (`last_epoch`) and was last told what to do
(`settled_at`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping

from .answers import YES, Answers, Past, Restored, Verdict
from .deadlines import earlier
from .duties import Duties
from .engines import Engine, Window, readiness
from .errors import InvariantBroken
from .fleet import Fleet
from .ids import AgentId, Epoch, Version
from .ids import Channel as ChannelId
from .lease import Lease, Tenure
from .limits import Limits
from .membership import Agent
from .messages import Code, Held, PauseMode, Publish, RoundDone, Sent
from .outgoing import Out
from .publisher import NOBODY, SNAPSHOT, Publisher
from .round import Round
from .routes import Route, Routing, open_routes
from .states import SETTLED, EnginePhase
from .story import STORY


class Standing:
    """How one channel stands."""

    def __init__(
        self, name: ChannelId, limits: Limits, routing: Routing, restored: Restored, *, stride: int = 1
    ) -> None:
        """`stride`: by so much an epoch is taken above what another life of the coordinator may have given out."""
        self.name = name
        self.epoch: Epoch = restored.epoch
        self.window = Window(restored.committed)
        self.committed_epoch: Epoch = restored.committed_epoch
        self.history: tuple[Past, ...] = restored.history
        self.round: Round | None = None
        self.publisher: Publisher | None = None
        self.out: list[Out] = []
        self.story: deque[object] = deque(maxlen=STORY)
        self._stride = stride
        self._limits = limits
        self._duties = Duties(limits.retry_s, limits.retry_max_s)
        self._answers = Answers(restored.answers)
        self._tenure = Tenure(name, limits, self.story)
        self._fleet = Fleet(name, limits, routing, self._duties)
        self.engines: Mapping[AgentId, Engine] = self._fleet.engines
        self._raise_at = 0.0
        """From when on what an engine says may raise the epoch once more."""
        self._turns: tuple[AgentId, ...] = ()
        """The order in which engines had their turns last."""
        self._outlook: tuple[Round | None, Window] = (None, Window())
        """By what all engines were last judged together."""

    @property
    def committed(self) -> Held | None:
        """The version that is durable."""
        return self.window.committed

    @property
    def lease(self) -> Lease | None:
        """Who may publish."""
        return self._tenure.lease

    @property
    def calm(self) -> bool:
        """Whether nobody's next step waits for a message."""
        return self.round is None and self.lease is None and not self._duties

    def next_deadline(self) -> float | None:
        """When `tick` or `flush` has something to do."""
        of_round = self.round.next_deadline() if self.round else None
        of_lease = self._tenure.next_deadline(in_round=self.round is not None)
        return earlier(self._duties.next_deadline(), earlier(of_round, of_lease))

    def pinned(self) -> set[str]:
        """Blobs that are needed."""
        needed: set[str] = set()
        if self.committed:
            needed.update((self.committed.manifest, self.committed.table))
        if self.round:
            needed.update(filter(None, (self.round.publish.manifest, self.round.table)))
        return needed

    def phase(self, name: AgentId) -> EnginePhase | None:
        """Where an engine stands in the running round."""
        member = self.round.members.get(name) if self.round else None
        return member.phase if member else None

    def window_of(self, name: AgentId) -> Window:
        """What an engine may serve."""
        return self.window_of_waiting if self.phase(name) is EnginePhase.PREPARED else self.window

    @property
    def window_of_waiting(self) -> Window:
        """What who is prepared may serve: also the version before, while it waits for its turn in a round."""
        round_ = self.round
        takes_turns = round_ is not None and round_.durable and not round_.publish.catch_up
        return self.window.also(round_.replaced) if round_ and takes_turns else self.window

    def check(self) -> None:
        """Raise `InvariantBroken` unless the channel's parts agree with each other."""
        wrong = list(self.round.check()) if self.round else []
        if self.lease and self.lease.epoch > self.epoch:
            wrong.append(f"the lease is of epoch {self.lease.epoch}, the highest ever taken is {self.epoch}")
        if self.round and self.round.epoch > self.epoch:
            wrong.append(f"the round is of epoch {self.round.epoch}, the highest ever taken is {self.epoch}")
        if self.committed_epoch > self.epoch:
            wrong.append(f"committed at epoch {self.committed_epoch}, the highest ever taken is {self.epoch}")
        for engine in self.engines.values():
            phase = self.phase(engine.name)
            ready = readiness(engine, phase, self.window_of(engine.name)).ok
            if ready is not self._fleet.announced(engine.name):
                wrong.append(f"{engine.name} is {'ready' if ready else 'not ready'}, and nobody was told")
            if ready and not self.window_of(engine.name).allows(engine.held):
                wrong.append(f"{engine.name} is ready, but holds {engine.held}")
            if phase is EnginePhase.SERVING and (self.committed is None or self.round is None):
                wrong.append(f"{engine.name} serves what was never committed")
        if wrong:
            raise InvariantBroken("; ".join(wrong), tuple(self.story))

    # -- for who decides --------------------------------------------------------------------------------------------

    def _settling_epoch(self, engine: Engine) -> Epoch:
        """Under which an engine outside a round is told what to do: the highest that any engine can have seen.

        Not that of a lease under which nothing was published yet: what is answered to it late would be taken for an
        answer in the round that this lease begins. Nor a higher one then, which would make the engine deaf to that
        round; unless it is so already.
        """
        if self.lease is None or self.round is not None:
            return self.epoch
        return self.epoch if engine.seen >= self.lease.epoch else Epoch(self.lease.epoch - 1)

    def _takes_part(self, name: AgentId) -> bool:
        return self.phase(name) not in (None, *SETTLED)

    def _is_committed(self, message: Publish) -> bool:
        held = self.committed
        return held is not None and held.version == message.version and held.table == message.table

    def _is_newest(self, done: RoundDone) -> bool:
        """Whether what the round of `done` has committed is what is committed. Its table may have followed."""
        since = [past for past in self.history if past.epoch >= done.epoch]
        return len(since) == 1 and since[0].version == done.version

    def _not_newer(self, version: Version) -> Verdict:
        found = self.committed.version if self.committed else None
        return Verdict(
            Code.VERSION_NOT_NEWER,
            f"found version {version}, committed is {found}: publish a higher one, or say rollback",
        )

    def _may_begin(self, message: Publish, missing: str, routes: Mapping[AgentId, Route]) -> Verdict:  # noqa: PLR0911  # a list of reasons
        if self.round:
            return Verdict(Code.NOT_ALLOWED, f"the round of version {self.round.version} is running under this lease")
        if message.rollback and not (self.lease and self.lease.rollback):
            return Verdict(Code.NOT_ALLOWED, "this lease was acquired without rollback: acquire again, with it")
        older = self.committed and message.version <= self.committed.version
        if older and not (message.rollback or message.catch_up):
            return self._not_newer(message.version)
        if missing:
            return _unknown(missing)
        if reason := self._all_deaf_to(message.epoch):
            return Verdict(Code.STALE_EPOCH, reason)
        if not (message.table or any(each.transport for each in routes.values())):
            return Verdict(Code.NOT_ALLOWED, "no engine is here to which an open table could be given: name it")
        reason = _contradicts(message, is_committed=self._is_committed(message))
        return Verdict(Code.NOT_ALLOWED, reason) if reason else YES

    def _all_deaf_to(self, epoch: Epoch) -> str:
        """Why no engine would hear a round of `epoch`; empty where one may."""
        seen = [engine.seen for engine in self.engines.values() if engine.alive]
        return f"{ahead(min(seen), epoch)}: acquire again" if seen and min(seen) > epoch else ""

    def _may_be_sent(self, message: Sent, missing: str) -> Verdict:
        """Whether what `message` says of the table agrees with what was said before."""
        known = self.round.table if self.round else ""
        if not (message.table or known):
            return Verdict(Code.NOT_ALLOWED, "the table was left open and is not known yet: name it")
        if known and message.table not in ("", known):
            return Verdict(Code.NOT_ALLOWED, f"found table {message.table[:12]}, expected {known[:12]} as said before")
        return _unknown(missing) if missing else YES

    def _routes(
        self, trainer: Agent, *, snapshot: bool = False, among: Container[AgentId] | None = None
    ) -> Mapping[AgentId, Route]:
        return self._fleet.routes(trainer.trainer or NOBODY, trainer.topology, snapshot=snapshot, among=among)

    def _routes_of(
        self, message: Publish, trainer: Agent, *, among: Container[AgentId] | None = None
    ) -> Mapping[AgentId, Route]:
        """By which each engine, or each `among` them, would take what `message` begins."""
        routes = self._routes(trainer, snapshot=message.mode == SNAPSHOT, among=among)
        return routes if message.table else open_routes(routes)


def _contradicts(publish: Publish, *, is_committed: bool) -> str:
    """Why a round cannot be carried out as it is asked for; empty when it can."""
    policy = publish.policy
    if publish.catch_up and not is_committed:
        return "a catch-up brings what is committed: the version is another one, or the weights have changed since"
    if policy.flush and policy.pause is PauseMode.IN_PLACE:
        return "pause in_place keeps the KV cache: publish with flush off"
    if 0 < policy.max_paused < policy.min_engines:
        found = f"{policy.min_engines} engines are to be verified and at most {policy.max_paused} stand still at a time"
        return f"{found}: raise max_paused, or lower min_engines"
    return ""


def ahead(seen: Epoch, epoch: Epoch) -> str:
    """Why an engine that has seen `seen` does not hear what is said at `epoch`."""
    return f"has seen epoch {seen}, this is {epoch}: an older journal was restored, or one begun anew"


def _unknown(blob: str) -> Verdict:
    return Verdict(Code.UNKNOWN_BLOB, f"blob {blob} is not here: put it, then ask again")
