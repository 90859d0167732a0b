"""A pool for three sessions and eight that are asked: all answered, nobody waits for ever."""

from __future__ import annotations

import concurrent.futures
import functools

import numpy as np
import pytest
import tiny_engine

from jaxstate.errors import CapacityError, PoolFullError
from jaxstate.flash import Question
from jaxstate.plan import JobClass, Limits
from jaxstate.scheduler import Scheduler, State
from jaxstate.serving.local_service import LocalService

PAGE = 8
PAGE_BYTES = PAGE * tiny_engine.MODEL.bytes_per_cell
CONTEXT_LEN, NUM_PAGES = 32, 14  # of three full sessions and two pages for what is asked
SESSIONS = 8
WAIT_S = 60
LIMITS = Limits(tokens=16, rows=4)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tiny_engine.build(
        num_pages=NUM_PAGES, context_len=CONTEXT_LEN, host_bytes=1,
        swap_dir=str(tmp_path_factory.mktemp("swap")),
    )  # fmt: skip


@pytest.fixture(params=["host", "room for the others alone", "disk"])
def engine(compiled, request, monkeypatch):
    """An engine whose sessions wait in host memory, in just so much of it, or on disk."""
    pages = {"host": 100, "disk": 0}.get(request.param, (SESSIONS - 3) * CONTEXT_LEN // PAGE)
    monkeypatch.setattr(compiled.verbs.tiers, "host_limit", pages * PAGE_BYTES)
    if request.param != "disk":
        monkeypatch.setattr(compiled.verbs.tiers, "swap_dir", None)
    with tiny_engine.left_empty(compiled):
        yield compiled


@pytest.fixture
def tight(compiled, monkeypatch):
    """An engine whose sessions have nowhere to go."""
    monkeypatch.setattr(compiled.verbs.tiers, "host_limit", 0)
    monkeypatch.setattr(compiled.verbs.tiers, "swap_dir", None)
    with tiny_engine.left_empty(compiled):
        yield compiled


def _ids(seed, count):
    return tiny_engine.random_ids(seed, count)


def _step_to_the_end(scheduler):
    now = 0.0
    for _ in range(2000):
        if not scheduler.num_waiting:
            return
        now += 0.01
        scheduler.step(now)
    raise AssertionError("the scheduler does not end")


def _submit(scheduler, begin, session, ids, job_class, cells):
    return scheduler.submit(
        functools.partial(begin, session, ids), job_class=job_class, session=session,
        tokens=len(ids), cells=cells, now=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_verbs_on_more_sessions_than_fit_all_end_well(engine, seed):
    rng = np.random.default_rng(seed)
    scheduler = Scheduler(engine.executor, engine.pages, LIMITS)
    contexts = {engine.create(ids): ids for n in range(SESSIONS) for ids in [_ids(n, 20)]}
    names = list(contexts)
    asked = []
    for n in range(40):
        session = names[rng.integers(SESSIONS)]
        if rng.random() < 0.3 and len(contexts[session]) + 4 <= CONTEXT_LEN:
            new = _ids(100 + n, 4)
            contexts[session] = contexts[session] + new
            append = engine.verbs.append
            ticket = _submit(scheduler, append, session, new, JobClass.APPEND, 4)
            asked.append((ticket, None, None))
            continue
        question, count = _ids(200 + n, int(rng.integers(1, 9))), int(rng.integers(1, 7))
        begin = functools.partial(engine.verbs.stream, max_new_tokens=count)
        ticket = _submit(scheduler, begin, session, question, JobClass.QUERY, len(question) + count)
        asked.append((ticket, question, count))
    _step_to_the_end(scheduler)
    for ticket, question, count in asked:
        assert ticket.state is State.DONE, ticket.error
        if question:
            context = contexts[ticket.session][: ticket.result.context_len]
            want = tiny_engine.greedy(context + question, count)
            assert ticket.result.token_ids == tuple(want)
    assert engine.verbs.tiers.brought_back >= SESSIONS - 3


def test_threads_on_more_sessions_than_fit_are_all_answered(engine):
    service = LocalService(engine)

    def user(n):
        context = _ids(n, 20)
        session = service.create(context)
        for turn in range(3):
            new = _ids(10 * n + turn, 4)
            service.append(session, new).result(WAIT_S)
            context = context + new
            question = Question(token_ids=tuple(_ids(n + turn, 3)), max_new_tokens=3)
            answer = service.query(session, question).result(WAIT_S)
            assert answer.token_ids == tuple(tiny_engine.greedy([*context, *question.token_ids], 3))
        return True

    with concurrent.futures.ThreadPoolExecutor(SESSIONS) as pool:
        assert all(pool.map(user, range(SESSIONS), timeout=WAIT_S))
    service.close()


def test_what_can_never_fit_is_told_from_what_does_not_fit_now(tight):
    scheduler = Scheduler(tight.executor, tight.pages, LIMITS)

    def ask(session, count):
        begin = functools.partial(tight.verbs.stream, max_new_tokens=count)
        return _submit(scheduler, begin, session, [1], JobClass.QUERY, 1 + count)

    first = tight.create(_ids(1, 31))
    never, fits = ask(first, 90), ask(first, 80)
    _step_to_the_end(scheduler)
    assert isinstance(never.error, CapacityError) and not isinstance(never.error, PoolFullError)
    assert "12 pages of 8 cells behind a context of 4, the pool has 14" in str(never.error)
    assert fits.state is State.DONE
    others = [tight.create(_ids(n, 31)) for n in range(2)]
    not_now = ask(first, 24)
    _step_to_the_end(scheduler)
    assert isinstance(not_now.error, PoolFullError)
    assert not_now.error.retry_after_s > 0
    tight.close(others[0])
    again = ask(first, 24)
    _step_to_the_end(scheduler)
    assert again.state is State.DONE


def test_a_session_does_not_come_back_for_a_question_that_has_no_room_beside_it(engine):
    first = engine.create(_ids(1, 31))
    engine.move_out(first, "disk" if engine.verbs.tiers.swap_dir else "host")
    others = [engine.create(_ids(n, 31)) for n in range(2)]
    asked = [engine.stream(name, [1], max_new_tokens=2) for name in others]
    for stream in asked:
        next(stream)  # 10 of 14 pages cannot move now
    with pytest.raises(PoolFullError, match="needs 5 pages of 8 cells, 4 of 14 can be had"):
        engine.query(first, [1], max_new_tokens=2)
    assert engine.session(first).stored is not None
    assert [engine.session(name).stored for name in others] == [None, None]
    for stream in asked:
        stream.close()
    answer = engine.query(first, [1], max_new_tokens=2)
    assert answer.token_ids == tuple(tiny_engine.greedy([*_ids(1, 31), 1], 2))


def test_an_append_that_evicts_as_much_as_it_needs_is_admitted_to_a_full_pool(tight):
    scheduler = Scheduler(tight.executor, tight.pages, LIMITS)
    session = tight.create(when_full="slide")
    tight.append(session, _ids(1, 32))
    for n in range(5):
        tight.create(_ids(n, 16))
    assert tight.pages.num_free == 0
    appended = _submit(scheduler, tight.verbs.append, session, [1, 2], JobClass.APPEND, 2)
    _step_to_the_end(scheduler)
    assert appended.result == 2
