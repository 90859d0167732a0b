"""Sessions that left pages part-filled are moved together: the same bits, fewer pages."""

from __future__ import annotations

import functools

import hypothesis
import numpy as np
import pytest
import tiny_engine
from hypothesis import strategies as st

from jaxstate.answer import Source
from jaxstate.errors import PoolFullError
from jaxstate.flash import Question
from jaxstate.pages import Entry, cells_used
from jaxstate.plan import JobClass
from jaxstate.repack import repacking
from jaxstate.serving.local_service import LocalService

PAGE = 8


@functools.cache
def _compiled():
    return tiny_engine.build()


@pytest.fixture
def engine():
    with tiny_engine.left_empty(_compiled()) as engine:
        yield engine


def _ids(seed, count):
    return tiny_engine.random_ids(seed, count)


def _append(engine, session, n):
    engine.append(session, _ids(n, 3))
    return session


def _fork_and_close(engine, session, n):
    child = engine.fork(session)
    engine.append(child, _ids(n, 3))
    engine.close(session)
    return child


def _roll_back_beside_a_fork(engine, session, n):
    engine.append(session, _ids(n, 4))
    engine.fork(session)
    engine.rollback(session, 1)
    return session


def _commit_behind_paid_tokens(engine, session, n):
    entry = _ids(n, 3)
    engine.advance(session, entry)
    engine.query(session, [*entry, 4], max_new_tokens=2, commit=True)
    return session


EVENTS = {
    "append": (_append, False),
    "fork whose parent is gone": (_fork_and_close, True),
    "rollback beside a fork": (_roll_back_beside_a_fork, True),
    "turn committed behind paid tokens": (_commit_behind_paid_tokens, True),
}


def _after(engine, event, times=7):
    others = engine.session_ids
    session = engine.create(_ids(0, 5))
    for n in range(times):
        session = event(engine, session, n + 1)
    for name in engine.session_ids:
        if name not in others and name != session:
            engine.close(name)
    return session


def _bits(engine, session):
    """Bits, position and rotation of all cells that a session sees, in order of position."""
    entries = engine.session(session).entries
    spelled = [
        (e.page * PAGE + cell, e.base + cell, e.base + cell - e.shift)
        for e in entries
        for cell in range(e.first, e.fill)
    ]
    arrays = engine.executor.read_cells(np.asarray([cell for cell, _, _ in spelled]))
    bits = [part.tobytes() for layer in arrays for part in layer]
    return bits, [place for _, *place in spelled]


def _num_pages(engine, session):
    return len({entry.page for entry in engine.session(session).entries})


@pytest.mark.parametrize("name", EVENTS)
def test_pages_are_left_part_filled_by_what_cannot_go_on_in_them(engine, name):
    event, scatters = EVENTS[name]
    session = _after(engine, event)
    needed = -(-engine.session(session).context_len // PAGE)
    left = _num_pages(engine, session) - needed
    assert left >= 3 if scatters else left == 0
    assert engine.verbs.tiers.is_scattered(engine.session(session)) is scatters


@pytest.mark.parametrize("name", [name for name in EVENTS if EVENTS[name][1]])
def test_repacking_moves_the_same_bits_to_as_few_pages_as_they_fill(engine, name):
    session = _after(engine, EVENTS[name][0])
    record = engine.session(session)
    before, held = _bits(engine, session), engine.cells_held
    needed = -(-record.context_len // PAGE)
    gain = _num_pages(engine, session) - needed
    assert engine.verbs.tiers.repack(record) == gain
    assert _bits(engine, session) == before
    assert engine.cells_held == held - gain * PAGE == needed * PAGE
    assert engine.verbs.tiers.repack(record) == 0
    # The last page is its own again, and goes on where it is filled to.
    context = list(record.token_ids)
    room = -len(context) % PAGE
    if room:
        engine.append(session, _ids(50, room))
        assert engine.cells_held == needed * PAGE
        context += _ids(50, room)
    answer = engine.query(session, _ids(51, 3), max_new_tokens=3)
    assert answer.token_ids == tuple(tiny_engine.greedy([*context, *_ids(51, 3)], 3))


def test_paid_tails_go_on_behind_what_was_repacked(engine):
    session = _after(engine, _fork_and_close)
    question = _ids(60, 4)
    engine.advance(session, question, max_new_tokens=2)
    assert engine.verbs.tiers.repack(engine.session(session)) > 0
    context = engine.session(session).token_ids
    answer = engine.query(session, [*question, 7], max_new_tokens=3)
    assert (answer.source, answer.tokens_forwarded) == (Source.RESUMED, 1 + 2)
    assert answer.token_ids == tuple(tiny_engine.greedy([*context, *question, 7], 3))


def test_cells_that_a_fork_sees_stay(engine):
    session = _after(engine, _fork_and_close)
    child = engine.fork(session)
    for n in range(4):
        child = _fork_and_close(engine, child, 20 + n)
    before = _bits(engine, child), _bits(engine, session)
    shared = {entry.page for entry in engine.session(session).entries}
    assert engine.verbs.tiers.repack(engine.session(session)) == 0
    assert engine.verbs.tiers.repack(engine.session(child)) == 2  # 12 cells on 4 pages
    assert shared < {entry.page for entry in engine.session(child).entries}
    assert (_bits(engine, child), _bits(engine, session)) == before


def test_a_full_pool_is_repacked_before_anybody_is_refused(engine):
    sessions = [_after(engine, _fork_and_close) for _ in range(4)]  # 8 pages each, 4 needed
    before = [_bits(engine, session) for session in sessions]
    assert engine.pages.num_free == 8
    engine.create(_ids(1, 90))  # 12 pages
    engine.create(_ids(2, 90))
    with pytest.raises(PoolFullError, match="needs 2 pages of 8 cells, 0 of 40 can be had"):
        engine.create(_ids(3, 9))
    assert [_bits(engine, session) for session in sessions] == before


def test_a_service_repacks_an_idle_session_behind_all_else(engine, monkeypatch):
    session = _after(engine, _fork_and_close)
    service = LocalService(engine)
    ended = []
    monkeypatch.setattr(service._scheduler, "_on_end", ended.append)
    context = list(engine.session(session).token_ids)
    question = Question(token_ids=tuple(_ids(1, 3)), max_new_tokens=3)

    def open_with_a_question():
        service._lifecycle.open(session)
        service._sessions[session].board.register(question)

    service._call(open_with_a_question)
    service.wait_until_idle(60)
    service._call(lambda: None)  # the worker has looked around since
    service.wait_until_idle(60)
    assert _num_pages(engine, session) == -(-len(context) // PAGE)
    assert [ticket.job_class for ticket in ended] == [JobClass.FLASH, JobClass.MAINTENANCE]
    answer = service.query(session, question).result(60)
    assert answer.source is Source.FLASH
    resumed = service.query(
        session, Question(token_ids=(*question.token_ids, 5), max_new_tokens=2)
    ).result(60)
    assert resumed.source is Source.RESUMED
    assert resumed.token_ids == tuple(tiny_engine.greedy([*context, *question.token_ids, 5], 2))
    service.close()


def test_a_session_that_a_verb_runs_on_stays_where_it_is(engine):
    session = _after(engine, _fork_and_close)
    entries = engine.session(session).entries
    stream = engine.stream(session, [1, 2], max_new_tokens=3)
    next(stream)
    assert list(engine.verbs.repack(session)) == []
    assert engine.session(session).entries == entries
    stream.close()


@st.composite
def _tables(draw):
    """A table of contiguous positions; pages may hold several pieces of it."""
    entries, position = [], 0
    for page in draw(st.permutations(range(6))):
        cell = 0
        while cell < PAGE and draw(st.booleans()):
            first = draw(st.integers(cell, PAGE - 1))
            cell = draw(st.integers(first + 1, PAGE))
            shift = draw(st.sampled_from([0, 0, -3]))
            entries.append(Entry(page, first, cell, position - first, shift))
            position += cell - first
    order = draw(st.permutations(range(len(entries))))
    position, table = 0, []
    for entry in [entries[index] for index in order]:
        table.append(entry._replace(base=position - entry.first))
        position += entry.fill - entry.first
    return tuple(table)


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(_tables(), st.sets(st.integers(0, 5)))
def test_any_table_keeps_its_cells_positions_and_rotations(table, own):
    pool = np.arange(6 * PAGE)  # what each cell holds
    found = repacking(table, own, PAGE)
    content = pool.reshape(6, PAGE)
    # As the pool is read: one array [heads, pages, page_size, head_dim], eight pages at a time.
    old = [content[page] for page in found.old_pages]
    padded = np.stack([*old, *[old[-1]] * (-len(old) % 8)])[None, ..., None] if old else None
    new = range(6, 6 + found.num_pages)
    if padded is not None:
        written = np.concatenate([part[0] for part in found.content([[padded]])], axis=1)
        pool = np.concatenate([pool, written[0, : found.num_pages, :, 0].reshape(-1)])

    def seen(entries):
        return [
            (pool[e.page * PAGE + cell], e.base + cell, e.base + cell - e.shift)
            for e in entries
            for cell in range(e.first, e.fill)
        ]

    packed = found.table(new)
    assert seen(packed) == seen(table)
    assert found.gain >= 0
    mine = [entry for entry in packed if entry.page >= 6]
    assert cells_used(mine) == len(found.cells) > (found.num_pages - 1) * PAGE or not old
    full = {e.page for e in table} - set(found.old_pages)
    for page in full & own:
        assert sum(e.fill - e.first for e in table if e.page == page) == PAGE
