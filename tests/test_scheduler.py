"""Many verbs in shared steps give what each gives alone, and harm nobody by ending."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tiny_engine

from jaxstate.engine import Engine
from jaxstate.errors import CapacityError, InputError, PoolLostError
from jaxstate.needs import group_rows
from jaxstate.pages import Stretch
from jaxstate.plan import JobClass, Limits
from jaxstate.rows import RowInput
from jaxstate.scheduler import Scheduler, State

LIMITS = Limits(tokens=16, rows=4)


@functools.cache
def _compiled():
    return tiny_engine.build(num_pages=64)


@pytest.fixture
def engine():
    """An engine without sessions, which must have none of its pages held at the end."""
    with tiny_engine.left_empty(_compiled()) as engine:
        yield engine


class Many:
    """A scheduler on an engine, and the verbs as a service would submit them."""

    def __init__(self, engine: Engine):
        self.engine, self.verbs, self.now = engine, engine.verbs, 0.0
        self.scheduler = Scheduler(engine.executor, engine.pages, LIMITS)

    def append(self, session, ids, **how):
        return self._submit(self.verbs.append, session, ids, JobClass.APPEND, len(ids), **how)

    def query(self, session, ids, count=4, **how):
        begin = functools.partial(self.verbs.stream, max_new_tokens=count)
        return self._submit(begin, session, ids, JobClass.QUERY, len(ids) + count, **how)

    def _submit(self, begin, session, ids, job_class, cells, **how):
        return self.scheduler.submit(
            functools.partial(begin, session, ids), job_class=job_class, session=session,
            tokens=len(ids), cells=cells, now=self.now, **how,
        )  # fmt: skip

    def step(self):
        self.now += 0.01
        return self.scheduler.step(self.now)

    def finish(self):
        for _ in range(1000):
            if not self.scheduler.num_waiting:
                return
            self.step()
        raise AssertionError("the scheduler does not end")


def _sessions(engine, count):
    prompts = [tiny_engine.random_ids(n, 9 + 5 * n) for n in range(count)]
    return prompts, [engine.create(prompt) for prompt in prompts]


def test_appends_and_questions_of_many_sessions_equal_the_dense_forward(engine):
    many = Many(engine)
    contexts, sessions = _sessions(engine, 5)
    questions = [tiny_engine.random_ids(50 + n, 3 + n) for n in range(5)]
    steps = engine.executor.steps
    for turn in range(2):
        new = [tiny_engine.random_ids(20 + 10 * turn + n, 7) for n in range(5)]
        appended = [many.append(*each) for each in zip(sessions, new, strict=True)]
        asked = [
            many.query(session, question, after=frozenset({append.job_id}))
            for session, question, append in zip(sessions, questions, appended, strict=True)
        ]
        many.finish()
        contexts = [context + ids for context, ids in zip(contexts, new, strict=True)]
        for context, question, ticket in zip(contexts, questions, asked, strict=True):
            assert ticket.state is State.DONE
            wanted = tiny_engine.greedy(context + question, 4)
            assert [token.token_id for token in ticket.tokens] == wanted
            assert list(ticket.result.token_ids) == wanted
        assert [ticket.result for ticket in appended] == [turn + 1] * 5
    # Alone, the questions take 5 * 4 steps each turn, the appends 5.
    assert engine.executor.steps - steps < 30


def test_what_was_paid_for_beside_an_append_is_gone_with_it(engine):
    many = Many(engine)
    [context], [session] = _sessions(engine, 1)
    new, question = tiny_engine.random_ids(7, 60), tiny_engine.random_ids(8, 4)
    append = many.append(session, new)
    many.step()  # the append has begun and goes on
    begin = functools.partial(many.verbs.stream, max_new_tokens=2, keep=True)
    kept = many._submit(begin, session, question, JobClass.QUERY, 6)
    many.finish()
    assert kept.ended < append.ended and kept.result.version == 0
    assert engine.session(session).paid == []
    answer = engine.query(session, question, max_new_tokens=3)
    assert answer.token_ids == tuple(tiny_engine.greedy(context + new + question, 3))


def test_choices_are_scored_beside_other_questions(engine):
    many = Many(engine)
    (_, _), (first, second) = _sessions(engine, 2)
    choices = [[1, 2], [1], [3, 4, 5]]
    alone = engine.choose(first, [7, 8], choices)
    begin = functools.partial(engine.verbs.choose, first, [7, 8], choices)
    ticket = many.scheduler.submit(
        begin, job_class=JobClass.QUERY, session=first, tokens=5, cells=2, now=0.0
    )
    many.query(second, [4, 5, 6])
    many.finish()
    np.testing.assert_allclose(ticket.result.choice_logprobs, alone.choice_logprobs, atol=1e-4)
    assert ticket.result.choice == alone.choice


def test_choices_that_need_every_row_are_scored_while_answers_stream(engine):
    many = Many(engine)
    (context, _), (first, second) = _sessions(engine, 2)
    choices = [[1, 2], [3, 4], [5, 6]]  # with the root, rows of a whole step
    alone = engine.choose(second, [7, 8], choices)
    asked = [many.query(first, [1, 2], 30) for _ in range(2)]
    many.step()
    begin = functools.partial(engine.verbs.choose, second, [7, 8], choices)
    ticket = many.scheduler.submit(
        begin, job_class=JobClass.QUERY, session=second, tokens=2, cells=2, now=many.now, outputs=1
    )
    submitted, drawn = many.now, 0
    while not ticket.is_over and many.now < submitted + 1.0:
        many.now += 0.04
        many.step()
        drawn += 1
    assert ticket.state is State.DONE and not any(one.is_over for one in asked)
    np.testing.assert_allclose(ticket.result.choice_logprobs, alone.choice_logprobs, atol=1e-4)
    assert [len(one.tokens) for one in asked] == [drawn] * 2  # but for one step, and the first
    many.finish()
    for one in asked:
        assert list(one.result.token_ids) == tiny_engine.greedy([*context, 1, 2], 30)


def test_an_append_that_evicts_does_not_wait_for_idle_time_behind_an_advance(engine):
    many = Many(engine)
    full = engine.create(tiny_engine.random_ids(1, 9), when_full="slide")
    engine.append(full, tiny_engine.random_ids(2, 87))
    other = engine.create(tiny_engine.random_ids(3, 9))
    answer = many.query(other, [1, 2], 60)
    many.step()
    begin = functools.partial(
        many.verbs.advance, max_new_tokens=4, min_gap=0.0, eos_ids=[], slot_ids=[]
    )
    advance = many._submit(begin, full, [7, 8, 9], JobClass.ADVANCE, 7)
    append = many.append(full, tiny_engine.random_ids(4, 8), exclusive=True)
    while not append.is_over and not answer.is_over:
        many.step()
    assert append.state is advance.state is State.DONE and not answer.is_over
    many.finish()


def test_questions_on_one_session_read_its_context_once(engine):
    many = Many(engine)
    [context], [session] = _sessions(engine, 1)
    questions = [[1, 2, 3], [4, 5], [6]]
    asked = [many.query(session, question, 2) for question in questions]
    steps = engine.executor.steps
    many.finish()
    assert engine.executor.steps - steps == 2
    for question, ticket in zip(questions, asked, strict=True):
        assert list(ticket.result.token_ids) == tiny_engine.greedy(context + question, 2)


def test_a_long_piece_runs_apart_from_answers_whose_contexts_it_would_drag(engine):
    many = Many(engine)
    contexts = [tiny_engine.random_ids(n, 80) for n in range(3)]
    sessions = [engine.create(context) for context in contexts]
    asked = [many.query(session, [1, 2], 4) for session in sessions[:2]]
    many.step()
    append = many.append(sessions[2], tiny_engine.random_ids(9, 14))
    steps = engine.executor.steps
    assert many.step().tokens == 16
    assert engine.executor.steps - steps == 2
    many.finish()
    assert append.state is State.DONE
    for context, ticket in zip(contexts, asked, strict=False):
        assert list(ticket.result.token_ids) == tiny_engine.greedy([*context, 1, 2], 4)


def test_a_question_beside_a_long_append_sees_the_session_as_it_was(engine):
    many = Many(engine)
    [context], [session] = _sessions(engine, 1)
    new = tiny_engine.random_ids(3, 60)
    append = many.append(session, new)
    many.step()
    question = many.query(session, [5, 6], 1)
    while not question.is_over:
        many.step()
    assert append.state is State.RUNNING
    assert question.result.version == 0
    assert list(question.result.token_ids) == tiny_engine.greedy([*context, 5, 6], 1)
    many.finish()
    answer = engine.query(session, [5, 6], max_new_tokens=4)
    assert answer.version == 1
    assert list(answer.token_ids) == tiny_engine.greedy([*context, *new, 5, 6], 4)


@pytest.mark.parametrize("seed", range(4))
def test_cancelling_at_any_moment_gives_every_cell_back(engine, seed):
    rng = np.random.default_rng(seed)
    many = Many(engine)
    contexts, sessions = _sessions(engine, 4)
    held = engine.cells_held
    tickets = []
    for n in range(12):
        session = sessions[rng.integers(4)]
        tickets.append(many.query(session, tiny_engine.random_ids(n, int(rng.integers(1, 30)))))
        many.step()
        if rng.random() < 0.7:
            many.scheduler.cancel(tickets[rng.integers(len(tickets))], many.now)
    many.finish()
    assert engine.cells_held == held
    assert {ticket.state for ticket in tickets} == {State.DONE, State.CANCELLED}
    for session, context in zip(sessions, contexts, strict=True):
        assert list(engine.session(session).token_ids) == context


def test_a_failed_step_costs_only_what_ran_in_it(engine, monkeypatch):
    many = Many(engine)
    contexts, sessions = _sessions(engine, 3)
    held = engine.cells_held
    in_step = [many.query(session, [1, 2]) for session in sessions[:2]]
    later = many.query(sessions[2], tiny_engine.random_ids(0, 20), after=frozenset({0, 1}))
    run = engine.executor.run
    calls = []

    def run_but_once(groups):
        calls.append(groups)
        if len(calls) == 2:
            raise RuntimeError("the device is gone")
        return run(groups)

    monkeypatch.setattr(engine.executor, "run", run_but_once)
    many.finish()
    assert [ticket.state for ticket in (*in_step, later)] == [
        State.FAILED, State.FAILED, State.DONE
    ]  # fmt: skip
    assert str(in_step[0].error) == "the device is gone"
    assert engine.cells_held == held
    question = tiny_engine.random_ids(0, 20)
    assert list(later.result.token_ids) == tiny_engine.greedy(contexts[2] + question, 4)


@pytest.mark.parametrize("begun", [False, True])
def test_a_pool_lost_while_verbs_run_one_by_one_costs_what_had_begun_to_answer(
    engine, monkeypatch, begun
):
    many = Many(engine)
    contexts, sessions = _sessions(engine, 3)
    first, second, third = (many.query(session, [1, 2], 6) for session in sessions)
    if begun:
        many.step()
        many.step()
    run = engine.executor.run
    failures = [CapacityError("together they read too much"), PoolLostError("the device is gone")]

    def run_but_twice(groups):
        if not failures:
            return run(groups)
        if len(failures) == 1:
            engine.executor._pool = engine.executor._new_pool()
            engine.executor.on_pool_lost()
        raise failures.pop(0)

    monkeypatch.setattr(engine.executor, "run", run_but_twice)
    many.finish()
    assert first.state is State.FAILED
    for ticket, context in zip((second, third), contexts[1:], strict=True):
        if begun:
            assert isinstance(ticket.error, PoolLostError)
        else:
            assert list(ticket.result.token_ids) == tiny_engine.greedy([*context, 1, 2], 6)
    assert not many.scheduler.waiting.total()


def test_what_begins_anew_keeps_the_deadline_it_was_given_later(engine, monkeypatch):
    many = Many(engine)
    contexts, sessions = _sessions(engine, 2)
    new = tiny_engine.random_ids(7, 40)
    append = many.append(sessions[0], new, deadline=0.1)
    many.scheduler.extend(append, 100.0)
    many.step()
    fatal = many.query(sessions[1], [1, 2])  # whose step holds no append
    many.now = 0.2
    run = engine.executor.run

    def run_but_once(groups):
        monkeypatch.setattr(engine.executor, "run", run)
        engine.executor._pool = engine.executor._new_pool()
        engine.executor.on_pool_lost()
        raise PoolLostError("the device is gone")

    monkeypatch.setattr(engine.executor, "run", run_but_once)
    many.finish()
    assert fatal.state is State.FAILED
    assert append.state is State.DONE
    assert list(engine.session(sessions[0]).token_ids) == [*contexts[0], *new]


def test_a_verb_that_raises_fails_alone(engine):
    many = Many(engine)
    [context], [session] = _sessions(engine, 1)
    wrong = many.append(session, [10**6])
    right = many.query(session, [1, 2])
    many.finish()
    assert wrong.state is State.FAILED and isinstance(wrong.error, InputError)
    assert list(right.result.token_ids) == tiny_engine.greedy([*context, 1, 2], 4)


def test_a_deadline_that_passed_means_that_nothing_is_run(engine):
    many = Many(engine)
    _, [session] = _sessions(engine, 1)
    late = many.query(session, [1, 2], deadline=0.005)
    before = engine.executor.tokens_forwarded
    many.finish()
    assert late.state is State.EXPIRED and engine.executor.tokens_forwarded == before


def test_what_does_not_fit_now_waits_and_what_never_fits_is_refused(engine):
    many = Many(engine)
    _, [session] = _sessions(engine, 1)
    for n in range(5):
        engine.create(tiny_engine.random_ids(n, 80))
    assert engine.pages.num_free == 12
    first, second = (many.query(session, [n], count=40) for n in (1, 2))  # of 7 pages at most
    many.step()
    assert (first.state, second.state) == (State.RUNNING, State.WAITING)
    many.finish()
    assert (first.state, second.state) == (State.DONE, State.DONE)
    with pytest.raises(CapacityError, match="at most the pool's 64 pages"):
        many.query(session, [3], count=10**5)


# Rows that see alike


def _row(*context):
    return RowInput(
        token_ids=np.zeros(1, np.int32), positions=np.zeros(1, np.int32),
        cells=np.zeros(1, np.int32), shifts=np.zeros(1, np.int32),
        context=[Stretch(begin, end, 5, 0) for begin, end in context],
    )  # fmt: skip


def _seen(groups):
    """Cells that each row of each group sees."""
    return [
        sorted(
            cell
            for stretch in (*group.context, *row.context)
            for cell in range(stretch.begin, stretch.end)
        )
        for group in groups
        for row in group.rows
    ]


@pytest.mark.parametrize(
    "contexts, shared",
    [
        ([[(0, 40)], [(0, 44)], [(0, 40), (60, 63)]], [(40, 3)]),
        ([[(0, 10), (20, 90)], [(0, 10), (30, 90)]], [(80, 1), (70, 1)]),
        ([[(0, 40)], [(0, 40)], [(0, 10)]], [(40, 2), (10, 1)]),
        ([[], [(0, 5)], [(0, 5)]], [(0, 1), (5, 2)]),
    ],
)
def test_rows_are_grouped_by_most_of_what_they_see_and_see_the_same(contexts, shared):
    groups = group_rows([_row(*context) for context in contexts])
    sizes = [sum(s.end - s.begin for s in group.context) for group in groups]
    assert list(zip(sizes, (len(group.rows) for group in groups), strict=True)) == shared
    assert _seen(groups) == [
        sorted(cell for begin, end in context for cell in range(begin, end)) for context in contexts
    ]
