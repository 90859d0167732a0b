"""Stop strings: what is shown does not depend on how the text arrives, and never holds one."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxstate.errors import InputError
from jaxstate.stopping import StopStrings

SETTINGS = hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
TEXT = st.text(alphabet="abc", max_size=14)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def _until_stop(text, stops):
    """Read a letter at a time: (text before the first stop string to be complete, whether any)."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(len(stop) for stop in complete)], True
    return text, False


def _may_become_stop(text, stops):
    """Longest end of the text that begins a stop string."""
    ends = [text[at:] for at in range(len(text))]
    return max((len(end) for end in ends for stop in stops if stop.startswith(end)), default=0)


@SETTINGS
@hypothesis.given(TEXT, STOPS, st.data())
def test_any_split_of_a_text_shows_the_same(text, stops, data):
    watch = StopStrings(stops)
    wanted, stopped = _until_stop(text, stops)
    shown, fed = "", 0
    while fed < len(text) and not watch.stopped:
        count = data.draw(st.integers(0, len(text) - fed))
        shown += watch.push(text[fed : fed + count])
        fed += count
        assert wanted.startswith(shown)
        if not watch.stopped:
            assert len(shown) == fed - _may_become_stop(text[:fed], stops)
    assert watch.stopped == stopped
    assert shown + watch.finish() == wanted


def test_partial_stop_string_is_withheld_until_it_is_decided():
    watch = StopStrings(["END"])
    assert watch.push("the E") == "the "
    assert watch.push("N") == ""
    assert watch.push("C") == "ENC"
    assert watch.push("E") == ""
    assert watch.push("ND of it") == ""
    assert watch.stopped
    assert watch.finish() == ""


def test_withheld_text_is_released_at_the_end():
    watch = StopStrings(["END"])
    assert watch.push("the EN") == "the "
    assert watch.finish() == "EN"
    assert watch.finish() == ""
    assert not watch.stopped


def test_overlapping_starts_are_all_withheld():
    watch = StopStrings(["aab"])
    assert watch.push("aaa") == "a"
    assert watch.push("b") == ""
    assert watch.stopped


def test_stop_string_that_is_complete_first_wins():
    watch = StopStrings(["abcd", "bc"])
    assert watch.push("xabcd") == "xa"
    assert watch.stopped


def test_without_stop_strings_everything_is_shown_at_once():
    watch = StopStrings([])
    assert watch.push("anything") == "anything"
    assert not watch.stopped


def test_empty_stop_string_is_refused():
    with pytest.raises(InputError, match="stop: expected non-empty strings, got an empty one"):
        StopStrings(["a", ""])
