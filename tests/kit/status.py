"""A status document with everything in it, for the tests of what shows one."""

from __future__ import annotations

from typing import Final

from weightbus.control.machine import ChannelView, EngineView, StatusView, TrainerView
from weightbus.control.machine.channel import PastRound
from weightbus.control.machine.states import RoundState
from weightbus.control.machine.status import HeldStatus, LeaseView, PastStatus, RoundView
from weightbus.control.protocol.messages import Epoch, Outcome, TransportKind, Version


def engine(url: str, state: str = "serving", *, lag: int = 0, reason: str = "", **changes: object) -> EngineView:
    """An engine of the channel whose version 41 is committed; ready unless there is a `reason`."""
    given = {
        "url": url,
        "state": state,
        "version": 41 - lag,
        "lag": lag,
        "ready": not reason,
        "reason": reason,
        "last_seen_s": 0.4,
        "incarnation": "i",
        "server_version": "0.5.17",
        "tp": 2,
        "pp": 1,
        "dp": 1,
        "device": "cuda",
        "transports": (TransportKind.DIRECT, TransportKind.LOCAL),
        "last_transport": TransportKind.DIRECT,
        **changes,
    }
    return EngineView(**given)  # type: ignore[arg-type]  # as given


def past(
    version: int, outcome: Outcome = Outcome.COMMITTED, reason: str = "", ended_s: float | None = 12.0
) -> PastRound:
    """A finished round of three engines."""
    return PastRound(
        version=Version(version),
        epoch=Epoch(version + 1),
        outcome=outcome,
        reason=reason,
        seconds={"prepare": 0.25, "transfer": 1.0, "total": 1.25},
        engines={"committed": 2, "left": 1},
        transports=(TransportKind.DIRECT, TransportKind.LOCAL),
        bytes=31_000_000_000,
        ended_s=ended_s,
    )


REFUSED: Final = "its key is not trusted; next: weightbus trust add e2 --role engine --channels policy"
EVERYTHING: Final = StatusView(
    boot=3,
    read_only=False,
    stopping=False,
    agents=5,
    blob_bytes=1 << 20,
    channels={
        "policy": ChannelView(
            epoch=9,
            committed=HeldStatus(41, "m", "t", 8),
            lease=LeaseView("t0", 9, 42, 9.0),
            round=RoundView(
                RoundState.TRANSFERRING,
                42,
                9,
                1.5,
                "live",
                {"e0": "transferring"},
                1,
                seconds={"prepare": 0.5, "transfer": 1.0, "total": 1.5},
            ),
            engines={
                "e0": engine("http://10.0.0.7:30000"),
                "e1": engine("http://10.0.0.8:30000", "dirty", lag=1, reason="dirty: waits for a verified version"),
                "e2": engine(
                    "http://a-host-with-a-very-long-name.of-a-cluster.internal:30000", "lost", lag=3, reason=REFUSED
                ),
            },
            ready=("http://10.0.0.7:30000",),
            owner="run-7",
            history=tuple(PastStatus(version, version + 1, rollback=False) for version in range(38, 42)),
            trainers={
                "t0": TrainerView("10.0.0.5", "cuda", 4, 0.2, published=42),
                "t1": TrainerView("", "", 1, 0.3),
            },
            rounds=(
                past(39, ended_s=None),
                past(40, Outcome.ABORTED, "0 engines can take the version, 1 are needed"),
                past(41),
            ),
        )
    },
)
