"""Who floods is slowed, then cut off, then heard again when it was quiet; nobody else is concerned."""

from __future__ import annotations

from collections import Counter

from weightbus.control.bus.rate_limit import BURST, PENANCE_S, RATE, REMEMBERED, RateLimit, RateLimiter


def test_what_a_fleet_says_is_never_touched() -> None:
    """Two thousand agents that return at once, page through blobs and beat for a minute lose nothing."""
    throttle = RateLimiter()
    agents = [f"e{number}" for number in range(2048)]
    assert {throttle.account(who).pace(0.0) for who in agents for _ in range(20)} == {RateLimit.TAKEN}
    assert {throttle.account(who).pace(float(second)) for second in range(60) for who in agents} == {RateLimit.TAKEN}
    assert {throttle.account("t0").pace(100.0 + count / RATE) for count in range(30_000)} == {RateLimit.TAKEN}, (
        "at its full rate"
    )


def test_a_flood_is_slowed_and_its_neighbor_is_not() -> None:
    """Ten times the rate: a burst goes through, then a tenth; it is told of once."""
    throttle = RateLimiter()
    said = [throttle.account("flood").pace(count / (10 * RATE)) for count in range(60_000)]
    paces = Counter(said)
    assert paces[RateLimit.SLOWED] == 1
    assert said[:BURST] == [RateLimit.TAKEN] * BURST
    late = Counter(said[20_000:40_000])
    assert late[RateLimit.TAKEN] <= 20_000 / 10 + 2
    assert late[RateLimit.DROPPED] >= 20_000 * 9 / 10 - 2
    assert throttle.account("neighbor").pace(3.0) is RateLimit.TAKEN


def test_who_goes_on_is_cut_off_until_it_was_quiet() -> None:
    """Everything is dropped as long as it goes on; after a pause it is an agent like any other."""
    throttle = RateLimiter(rate=10.0, burst=10, patience=20)
    said = [throttle.account("flood").pace(0.0) for _ in range(40)]
    assert [said.index(each) for each in (RateLimit.SLOWED, RateLimit.CUT)] == [11, 30]
    assert said.count(RateLimit.TAKEN) == 11
    assert {throttle.account("flood").pace(PENANCE_S * part / 2) for part in range(6)} == {RateLimit.DROPPED}, (
        "it never was quiet"
    )
    assert throttle.account("flood").pace(2.5 * PENANCE_S + PENANCE_S + 0.1) is RateLimit.TAKEN


def test_who_held_back_to_half_of_its_room_has_all_its_patience_again() -> None:
    """Two floods that are too short each are not one that is long enough; and it is told of the second one too."""
    account = RateLimiter(rate=10.0, burst=10, patience=20).account("flood")
    first = [account.pace(0.0) for _ in range(26)]
    second = [account.pace(0.7) for _ in range(22)]
    assert RateLimit.CUT not in first + second
    assert [first.count(RateLimit.SLOWED), second.count(RateLimit.SLOWED)] == [1, 1]
    assert account.pace(1.0) is RateLimit.TAKEN, "it is still listened to"


def test_an_account_is_the_speaker_s_whoever_keeps_it() -> None:
    """Two connections of one key have one rate; one that was forgotten while it was within it begins anew."""
    throttle = RateLimiter(rate=10.0, burst=10)
    first, second = throttle.account("key"), throttle.account("key")
    said = [each.pace(0.0) for _ in range(20) for each in (first, second)]
    assert said.count(RateLimit.TAKEN) == 11
    throttle.forget(0.5)
    assert throttle.account("key") is first, "it floods"
    throttle.forget(60.0)
    assert len(throttle) == 0


def test_memory_is_bounded() -> None:
    """Speakers that are within their rate are forgotten; one that floods is not."""
    throttle = RateLimiter(rate=10.0, burst=10)
    while throttle.account("flood").pace(0.0) is RateLimit.TAKEN:
        pass
    for number in range(3 * REMEMBERED):
        now = 0.5 + number * 1e-3 / REMEMBERED * 100
        if throttle.full:
            throttle.forget(now)
        throttle.account(f"e{number}").pace(now)
    assert len(throttle) <= 2 * REMEMBERED + 1
    assert throttle.account("flood").pace(0.0) is RateLimit.DROPPED
