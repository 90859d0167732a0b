"""Which appends make a burst, and when it is over."""

from __future__ import annotations

from jaxstate.serving.bursts import BURST_GAP_S, Bursts

LESS, MORE = BURST_GAP_S / 2, BURST_GAP_S * 2


def test_an_append_soon_behind_the_end_of_a_long_one_makes_a_burst():
    bursts = Bursts()
    bursts.submit("a", asked=0.0, now=0.0)
    bursts.end("a", now=10.0)
    assert bursts.expecting(10.0) == set()  # one append is none
    bursts.submit("a", asked=10.0 + LESS, now=10.1)
    assert bursts.expecting(20.0) == {"a"}  # while it runs
    bursts.end("a", now=20.0)
    assert bursts.expecting(20.0 + LESS) == {"a"}
    assert bursts.expecting(20.0 + MORE) == set()


def test_an_append_after_a_pause_makes_none_and_sessions_have_their_own():
    bursts = Bursts()
    for session in "ab":
        bursts.submit(session, asked=0.0, now=0.0)
        bursts.end(session, now=1.0)
    bursts.submit("a", asked=1.0 + MORE, now=1.0 + MORE)
    bursts.submit("b", asked=0.5, now=1.0 + MORE)  # asked for while the one before ran
    assert bursts.expecting(1.0 + MORE) == {"b"}
    bursts.forget("b")
    assert bursts.expecting(1.0 + MORE) == set()
