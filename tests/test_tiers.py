"""Sessions that wait outside of the pool come back bit by bit, or are computed anew and say so."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
import tiny_engine

from jaxstate import session_snapshot
from jaxstate.answer import Source
from jaxstate.errors import CapacityError, PoolFullError, PoolLostError
from jaxstate.flash import Question
from jaxstate.serving.local_service import LocalService

PAGE = 8
PAGE_BYTES = PAGE * tiny_engine.MODEL.bytes_per_cell
FINE = 4
FINE_BYTES = FINE * tiny_engine.MODEL.bytes_per_cell


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    swap_dir = tmp_path_factory.mktemp("swap")
    return tiny_engine.build(num_pages=24, host_bytes=16 * PAGE_BYTES, swap_dir=str(swap_dir))


@pytest.fixture
def engine(compiled):
    with tiny_engine.left_empty(compiled):
        yield compiled
    tiers = compiled.verbs.tiers
    assert (tiers.bytes_held("host"), tiers.bytes_held("disk"), tiers.copied_bytes) == (0, 0, 0)
    assert list(tiers.swap_dir.iterdir()) == []


def _ids(seed, count):
    return tiny_engine.random_ids(seed, count)


def _bits(engine, session, page=PAGE):
    """The bits of all cells that a session sees, in order of position."""
    entries = engine.session(session).entries
    cells = [e.page * page + cell for e in entries for cell in range(e.first, e.fill)]
    arrays = engine.executor.read_cells(np.asarray(cells, np.int64))
    return [part.tobytes() for layer in arrays for part in layer]


def _places(engine, session):
    return [entry[1:] for entry in engine.session(session).entries]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_cells_come_back_as_they_were(engine, tier):
    session = engine.create(_ids(1, 5), when_full="slide")
    for seed in range(6):
        engine.append(session, _ids(seed, 19))  # slides
    assert engine.session(session).evicted
    before, places = _bits(engine, session), _places(engine, session)
    engine.move_out(session, tier)
    assert engine.cells_held == 0
    assert engine.verbs.tiers.bytes_held(tier) >= engine.session(session).context_len
    engine.append(engine.create(), _ids(30, 40))  # others write where it was
    answer = engine.query(session, _ids(7, 3), max_new_tokens=2)
    assert (_bits(engine, session), _places(engine, session)) == (before, places)
    assert (answer.source, answer.rebuilt) == (Source.COMPUTED, False)
    assert engine.verbs.tiers.bytes_held(tier) == 0


def test_pages_that_others_see_stay(engine):
    parent = engine.create(_ids(1, 20))
    child = engine.fork(parent)
    engine.append(child, _ids(2, 20))
    held = engine.cells_held
    before = _bits(engine, child)
    engine.move_out(child, "host")
    assert held - engine.cells_held == 3 * PAGE
    engine.close(parent)
    assert engine.cells_held == 3 * PAGE  # what the child shared with it
    engine.advance(child, _ids(3, 2))
    assert _bits(engine, child) == before
    want = tiny_engine.greedy([*_ids(1, 20), *_ids(2, 20), *_ids(4, 3)], 2)
    assert engine.query(child, _ids(4, 3), max_new_tokens=2).token_ids == tuple(want)


def test_where_pages_lack_the_longest_unused_moves_out_by_itself(engine):
    names = [engine.create(_ids(seed, 30)) for seed in range(5)]  # four pages each
    engine.query(names[0], _ids(9, 2), max_new_tokens=1)  # of use again
    last = engine.create(_ids(8, 60))
    stored = [engine.session(name).stored is not None for name in names]
    assert stored == [False, True, False, False, False]
    for seed, name in enumerate(names):
        answer = engine.query(name, _ids(20, 3), max_new_tokens=2)
        assert answer.token_ids == tuple(tiny_engine.greedy([*_ids(seed, 30), *_ids(20, 3)], 2))
    assert engine.session(last).context_len == 60


def test_host_memory_keeps_its_limit_and_the_rest_goes_to_disk(engine):
    for seed in range(8):
        engine.create(_ids(seed, 60))  # eight pages each
    tiers = engine.verbs.tiers
    assert 0 < tiers.bytes_held("host") <= 16 * PAGE_BYTES
    assert tiers.bytes_held("disk") >= 3 * 8 * PAGE_BYTES


def test_a_session_stays_where_it_is_while_the_disk_takes_no_other(engine, monkeypatch):
    sessions = [engine.create(_ids(n, 90)) for n in range(3)]  # of 12 pages: two fit
    assert engine.verbs.tiers.bytes_held("host") == 12 * PAGE_BYTES
    engine.move_out(sessions[0], "disk")
    engine.move_out(sessions[1], "host")
    engine.create(_ids(4, 90), session_id="four")
    engine.query(sessions[2], _ids(9, 3), max_new_tokens=1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(PoolFullError, match="swap_dir .*No space left on device; free space"):
            engine.query(sessions[0], _ids(9, 3), max_new_tokens=3)
    for n, session in enumerate(sessions):
        answer = engine.query(session, _ids(9, 3), max_new_tokens=3)
        assert answer.token_ids == tuple(tiny_engine.greedy([*_ids(n, 90), *_ids(9, 3)], 3))
        assert (answer.version, answer.rebuilt) == (0, False)


@pytest.mark.parametrize("how", ["on the device", "on the host"])
@pytest.mark.parametrize("what", ["brought back", "opened", "repacked"])
def test_a_copy_that_fails_loses_no_session_and_no_page(engine, monkeypatch, how, what):
    session = engine.create(_ids(1, 20))
    snapshot = session_snapshot.take(engine.verbs, engine.session(session), fingerprint="tiny")
    if what == "brought back":
        engine.move_out(session, "host")
    if what == "repacked":
        for _ in range(6):  # part-filled pages
            child = engine.fork(session)
            engine.append(child, [3])
            engine.close(session)
            session = child
    tokens = list(engine.session(session).token_ids)
    do = {
        "brought back": lambda: engine.query(session, _ids(9, 3), max_new_tokens=1),
        "opened": lambda: session_snapshot.put(engine.verbs, snapshot, "copy"),
        "repacked": lambda: engine.verbs.tiers.repack(engine.session(session)),
    }[what]

    def failing(*_):
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        if how == "on the device":
            patch.setitem(engine.executor._copies, "put", failing)
        else:
            patch.setattr(engine.executor, "write_pages", failing)
        with pytest.raises(PoolLostError if how == "on the device" else MemoryError):
            do()
    assert engine.session_ids == [session]
    answer = engine.query(session, _ids(9, 3), max_new_tokens=3)
    assert answer.token_ids == tuple(tiny_engine.greedy([*tokens, *_ids(9, 3)], 3))


@pytest.fixture(scope="module")
def compiled_fine():
    return tiny_engine.build(num_pages=40, page_size=FINE, host_bytes=24 * FINE_BYTES)


@pytest.fixture
def fine(compiled_fine):
    """An engine of small pages: a session has more than are copied at a time."""
    with tiny_engine.left_empty(compiled_fine):
        yield compiled_fine
    assert compiled_fine.verbs.tiers.copied_bytes == 0


@pytest.fixture
def copied_out(fine, monkeypatch):
    """Pages that are copied out of the pool, as it happens."""
    store, copied = fine.executor.store_pages, []

    def noting(pages):
        copied.extend(pages)
        return store(pages)

    monkeypatch.setattr(fine.executor, "store_pages", noting)
    return copied


def _overwrite_what_is_free(engine):
    assert engine.pages.num_free == engine.pages.num_pages
    for session in [engine.create(_ids(seed, 80)) for seed in (30, 31)]:
        engine.close(session)


@pytest.mark.parametrize("length", [30, 64, 75])
def test_what_did_not_change_is_not_copied_out_again(fine, copied_out, length):
    session = fine.create(_ids(1, length))
    before = _bits(fine, session, FINE)
    for expected in (-(-length // FINE), 0, 0):
        copied_out.clear()
        fine.move_out(session, "host")
        _overwrite_what_is_free(fine)
        assert len(copied_out) == expected
        answer = fine.query(session, _ids(7, 3), max_new_tokens=2)
        assert _bits(fine, session, FINE) == before
        assert answer.token_ids == tuple(tiny_engine.greedy([*_ids(1, length), *_ids(7, 3)], 2))
        assert fine.verbs.tiers.copied_bytes == -(-length // FINE) * FINE_BYTES


CHANGES = {  # what changes a session of 75 tokens: pages that are then copied out again
    "an append": (lambda engine, one: engine.append(one, _ids(2, 3)), 4),
    "an append of a page": (lambda engine, one: engine.append(one, _ids(2, 9)), 5),
    "other tokens where it was cut": (
        lambda engine, one: (engine.rollback(one, 2), engine.append(one, _ids(3, 2))), 3,
    ),
    "other tokens on a full page": (
        lambda engine, one: (engine.rollback(one, 30), engine.append(one, _ids(3, 30))), 19,
    ),
    "a slide": (lambda engine, one: engine.append(one, _ids(2, 25)), 23),
    "all tokens new": (lambda engine, one: engine.update(one, _ids(5, 75)), 19),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_copied_out_again(fine, copied_out, name):
    change, expected = CHANGES[name]
    session = fine.create(when_full="slide")
    fine.append(session, _ids(1, 75))
    fine.move_out(session, "host")
    fine.verbs.revival.bring_back(fine.session(session))
    change(fine, session)
    before, places = _bits(fine, session, FINE), _places(fine, session)
    copied_out.clear()
    fine.move_out(session, "host")
    assert len(copied_out) == expected
    _overwrite_what_is_free(fine)
    fine.verbs.revival.bring_back(fine.session(session))
    assert (_bits(fine, session, FINE), _places(fine, session)) == (before, places)


def test_copies_make_room_for_cells_that_are_nowhere_else(engine):
    tiers = engine.verbs.tiers
    first, second = (engine.create(_ids(n, 70)) for n in (1, 2))  # nine pages each, of 16 in host
    engine.move_out(first, "host")
    engine.query(first, _ids(7, 2), max_new_tokens=1)
    assert (tiers.bytes_held("host"), tiers.copied_bytes) == (0, 9 * PAGE_BYTES)
    engine.move_out(second, "host")
    assert (tiers.bytes_held("host"), tiers.copied_bytes) == (9 * PAGE_BYTES, 0)
    engine.query(second, _ids(7, 2), max_new_tokens=1)
    engine.move_out(first, "host")
    assert (tiers.bytes_held("host"), tiers.copied_bytes) == (9 * PAGE_BYTES, 0)
    engine.query(first, _ids(7, 2), max_new_tokens=1)
    assert (tiers.bytes_held("host"), tiers.copied_bytes) == (0, 9 * PAGE_BYTES)
    assert engine.pages.num_available == engine.pages.num_pages


def test_without_a_tier_or_room_in_it_a_move_is_refused():
    engine = tiny_engine.build(num_pages=12, host_bytes=2 * PAGE_BYTES)
    session = engine.create(_ids(1, 30))
    with pytest.raises(CapacityError, match="host_bytes: .* more are needed"):
        engine.move_out(session, "host")
    with pytest.raises(CapacityError, match="start with a swap_dir"):
        engine.move_out(session, "disk")
    with pytest.raises(PoolFullError):
        engine.create(_ids(2, 80))
    assert engine.query(session, _ids(3, 2), max_new_tokens=1).token_ids


def test_pages_are_counted_no_further_than_anybody_asks(monkeypatch: pytest.MonkeyPatch):
    engine = tiny_engine.build(num_pages=64, host_bytes=5 * PAGE_BYTES, prefix_share=0.3)
    pages, tiers = engine.pages, engine.verbs.tiers
    looked_at = []
    own_pages = tiers._own_pages
    monkeypatch.setattr(
        tiers, "_own_pages", lambda one, beside: looked_at.append(one) or own_pages(one, beside)
    )
    engine.generate(_ids(0, 30), max_new_tokens=1)  # its beginning is kept
    for seed in range(4):
        session = engine.create(_ids(seed, 20))
        engine.append(engine.fork(session), _ids(9, 10))
        engine.advance(session, _ids(5, 9), max_new_tokens=2)
    for step in range(7):  # where a fork goes on and its parent is closed, pages stay part-filled
        parent, session = session, engine.fork(session)
        engine.append(session, _ids(step, 3))
        engine.close(parent)
    exact = pages.num_available
    assert pages.num_free < exact < 64  # some can be had, some are more than host memory takes
    assert len(set(map(id, looked_at))) == 8
    for enough in range(66):
        assert min(pages.num_to_be_had(enough), enough) == min(exact, enough)
    looked_at.clear()
    assert pages.num_to_be_had(pages.num_free + 1) > pages.num_free  # of what is paid for or kept
    assert not looked_at
    with pytest.raises(PoolFullError):
        pages.allocate(-1, exact + 1, after=None, growing=False)
    assert (tiers.moved_out, tiers.repacked) == (0, 0)
    assert len(pages.allocate(-1, exact, after=None, growing=False)) == exact
    assert tiers.moved_out and tiers.repacked


def _damage(engine, session):
    path = engine.session(session).stored.path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_lost_cells_of_a_session_that_never_slid_are_computed_anew(engine, harm):
    session = engine.create(_ids(1, 5))
    engine.append(session, _ids(2, 40))
    engine.move_out(session, "disk")
    if harm == "damaged":
        _damage(engine, session)
    else:
        engine.session(session).stored.path.unlink()
    child = engine.fork(session)  # which lacks them as well
    engine.rollback(child, 4)
    want = tiny_engine.greedy([*_ids(1, 5), *_ids(2, 40)[:-4], *_ids(3, 3)], 2)
    assert engine.query(child, _ids(3, 3), max_new_tokens=2).token_ids == tuple(want)
    answer = engine.query(session, _ids(3, 3), max_new_tokens=2)
    want = tiny_engine.greedy([*_ids(1, 5), *_ids(2, 40), *_ids(3, 3)], 2)
    assert (answer.token_ids, answer.rebuilt, answer.version) == (tuple(want), False, 1)


def test_lost_cells_of_a_slid_session_are_rebuilt_and_its_answers_say_so(engine):
    session = engine.create(_ids(1, 5), when_full="slide")
    for seed in range(8):
        engine.append(session, _ids(seed, 19))
    kept = list(engine.session(session).token_ids)
    engine.move_out(session, "disk")
    _damage(engine, session)
    answer = engine.query(session, _ids(3, 3), max_new_tokens=2)
    want = tiny_engine.greedy([*kept, *_ids(3, 3)], 2)
    assert (answer.token_ids, answer.rebuilt, answer.version) == (tuple(want), True, 9)
    engine.append(session, _ids(9, 19))  # goes on sliding
    assert engine.query(session, _ids(3, 3), max_new_tokens=1).rebuilt


def test_a_service_with_more_sessions_than_pages_answers_all_of_them(compiled):
    service = LocalService(compiled)
    names = [service.create(_ids(seed, 30)) for seed in range(12)]
    questions = [
        service.query(name, Question(token_ids=tuple(_ids(50, 3)), max_new_tokens=3))
        for _ in range(3)
        for name in names
    ]
    for index, pending in enumerate(questions):
        want = tiny_engine.greedy([*_ids(index % 12, 30), *_ids(50, 3)], 3)
        assert pending.result(60).token_ids == tuple(want)
    assert compiled.verbs.tiers.brought_back >= 12
    service.close()
    for name in names:
        compiled.close(name)
    assert compiled.cells_held == 0
