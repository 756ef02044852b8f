"""What one seed means: a deployment, its weather, and the faults that befall it. Plain values, which can shrink."""

from __future__ import annotations

import random

import msgspec

from weightbus.control.journal.interface import STRIDE_RANGE
from weightbus.control.protocol.messages import StragglerPolicy, TransportKind

from .network import Weather

LOCAL, GROUP, DIRECT = TransportKind.LOCAL, TransportKind.DISTRIBUTED, TransportKind.DIRECT
FOLDER = TransportKind.DISK
"""The one transport of an engine that some trainer cannot use."""
SECOND = ("renamed", "second")
"""Faults in which a server has a second sidecar, of another name, address and record: after the first, or beside it."""
LONGEST_S = 60.0
MOMENTS = ("preparing", "pausing", "offering", "transferring", "verifying", "committing", "resuming", "aborting")


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: what it can, and how fast its clock is."""

    name: str
    transports: tuple[TransportKind, ...]
    live: bool
    """Its server can report digests of live parameters."""
    drift: float
    older: bool = False
    """Its agent knows nothing of tables that follow."""
    apart_from: tuple[str, ...] = ()
    """Trainers that have no transport for it: it is no part of their rounds."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong at `at` and, where that means anything, ends after `lasts` seconds.

    With `moment` it waits, from `at` on, until a round next enters that state.
    """

    at: float
    kind: str
    target: str = ""
    lasts: float = 0.0
    count: int = 0
    point: str = ""
    where: str = ""
    moment: str = ""
    power: bool = False
    """The machine dies with the process: what was not synced may be lost."""

    def __str__(self) -> str:
        when = f", when a round is next {self.moment}:" if self.moment else ""
        words = [f"{self.at:7.2f} s{when}", self.kind, self.target]
        if self.point:
            words.append(f"{self.where} {self.point} number {self.count}")
        elif self.count:
            words.append(f"at {self.count}")
        if self.power:
            words.append("with its machine")
        if self.lasts:
            words.append(f"for {self.lasts:.1f} s")
        return " ".join(word for word in words if word)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run depends on. The same scenario takes the same course."""

    seed: int
    engines: tuple[EngineSpec, ...]
    trainers: tuple[str, ...]
    buckets: int
    flush: bool
    redrives: int
    min_engines: int
    think_s: float
    rollback: float
    """Chance that a trainer that is refused goes back instead of on."""
    slow: StragglerPolicy
    quorum: int
    slow_s: float
    weather: Weather
    faults: tuple[Fault, ...]
    calm_from: float
    """From here on nothing goes wrong any more."""
    max_paused: int = 0
    """Engines that may stand still at a time."""
    sealed: bool = False
    """Trainers sign, engines believe nothing else. Real Ed25519, so not everywhere."""
    sqlite: bool = False
    """The journal is the real one: SQLite's files are cut and torn where it had not synced them."""
    max_lag: int = 0
    """Versions that an engine may be behind the committed one and still be listed."""
    open_tables: bool = False
    """Trainers announce before they have digested, where every engine takes versions by `direct`."""
    digest_s: float = 0.5
    """How long they digest at most."""

    leaves: bool = False
    """Two of three versions leave a part of the server as it was launched; see `leaves_part`."""
    runs: bool = False
    """Trainers name their run: one that does not have the channel is refused, or takes it."""
    orphaned: str = "wait"
    """What sidecars do with a verified version, once no coordinator was heard of for long."""
    strides: tuple[int, int] = STRIDE_RANGE
    """By how much a start raises the epochs, at least, and less than."""

    def leaves_part(self, version: int) -> bool:
        """Whether `version` leaves a part."""
        return self.leaves and version % 3 != 0

    @property
    def may_be_set_back(self) -> bool:
        """Whether an older copy of the journal is put in its place."""
        return any(fault.kind == "setback" for fault in self.faults)


def draw(seed: int, *, setbacks: bool = False, times: float = 1.0) -> Scenario:
    """The scenario of `seed`, `times` as long; `setbacks`: one in which the journal is set back, as else in a few."""
    drawn = _draw(seed, setbacks=setbacks)
    return drawn if times == 1.0 else longer(drawn, times)


def _draw(seed: int, *, setbacks: bool) -> Scenario:
    rng = random.Random(f"weightbus-{seed}")
    engines = tuple(_engine(rng, f"e{index}") for index in range(rng.choice((1, 2, 2, 3, 3, 4))))
    trainers = ("t0", "t1") if rng.random() < 0.5 else ("t0",)
    calm_from = rng.uniform(10.0, LONGEST_S - 15.0)
    weather = Weather(
        lose=rng.choice((0.0, 0.0, 0.02, 0.1, 0.25)),
        repeat=rng.choice((0.0, 0.05, 0.2)),
        slow=rng.choice((0.0, 0.02, 0.1)),
        slow_s=rng.choice((1.0, 4.0)),
    )
    names = tuple(engine.name for engine in engines)
    count = rng.randrange(2, 16)
    faults = [_fault(rng, names, trainers, rng.uniform(1.0, calm_from - 1.0), calm_from) for _ in range(count)]
    if rng.random() < 0.25:
        plot = _plot(rng, rng.choice(names))
        calm_from = max(calm_from, *(fault.at + fault.lasts for fault in plot))
        faults += plot
    faults.sort(key=lambda fault: fault.at)
    drawn = Scenario(
        seed=seed,
        engines=engines,
        trainers=trainers,
        buckets=rng.choice((2, 3, 4)),
        flush=rng.random() < 0.8,
        redrives=rng.choice((0, 1, 1, 2)),
        min_engines=rng.choice((0, 0, 1, 2)) if len(engines) > 1 else 0,
        think_s=rng.choice((0.5, 2.0, 5.0)),
        rollback=rng.choice((0.0, 0.0, 0.5)),
        slow=rng.choice(
            (StragglerPolicy.WAIT_ALL, StragglerPolicy.WAIT_ALL, StragglerPolicy.QUORUM, StragglerPolicy.EVICT_AFTER)
        ),
        quorum=rng.choice((0, 1, 2)),
        slow_s=rng.choice((1.0, 4.0, 9.0)),
        weather=weather,
        faults=tuple(faults),
        calm_from=calm_from,
    )
    drawn = _with_lag(_with_waves(_with_neglect(_with_data_plane(drawn))))
    drawn = _with_unheard_answers(_with_open_tables(_with_return(_with_silence(_with_power(drawn)))))
    drawn = _with_left_parts(_with_hung_records(_with_hung_disks(_with_revocations(drawn))))
    return _with_other_parties(
        _with_strangers(_with_orphans(_with_one_apart(_with_setbacks(drawn, certainly=setbacks))))
    )


def _with_strangers(drawn: Scenario) -> Scenario:
    """Sidecars that know nothing of their server: without their record, by another name, a second one. By own dice."""
    rng = random.Random(f"weightbus-strangers-{drawn.seed}")
    if rng.random() >= 0.15:
        return drawn
    faults = [*drawn.faults]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.choice((rng.uniform(1.0, 5.0), rng.uniform(1.0, drawn.calm_from - 3.0)))  # often in the first round
        kind, moment = rng.choice(("record-lost", *SECOND)), rng.choice(("", "transferring", "transferring", *MOMENTS))
        lasts = rng.choice((0.2, 1.0, 3.0)) if kind == "record-lost" else rng.uniform(2.0, 25.0)
        faults.append(Fault(at=at, kind=kind, target=rng.choice(drawn.engines).name, lasts=lasts, moment=moment))
    faults.sort(key=lambda fault: fault.at)
    return msgspec.structs.replace(drawn, faults=tuple(faults))


def longer(drawn: Scenario, times: float) -> Scenario:
    """The same storm, so many times as long, with hardly a pause between versions: more than any memory is for."""
    faults = tuple(msgspec.structs.replace(fault, at=fault.at * times) for fault in drawn.faults)
    return msgspec.structs.replace(drawn, faults=faults, calm_from=drawn.calm_from * times, think_s=0.2)


def _with_one_apart(drawn: Scenario) -> Scenario:
    """One engine more, for which no trainer has a transport, or only some. It has its share of faults. By its own dice.

    Its weights are then seldom the committed ones: that is what policies that let engines be behind are for, so they
    are drawn more often here.
    """
    rng = random.Random(f"weightbus-apart-{drawn.seed}")
    if rng.random() >= 0.12:
        return drawn
    some = len(drawn.trainers) > 1 and rng.random() < 0.6
    name = f"e{len(drawn.engines)}"
    spec = EngineSpec(
        name=name,
        transports=(FOLDER,),
        live=rng.random() < 0.5,
        drift=rng.uniform(-0.01, 0.01),
        apart_from=(rng.choice(drawn.trainers),) if some else drawn.trainers,
    )
    faults = [msgspec.structs.replace(each, target=name) if _may_befall(each, rng) else each for each in drawn.faults]
    for _ in range(rng.choice((1, 2, 3))):  # it comes back while a round runs in which it has no part
        at, moment = rng.uniform(1.0, drawn.calm_from - 1.0), rng.choice(MOMENTS)
        kind = rng.choice(("kill", "kill", "disconnect", "freeze"))
        faults.append(Fault(at=at, kind=kind, target=name, lasts=rng.choice((0.1, 1.0)), moment=moment))
    faults.sort(key=lambda fault: fault.at)
    lag = drawn.max_lag or rng.choice((0, 1, 2))
    return msgspec.structs.replace(drawn, engines=(*drawn.engines, spec), faults=tuple(faults), max_lag=lag)


def _may_befall(fault: Fault, rng: random.Random) -> bool:
    return fault.target.startswith("e") and rng.random() < 0.3


def _with_setbacks(drawn: Scenario, *, certainly: bool) -> Scenario:
    """A journal that is set back to an older copy while the coordinator is down. By its own dice.

    What engines have loaded since stays above what the journal calls committed, so that they believe no seal that
    follows an older version: seals and set-backs do not meet.
    """
    rng = random.Random(f"weightbus-setback-{drawn.seed}")
    if rng.random() >= 0.05 and not certainly:
        return drawn
    faults = [*drawn.faults]
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.uniform(3.0, max(4.0, drawn.calm_from - 3.0))
        lasts, moment = rng.choice((0.05, 0.5, 3.0)), rng.choice(("", *MOMENTS))
        back = 0 if rng.random() < 0.2 else rng.choice((1, 1, 2, 3, 5, 8, 13))
        faults.append(Fault(at=at, kind="setback", target="coordinator", lasts=lasts, count=back, moment=moment))
    faults.sort(key=lambda fault: fault.at)
    return msgspec.structs.replace(drawn, sealed=False, sqlite=False, faults=tuple(faults))


def _with_revocations(drawn: Scenario) -> Scenario:
    """Agents whose keys are taken off the allow-list for a while. By its own dice.

    An engine is revoked when it is paused, and gets no byte: it is refused for longer than its pause lease.
    """
    rng = random.Random(f"weightbus-revoked-{drawn.seed}")
    if rng.random() >= 0.08:
        return drawn
    at, lasts = rng.uniform(1.0, 8.0), rng.uniform(25.0, 40.0)
    if rng.random() < 0.3:
        at = rng.uniform(1.0, drawn.calm_from - 1.0)
        lasts = rng.choice((2.0, 10.0, 30.0))
        faults = [Fault(at=at, kind="revoke", target=rng.choice(drawn.trainers), lasts=lasts)]
        earlier = [*drawn.faults]
    else:
        engine, moment = rng.choice(drawn.engines).name, rng.choice(("pausing", "offering"))
        faults = [
            Fault(at=at, kind="data-cut", target=engine, lasts=lasts, moment=moment),
            Fault(at=at, kind="revoke", target=engine, lasts=lasts, moment=moment),
        ]
        earlier = [each for each in drawn.faults if each.at < at]
    found = sorted((*earlier, *faults), key=lambda each: each.at)
    return msgspec.structs.replace(drawn, faults=tuple(found), calm_from=max(drawn.calm_from, at + lasts))


def _with_other_parties(drawn: Scenario) -> Scenario:
    """Another party at the servers: it loads weights while they serve, and resumes them while they are paused.

    By its own dice.
    """
    rng = random.Random(f"weightbus-other-parties-{drawn.seed}")
    if rng.random() >= 0.15:
        return drawn
    faults = list(drawn.faults)
    for _ in range(rng.randrange(1, 5)):
        at, engine = rng.uniform(1.0, drawn.calm_from - 1.0), rng.choice(drawn.engines).name
        kind = rng.choice(("foreign-load", "foreign-resume"))
        moment = rng.choice(("transferring", "verifying", "")) if kind == "foreign-resume" else ""
        lasts = 0.0 if moment else min(30.0, drawn.calm_from - at)
        faults.append(Fault(at=at, kind=kind, target=engine, lasts=lasts, moment=moment))
    return msgspec.structs.replace(drawn, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _with_orphans(drawn: Scenario) -> Scenario:
    """A coordinator that is gone for longer than an orphan waits, when engines hold what they know no commit of.

    It comes back with the version committed (it died after the write), without it, or, in the storms whose journal is
    set back, with an older journal. By its own dice.
    """
    rng = random.Random(f"weightbus-orphans-{drawn.seed}")
    runs = random.Random(f"weightbus-runs-{drawn.seed}").random() < 0.4
    drawn = msgspec.structs.replace(drawn, orphaned=rng.choice(("wait", "serve_verified")), runs=runs)
    if rng.random() >= 0.1:
        return drawn
    at, lasts = rng.uniform(3.0, 12.0), rng.uniform(45.0, 60.0)
    if rng.random() < 0.25:  # it is the agent that is away, which finds its coordinator silent when it goes on
        agent = rng.choice(drawn.engines).name
        away = Fault(at=at, kind="freeze", target=agent, lasts=30.0, moment=rng.choice(("verifying", "transferring")))
        faults = (*(each for each in drawn.faults if each.at < at), away)
        calm_from = max(drawn.calm_from, at + 35.0)
        return msgspec.structs.replace(drawn, orphaned="serve_verified", faults=faults, calm_from=calm_from)
    gone = Fault(at=at, kind="kill", target="coordinator", lasts=lasts, moment=rng.choice(("verifying", "committing")))
    if drawn.may_be_set_back:
        gone = msgspec.structs.replace(gone, kind="setback", count=rng.choice((1, 2, 5)))
    elif rng.random() < 0.5:
        gone = msgspec.structs.replace(gone, kind="trap", point="persist", where="after", count=1, moment="committing")
    faults = (*(each for each in drawn.faults if each.at < at and each.target != "coordinator"), gone)
    if rng.random() < 0.3:  # its agent is started again meanwhile
        again = Fault(at=at + rng.uniform(10.0, 40.0), kind="kill", target=rng.choice(drawn.engines).name, lasts=0.5)
        faults = (*faults, again)
    calm_from = max(drawn.calm_from, at + lasts + 10.0)
    return msgspec.structs.replace(drawn, faults=faults, calm_from=calm_from)


def _with_left_parts(drawn: Scenario) -> Scenario:
    """Trainers that train a part of the served checkpoint, and in some versions all of it. By its own dice.

    In some of these storms another party changes the part that stays, between two versions.
    """
    rng = random.Random(f"weightbus-left-{drawn.seed}")
    if rng.random() >= 0.4:
        return drawn
    faults = list(drawn.faults)
    if rng.random() < 0.3:
        at = rng.uniform(drawn.calm_from / 2, drawn.calm_from - 1.0)
        faults.append(Fault(at=at, kind="foreign-load", target=rng.choice(drawn.engines).name))
    return msgspec.structs.replace(drawn, leaves=True, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _with_hung_disks(drawn: Scenario) -> Scenario:
    """A disk of the journal that hangs for a while, mostly when a version is about to be committed. By its own dice."""
    rng = random.Random(f"weightbus-hung-disk-{drawn.seed}")
    if drawn.sqlite or rng.random() >= 0.15:
        return drawn
    at, lasts = rng.uniform(1.0, 8.0), rng.choice((0.5, 1.9, 4.0, 15.0, 30.0))
    faults = [
        *drawn.faults,
        Fault(at=at, kind="disk-hang", lasts=lasts, moment=rng.choice(("verifying", "pausing", ""))),
    ]
    if rng.random() < 0.4:  # nor does the coordinator see the end of it
        faults.append(Fault(at=at + lasts / 2, kind="kill", target="coordinator", lasts=rng.choice((0.2, 4.0))))
    found = sorted(faults, key=lambda each: each.at)
    return msgspec.structs.replace(drawn, faults=tuple(found), calm_from=max(drawn.calm_from, at + lasts))


def _with_hung_records(drawn: Scenario) -> Scenario:
    """A disk with an engine's record that hangs as a transfer is about to begin, in which its agent may die.

    By its own dice.
    """
    rng = random.Random(f"weightbus-hung-record-{drawn.seed}")
    if rng.random() >= 0.1:
        return drawn
    at, engine = rng.uniform(4.0, 9.0), rng.choice(drawn.engines).name
    alone = rng.random() < 0.7  # no other fault repairs the engine before it goes on
    faults = [each for each in drawn.faults if each.at < at or not alone]
    hang = Fault(at=at, kind="disk-hang", target=engine, lasts=rng.choice((3.0, 20.0, 20.0)), moment="preparing")
    died = Fault(at=at, kind="trap", target=engine, lasts=0.5, count=rng.choice((2, 3)), moment="transferring")
    faults += [hang, msgspec.structs.replace(died, point="call", where="after")]  # the record hung, and may be lost
    found = sorted(faults, key=lambda each: each.at)
    return msgspec.structs.replace(drawn, faults=tuple(found), calm_from=max(drawn.calm_from, at + 20.0))


def _with_unheard_answers(drawn: Scenario) -> Scenario:
    """A trainer whose offer is heard, and that hears nothing for longer than it waits for that. By its own dice."""
    rng = random.Random(f"weightbus-unheard-{drawn.seed}")
    if rng.random() >= 0.06:
        return drawn
    at, target = rng.uniform(1.0, drawn.calm_from - 1.0), rng.choice(drawn.trainers)
    fault = Fault(at=at, kind="cut-down", target=target, lasts=rng.uniform(5.0, 9.0), moment="offering")
    faults = sorted((*drawn.faults, fault), key=lambda each: each.at)
    return msgspec.structs.replace(drawn, faults=tuple(faults), calm_from=max(drawn.calm_from, at + 9.0))


def _with_open_tables(drawn: Scenario) -> Scenario:
    """Versions announced without their table, and what may happen to one that follows. By dice of their own."""
    rng = random.Random(f"weightbus-open-{drawn.seed}")
    if rng.random() >= 0.35:
        return drawn
    engines = tuple(
        msgspec.structs.replace(each, transports=(DIRECT, *each.transports), live=True) if rng.random() < 0.9 else each
        for each in drawn.engines
    )
    faults = list(drawn.faults)
    for _ in range(rng.choice((0, 1, 1, 2))):
        at, engine = rng.uniform(1.0, drawn.calm_from - 1.0), rng.choice(drawn.engines).name
        match rng.choice(("wrong", "wrong", "lost", "trainer", "coordinator")):
            case "wrong":  # another table than the others are given, and bytes that agree with it
                faults.append(Fault(at=at, kind="wrong-table", target=engine))
            case "lost":  # it asks for one, and hears nothing
                faults.append(Fault(at=at, kind="table-lost", target=engine))
            case "trainer":  # between the copy and the table
                target = rng.choice(drawn.trainers)
                faults.append(
                    Fault(at=at, kind="kill", target=target, lasts=rng.uniform(0.2, 9.0), moment="transferring")
                )
            case _:  # between the table and the commit
                moment = rng.choice(("verifying", "committing"))
                faults.append(Fault(at=at, kind="kill", target="coordinator", lasts=0.3, moment=moment))
    digest_s = rng.choice((0.05, 0.5, 3.0))
    older = rng.randrange(len(engines)) if rng.random() < 0.15 else None
    return msgspec.structs.replace(
        drawn,
        engines=tuple(msgspec.structs.replace(each, older=at == older) for at, each in enumerate(engines)),
        open_tables=True,
        digest_s=digest_s,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )


def _with_waves(drawn: Scenario) -> Scenario:
    """Rounds in which not all may stand still at a time. By dice of their own, too."""
    rng = random.Random(f"weightbus-waves-{drawn.seed}")
    most = rng.randrange(max(1, drawn.min_engines), 4) if rng.random() < 0.4 else 0
    return msgspec.structs.replace(drawn, max_paused=most)


def _with_lag(drawn: Scenario) -> Scenario:
    """How far behind engines may be, and trainers that go back while some are. By dice of their own."""
    rng = random.Random(f"weightbus-lag-{drawn.seed}")
    lag = rng.choice((0, 0, 0, 1, 2))
    back = lag > 0 and not drawn.sealed and rng.random() < 0.5
    return msgspec.structs.replace(drawn, max_lag=lag, rollback=0.8 if back else drawn.rollback)


def _with_power(drawn: Scenario) -> Scenario:
    """Machines that lose power, at any write or between them. By dice of their own."""
    rng = random.Random(f"weightbus-power-{drawn.seed}")
    faults = list(drawn.faults)
    sqlite = rng.random() < 0.2
    for _ in range(rng.choice((0, 0, 1, 2))):
        at, lasts = rng.uniform(1.0, drawn.calm_from - 1.0), rng.choice((0.2, 1.0, 5.0))
        target = "coordinator" if rng.random() < (0.7 if sqlite else 0.2) else rng.choice(drawn.engines).name
        moment = rng.choice(("", *MOMENTS))
        if rng.random() < 0.4:
            faults.append(Fault(at=at, kind="power", target=target, lasts=lasts, moment=moment))
            continue
        where = rng.choice(("before", "during", "during", "during", "after"))
        count = rng.randrange(1, 4)
        faults.append(
            Fault(
                at=at,
                kind="trap",
                target=target,
                lasts=lasts,
                count=count,
                point="persist",
                where=where,
                moment=moment,
                power=True,
            )
        )
    faults.sort(key=lambda fault: fault.at)
    return msgspec.structs.replace(drawn, sqlite=sqlite, faults=tuple(faults))


def _with_data_plane(drawn: Scenario) -> Scenario:
    """Seals, and cuts of the data plane, by dice of their own: what was drawn before stays as it was.

    An engine that missed a rollback believes nothing before it is launched anew, so seals and rollbacks do not meet.
    """
    rng = random.Random(f"weightbus-data-{drawn.seed}")
    sealed = rng.random() < 0.3 and not drawn.rollback
    faults = list(drawn.faults)
    if rng.random() < 0.3:
        at = rng.uniform(1.0, drawn.calm_from - 1.0)
        lasts = min(drawn.calm_from - at, rng.choice((1.0, 8.0, 30.0)))
        moment = rng.choice(("", "transferring", "offering"))
        engine = rng.choice(drawn.engines).name
        faults.append(Fault(at=at, kind="data-cut", target=engine, lasts=lasts, moment=moment))
    return msgspec.structs.replace(drawn, sealed=sealed, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _with_neglect(drawn: Scenario) -> Scenario:
    """A channel whose trainers are gone for a while, so that no next round mends what happens to an engine meanwhile.

    By dice of their own, too.
    """
    rng = random.Random(f"weightbus-neglect-{drawn.seed}")
    if rng.random() >= 0.1:
        return drawn
    at, engine = rng.uniform(1.0, 8.0), rng.choice(drawn.engines).name
    match rng.choice(("late", "silent")):
        case "late":  # an order of a life that is over arrives after those of the next one
            moment = rng.choice(("preparing", "pausing", "offering"))
            faults = [
                Fault(at=at, kind="stall", target=engine, lasts=rng.uniform(2.0, 6.0), moment=moment),
                Fault(at=at, kind="kill", target="coordinator", lasts=rng.uniform(0.1, 1.0), moment=moment),
            ]
            away = [Fault(at=at, kind="kill", target=name, lasts=40.0, moment=moment) for name in drawn.trainers]
            over = at + 10.0
        case _:  # its agent says nothing any more, and no round finds out
            faults = [Fault(at=at, kind="freeze", target=engine, lasts=45.0)]
            away = [Fault(at=at, kind="kill", target=name, lasts=50.0) for name in drawn.trainers]
            over = at + 45.0
    earlier = [fault for fault in drawn.faults if fault.at < at]
    faults = sorted((*earlier, *faults, *away), key=lambda fault: fault.at)
    return msgspec.structs.replace(drawn, faults=tuple(faults), calm_from=max(drawn.calm_from, over))


def _with_silence(drawn: Scenario) -> Scenario:
    """A coordinator that is away for longer than a pause lease, from a pause on after which no byte comes.

    By dice of their own, too.
    """
    rng = random.Random(f"weightbus-silence-{drawn.seed}")
    if rng.random() >= 0.04:
        return drawn
    at, engine = rng.uniform(1.0, 8.0), rng.choice(drawn.engines).name
    faults = [each for each in drawn.faults if each.at < at]
    faults.append(Fault(at=at, kind="data-cut", target=engine, lasts=35.0, moment="pausing"))
    faults.append(Fault(at=at, kind="kill", target="coordinator", lasts=35.0, moment="pausing"))
    return msgspec.structs.replace(drawn, faults=tuple(faults), calm_from=max(drawn.calm_from, at + 35.0))


def _with_return(drawn: Scenario) -> Scenario:
    """An engine whose agent is back in the middle of a round, without a part in it, and stopped before it has answered.

    By dice of their own, too.
    """
    rng = random.Random(f"weightbus-return-{drawn.seed}")
    if rng.random() >= 0.04 or len(drawn.engines) == 1:
        return drawn
    at, engine = rng.uniform(6.0, 16.0), rng.choice(drawn.engines).name
    killed, stopped = rng.choice((("preparing", "offering"), ("offering", "transferring")))
    faults = (
        Fault(at=at, kind="kill", target=engine, lasts=0.1, moment=killed),
        Fault(at=at, kind="freeze", target=engine, lasts=8.0, moment=stopped),  # which is entered once it is back
    )
    calm_from = max(drawn.calm_from, at + 15.0)
    return msgspec.structs.replace(drawn, redrives=1, min_engines=0, faults=faults, calm_from=calm_from)


def _engine(rng: random.Random, name: str) -> EngineSpec:
    transports = rng.choice(((LOCAL,), (LOCAL, GROUP), (GROUP,)))
    # Over a group nothing is compared before the load: only a server that can report its digests can prove a version.
    live = rng.random() < 0.6 or GROUP in transports
    return EngineSpec(name=name, transports=transports, live=live, drift=rng.uniform(-0.01, 0.01))


def _fault(
    rng: random.Random, engines: tuple[str, ...], trainers: tuple[str, ...], at: float, calm_from: float
) -> Fault:
    fault = _befalls(rng, engines, trainers, at, calm_from)
    if rng.random() < 0.4:
        return msgspec.structs.replace(fault, moment=rng.choice(MOMENTS))
    return fault


def _plot(rng: random.Random, engine: str) -> list[Fault]:
    """Faults that only matter together, or only in their place, and would seldom be drawn so."""
    at = rng.uniform(1.0, 8.0)
    match rng.choice(("left alone", "unrecorded", "held back", "relaunched")):
        case "left alone":  # in the middle of a pause: until its lease is over, and longer
            moment = rng.choice(("pausing", "offering", "verifying"))
            return [Fault(at=at, kind="cut", target=engine, lasts=rng.uniform(30.0, 45.0), moment=moment)]
        case "unrecorded":  # what it began cannot be written, and then it is not there to remember it
            full = Fault(at=at, kind="disk-full", target=engine, lasts=25.0, moment=rng.choice(MOMENTS[:3]))
            return [full, Fault(at=at, kind="kill", target=engine, lasts=0.5, moment="transferring")]
        case "held back":  # what it is told next arrives when it has given up waiting
            moment = rng.choice(("pausing", "offering"))
            return [Fault(at=at, kind="cut-down", target=engine, lasts=rng.uniform(9.0, 16.0), moment=moment)]
        case _:  # the server begins anew under whatever its agent is about
            moment = rng.choice(("offering", "transferring", "verifying", "resuming"))
            return [Fault(at=at, kind="server-kill", target=engine, lasts=0.1, moment=moment)]


def _befalls(  # noqa: PLR0911  # one case per kind
    rng: random.Random, engines: tuple[str, ...], trainers: tuple[str, ...], at: float, calm_from: float
) -> Fault:
    left = max(0.5, calm_from - at)
    lasts = min(left, rng.choice((0.2, 1.0, 4.0, 8.0, 15.0, 30.0)) * rng.uniform(0.5, 1.5))
    engine, agent = rng.choice(engines), rng.choice((*engines, *trainers))
    process = rng.choice(("coordinator", *engines, *trainers))
    kind = rng.choice(KINDS)
    match kind:
        case "trap":
            return _trap(rng, engines, trainers, at, lasts)
        case "kill" | "freeze":
            return Fault(at=at, kind=kind, target=process, lasts=lasts)
        case "cut" | "cut-up" | "cut-down" | "disconnect":
            return Fault(at=at, kind=kind, target=agent, lasts=lasts)
        case "server-kill" | "server-freeze" | "host-kill" | "server-kill-unseen":
            return Fault(at=at, kind=kind, target=engine, lasts=lasts)
        case "server-dies-loading":
            return Fault(at=at, kind=kind, target=engine, lasts=lasts, count=rng.randrange(0, 3))
        case "corrupt":
            return Fault(at=at, kind=kind, count=rng.randrange(0, 2))
        case "disk-full":
            return Fault(at=at, kind=kind, target=rng.choice(("coordinator", "coordinator", engine)), lasts=lasts)
        case "wall-jump":
            return Fault(at=at, kind=kind, lasts=rng.choice((-1e9, -3600.0, 90000.0, 1e9)))
        case "stop":
            return Fault(at=at, kind=kind, target="coordinator", lasts=lasts)
        case _:
            raise ValueError(kind)


KINDS = (
    *("trap",) * 8,
    *("kill",) * 3,
    *("freeze",) * 3,
    "cut",
    "cut",
    "cut-up",
    "cut-down",
    "disconnect",
    "server-kill",
    "server-kill",
    "server-freeze",
    "server-kill-unseen",
    "host-kill",
    "server-dies-loading",
    "server-dies-loading",
    "corrupt",
    "corrupt",
    "disk-full",
    "wall-jump",
    "stop",
)


def _trap(rng: random.Random, engines: tuple[str, ...], trainers: tuple[str, ...], at: float, lasts: float) -> Fault:
    target = rng.choice(("coordinator", "coordinator", rng.choice(engines), rng.choice(trainers)))
    points = {"coordinator": ("persist", "send"), "e": ("persist", "send", "call")}
    point = rng.choice(points.get(target, points["e"] if target in engines else ("send",)))
    where = rng.choice(("before", "during", "after") if point == "persist" else ("before", "after"))
    count = rng.randrange(1, {"persist": 6, "send": 40, "call": 12}[point])
    return Fault(at=at, kind="trap", target=target, lasts=min(lasts, 12.0), count=count, point=point, where=where)
