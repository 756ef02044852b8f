"""A flooding agent is slowed, then cut off, then heard again once it was quiet; no other agent is concerned."""

from __future__ import annotations

from collections import Counter

from weightbus.control.bus.sockets import BURST, CUT_OFF_S, MAX_ACCOUNTS, RATE, RateDecision, RateLimiter


def test_what_a_fleet_says_is_never_touched() -> None:
    """Two thousand agents that return at once, page through blobs and beat for a minute lose nothing."""
    limiter = RateLimiter()
    agents = [f"e{number}" for number in range(2048)]
    assert {limiter.account(agent).count_message(0.0) for agent in agents for _ in range(20)} == {RateDecision.TAKEN}
    assert {limiter.account(agent).count_message(float(second)) for second in range(60) for agent in agents} == {
        RateDecision.TAKEN
    }
    assert {limiter.account("t0").count_message(100.0 + count / RATE) for count in range(30_000)} == {
        RateDecision.TAKEN
    }, "at its full rate"


def test_a_flood_is_slowed_and_its_neighbor_is_not() -> None:
    """Ten times the rate: a burst goes through, then a tenth; it is told of once."""
    limiter = RateLimiter()
    said = [limiter.account("flood").count_message(count / (10 * RATE)) for count in range(60_000)]
    paces = Counter(said)
    assert paces[RateDecision.SLOWED] == 1
    assert said[:BURST] == [RateDecision.TAKEN] * BURST
    late = Counter(said[20_000:40_000])
    assert late[RateDecision.TAKEN] <= 20_000 / 10 + 2
    assert late[RateDecision.DROPPED] >= 20_000 * 9 / 10 - 2
    assert limiter.account("neighbor").count_message(3.0) is RateDecision.TAKEN


def test_an_agent_that_goes_on_is_cut_off_until_it_was_quiet() -> None:
    """Everything is dropped as long as it goes on; after a pause it is an agent like any other."""
    limiter = RateLimiter(rate=10.0, burst=10, patience=20)
    said = [limiter.account("flood").count_message(0.0) for _ in range(40)]
    assert [said.index(each) for each in (RateDecision.SLOWED, RateDecision.CUT)] == [11, 30]
    assert said.count(RateDecision.TAKEN) == 11
    assert {limiter.account("flood").count_message(CUT_OFF_S * part / 2) for part in range(6)} == {
        RateDecision.DROPPED
    }, "it never was quiet"
    assert limiter.account("flood").count_message(2.5 * CUT_OFF_S + CUT_OFF_S + 0.1) is RateDecision.TAKEN


def test_an_agent_that_held_back_to_half_of_its_room_has_all_its_patience_again() -> None:
    """Two floods that are too short each are not one that is long enough; and it is told of the second one too."""
    account = RateLimiter(rate=10.0, burst=10, patience=20).account("flood")
    first = [account.count_message(0.0) for _ in range(26)]
    second = [account.count_message(0.7) for _ in range(22)]
    assert RateDecision.CUT not in first + second
    assert [first.count(RateDecision.SLOWED), second.count(RateDecision.SLOWED)] == [1, 1]
    assert account.count_message(1.0) is RateDecision.TAKEN, "it is still listened to"


def test_an_account_is_the_speakers_in_every_store() -> None:
    """Two connections of one key have one rate; one that was forgotten while it was within it begins anew."""
    limiter = RateLimiter(rate=10.0, burst=10)
    first, second = limiter.account("key"), limiter.account("key")
    said = [each.count_message(0.0) for _ in range(20) for each in (first, second)]
    assert said.count(RateDecision.TAKEN) == 11
    limiter.forget(0.5)
    assert limiter.account("key") is first, "it floods"
    limiter.forget(60.0)
    assert len(limiter) == 0


def test_memory_is_bounded() -> None:
    """Speakers that are within their rate are forgotten; one that floods is not."""
    limiter = RateLimiter(rate=10.0, burst=10)
    while limiter.account("flood").count_message(0.0) is RateDecision.TAKEN:
        pass
    for number in range(3 * MAX_ACCOUNTS):
        now = 0.5 + number * 1e-3 / MAX_ACCOUNTS * 100
        if limiter.full:
            limiter.forget(now)
        limiter.account(f"e{number}").count_message(now)
    assert len(limiter) <= 2 * MAX_ACCOUNTS + 1
    assert limiter.account("flood").count_message(0.0) is RateDecision.DROPPED
