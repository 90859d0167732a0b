"""Session arithmetic: what an append evicts, where keys are rotated, what a rollback may do."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxstate import session as session_module
from jaxstate.errors import CapacityError, SessionError
from jaxstate.pages import Entry
from jaxstate.session import Session

SETTINGS = hypothesis.settings(max_examples=200, deadline=None, derandomize=True)


def _session(*, frozen=0, stream=0, evicted=0, floor=0, when_full="slide"):
    """A session on pages of 4 cells, one entry per page, in order."""
    count = frozen + stream
    entries = tuple(
        Entry(page=begin // 4, first=0, fill=min(4, count - begin), base=begin, shift=0)
        for begin in range(0, count, 4)
    )
    return Session(
        session_id="s",
        owner=0,
        when_full=when_full,
        frozen_len=frozen,
        token_ids=list(range(count)),
        entries=entries,
        evicted=evicted,
        stream_floor=floor,
    )


def _positions(entries):
    return {
        entry.base + cell: entry.page * 4 + cell
        for entry in entries
        for cell in range(entry.first, entry.fill)
    }


@SETTINGS
@hypothesis.given(
    st.integers(0, 9),
    st.integers(0, 20),
    st.integers(1, 30),
    st.integers(10, 30),
    st.integers(1, 12),
)
def test_append_evicts_whole_quanta_of_the_overflow(frozen, stream, count, context_len, quantum):
    hypothesis.assume(frozen + stream <= context_len)
    session = _session(frozen=frozen, stream=stream)
    if count > context_len - frozen:
        with pytest.raises(CapacityError, match=f"append of {count} tokens is longer"):
            session_module.overflow_evictions(session, count, context_len, quantum)
        return
    found = session_module.overflow_evictions(session, count, context_len, quantum)
    wanted = 0
    while frozen + stream - wanted + count > context_len:  # a quantum at a time, while any is left
        wanted = min(wanted + quantum, stream)
    assert found == wanted
    assert frozen + stream - found + count <= context_len


def test_full_session_that_does_not_slide_refuses():
    session = _session(frozen=2, stream=8, when_full="error")
    assert session_module.overflow_evictions(session, 2, 12, 4) == 0
    with pytest.raises(CapacityError, match="session s: 10 of 12 tokens are held and 3 more do n"):
        session_module.overflow_evictions(session, 3, 12, 4)


def test_eviction_drops_the_oldest_stream_tokens_and_closes_the_gap():
    session = _session(frozen=3, stream=10)
    kept = _positions(session_module.evict(session, 5))
    assert kept == {0: 0, 1: 1, 2: 2} | {3 + index: 8 + index for index in range(5)}


def test_lengths_count_kept_and_evicted_tokens():
    session = _session(frozen=3, stream=10, evicted=7)
    assert session.context_len == 13
    assert session.stream_len == 17


@SETTINGS
@hypothesis.given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 20), st.integers(1, 25))
def test_rollback_keeps_a_prefix_or_says_why_not(stream, evicted, floor, count):
    hypothesis.assume(evicted <= floor <= evicted + stream)
    session = _session(frozen=3, stream=stream, evicted=evicted, floor=floor)
    if count > stream:
        with pytest.raises(SessionError, match=f"cannot roll back {count} tokens, the stream ho"):
            session_module.rolled_back(session, count)
    elif evicted + stream - count < floor:
        with pytest.raises(SessionError, match="would pass the last eviction"):
            session_module.rolled_back(session, count)
    else:
        kept = _positions(session_module.rolled_back(session, count))
        assert kept == {position: position for position in range(3 + stream - count)}


@SETTINGS
@hypothesis.given(
    st.integers(0, 40),
    st.integers(0, 400),
    st.integers(1, 60),
    st.integers(0, 300),
    st.sampled_from([4, 16]),
)
def test_rotations_stay_within_the_models_positions(frozen, first, count, evicted, page_size):
    max_positions = 64
    epoch = session_module.rotation_epoch(max_positions, frozen, page_size)
    assert epoch % page_size == 0
    shifts = session_module.stream_shifts(first, count, evicted, epoch)
    assert shifts.dtype == np.int32
    index = np.arange(first, first + count)
    positions = frozen + index - evicted
    rotations = positions - shifts
    np.testing.assert_array_equal(rotations, frozen + index % epoch)
    assert (frozen <= rotations).all()
    assert (rotations < max_positions).all()


@SETTINGS
@hypothesis.given(st.integers(0, 300), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_chunks_of_an_append_get_the_shifts_of_the_whole(first, sizes):
    whole = session_module.stream_shifts(first, sum(sizes), 5, 48)
    parts, at = [], first
    for size in sizes:
        parts.append(session_module.stream_shifts(at, size, 5, 48))
        at += size
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_later_eviction_moves_old_and_new_tokens_of_an_epoch_to_one_shift():
    """Tokens written before 10 more were evicted and tokens written after share their shift."""
    before = session_module.stream_shifts(100, 4, 20, 64)
    after = session_module.stream_shifts(104, 4, 30, 64)
    assert set((before - 10).tolist()) == set(after.tolist())


def test_epoch_is_at_least_a_page():
    assert session_module.rotation_epoch(64, 62, 16) == 16
