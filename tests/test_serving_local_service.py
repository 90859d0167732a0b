"""A service in process: verbs from many threads, answers before they are asked, an orderly end."""

from __future__ import annotations

import concurrent.futures
import functools
import sys
import threading
import time

import numpy as np
import pytest
import tiny_engine
import tiny_service

from jaxstate.answer import Source
from jaxstate.errors import (
    BusyError,
    CancelledError,
    CapacityError,
    ExpiredError,
    InputError,
    PoolFullError,
    QuotaError,
    SessionError,
)
from jaxstate.flash import Question
from jaxstate.plan import JobClass
from jaxstate.prepositioning import Entry
from jaxstate.sampling import Sampling
from jaxstate.serving.after_steps import UNASKED
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.quotas import Quota

WAIT_S = 60


@pytest.fixture
def service():
    with tiny_service.started() as service:
        yield service


def _question(seed, count=4, **how):
    return Question(token_ids=tuple(tiny_engine.random_ids(seed, 5)), max_new_tokens=count, **how)


def _wait_for_commands(service, count):
    with service._changed:
        assert service._changed.wait_for(lambda: len(service._commands) == count, WAIT_S)


def _greedy(context, question):
    return tuple(tiny_engine.greedy([*context, *question.token_ids], question.max_new_tokens))


def test_many_threads_ask_and_append_and_every_answer_is_of_its_version(service):
    def user(n):
        context = tiny_engine.random_ids(n, 8)
        session = service.create(context)
        contexts = [context]
        for turn in range(3):
            new = tiny_engine.random_ids(100 * n + turn, 6)
            appended = service.append(session, new)
            contexts.append(contexts[-1] + new)
            question = _question(n + turn)
            pending = service.query(session, question)
            tokens = [token.token_id for token in pending]
            answer = pending.result()
            assert tuple(tokens) == answer.token_ids
            assert answer.token_ids == _greedy(contexts[answer.version], question)
            assert appended.result(WAIT_S) == turn + 1
        service.close_session(session)
        return True

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(user, range(6), timeout=WAIT_S))


def test_registered_questions_are_answered_before_they_are_asked(service):
    context = tiny_engine.random_ids(1, 20)
    session = service.create(context)
    questions = [_question(n) for n in range(5)]
    for question in questions:
        service.register(session, question)
    service.wait_until_idle(WAIT_S)
    forwarded = service._engine.executor.tokens_forwarded
    for question in questions:
        answer = service.query(session, question).result()
        assert answer.source is Source.FLASH and answer.tokens_forwarded == 0
        assert answer.token_ids == _greedy(context, question)
    assert service._engine.executor.tokens_forwarded == forwarded
    asked = service.query(session, _question(9)).result()
    assert asked.source is Source.COMPUTED


def test_a_change_makes_answers_old_and_new_ones_come_by_themselves(service):
    context = tiny_engine.random_ids(1, 20)
    session = service.create(context)
    flash = service.register(session, _question(3))
    service.wait_until_idle(WAIT_S)
    new = tiny_engine.random_ids(2, 5)
    assert service.append(session, new).result(WAIT_S) == 1
    answer = service.query(session, _question(3), stale="wait").result()
    assert (answer.version, answer.source) == (1, Source.FLASH)
    assert answer.token_ids == _greedy([*context, *new], _question(3))
    assert flash.evaluations == 2


def test_an_old_answer_is_served_only_on_wish_and_says_its_version(service):
    context = tiny_engine.random_ids(1, 20)
    session = service.create(context)
    question = _question(3)
    service.register(session, question)
    service.wait_until_idle(WAIT_S)
    with service._changed:  # the worker is held up before it can evaluate anew
        service._sessions[session].version = 7
        old = service.query(session, question, stale="serve").result()
        assert (old.version, old.source) == (0, Source.FLASH)
        assert service._questions.look_up(session, question) is None
        service._sessions[session].version = 0


def test_nobody_is_told_of_an_append_before_its_version_counts(service, monkeypatch):
    session = service.create(tiny_engine.random_ids(1, 20))
    ended, go_on = threading.Event(), threading.Event()

    def commit():  # what the worker does between a step and what follows from it
        if any(ticket.has_ended for ticket in service._writes.under_way(session)):
            ended.set()
            assert go_on.wait(WAIT_S)

    monkeypatch.setattr(service._durable, "commit", commit)
    pending = service.append(session, tiny_engine.random_ids(2, 3))
    assert ended.wait(WAIT_S)
    assert not pending.is_over and service.version(session) == 0
    go_on.set()
    assert pending.result(WAIT_S) == service.version(session) == 1


def test_a_burst_of_appends_is_evaluated_once(service):
    context = tiny_engine.random_ids(1, 10)
    session = service.create(context)
    flash = [service.register(session, _question(n)) for n in range(3)]
    service.wait_until_idle(WAIT_S)
    release = tiny_service.hold(service)
    burst = []
    threads = [
        threading.Thread(target=lambda n=n: burst.append(service.append(session, [n])))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    _wait_for_commands(service, 20)
    release.set()
    for thread in threads:
        thread.join()
    assert sorted(one.result(WAIT_S) for one in burst) == list(range(1, 21))
    service.wait_until_idle(WAIT_S)
    assert [query.evaluations for query in flash] == [2, 2, 2]
    assert {query.answer.version for query in flash} == {20}


def test_nothing_is_evaluated_between_appends_that_follow_one_another_closely():
    now = [0.0]
    with tiny_engine.left_empty(tiny_service.engine()) as engine:
        service = LocalService(engine, clock=lambda: now[0])
        session = service.create(tiny_engine.random_ids(1, 20))
        query = service.register(session, _question(1))
        service.wait_until_idle(WAIT_S)
        for seed in range(5):  # each within no time behind the one before
            service.append(session, tiny_engine.random_ids(seed, 2)).result(WAIT_S)
        with pytest.raises(TimeoutError):
            service.wait_until_idle(0.05)
        assert (query.evaluations, service._scheduler.num_waiting) == (1, 0)
        now[0] += 0.01  # the burst is over
        service.wait_until_idle(WAIT_S)
        assert query.answer is not None and query.answer.version == 5
        assert query.evaluations == 2
        service.append(session, tiny_engine.random_ids(9, 2)).result(WAIT_S)
        service.wait_until_idle(WAIT_S)  # one alone is evaluated at once
        assert query.answer.version == 6
        service.close()


def test_questions_of_a_session_are_evaluated_together(service):
    session = service.create(tiny_engine.random_ids(1, 40))
    service.wait_until_idle(WAIT_S)
    release = tiny_service.hold(service)
    board = service._sessions[session].board
    for n in range(4):
        board.register(Question(token_ids=(n + 1, 2, 3), max_new_tokens=3))
    steps = service._engine.executor.steps
    release.set()
    service.wait_until_idle(WAIT_S)
    assert service._engine.executor.steps - steps == 3


def test_a_question_does_not_wait_for_a_long_prefix_of_another_session(service, monkeypatch):
    session = service.create([1, 2, 3])
    tickets = []
    submit = service._scheduler.submit

    def note(*args, **how):
        tickets.append(submit(*args, **how))
        return tickets[-1]

    monkeypatch.setattr(service._scheduler, "submit", note)
    release = tiny_service.hold(service)
    created = threading.Thread(target=service.create, args=(tiny_engine.random_ids(1, 90),))
    created.start()
    _wait_for_commands(service, 1)
    asked = threading.Thread(target=lambda: service.query(session, _question(1, 1)).result(WAIT_S))
    asked.start()
    _wait_for_commands(service, 2)
    release.set()
    created.join()
    asked.join()
    long, short = tickets
    assert (long.session, short.session) == ("new 1", session)
    assert short.ended < long.ended


def test_callers_of_a_registered_question_share_one_computation_which_becomes_its_answer(
    service, monkeypatch
):
    # As if it had no idle time.
    monkeypatch.setattr(service._after_steps, "evaluate", lambda changing: None)
    context, question = tiny_engine.random_ids(1, 20), _question(1, count=9)
    session = service.create(context)
    query = service.register(session, question)
    service.append(session, tiny_engine.random_ids(2, 3)).result(WAIT_S)
    before = service._engine.executor.tokens_forwarded
    release = tiny_service.hold(service)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(service.query, session, question) for _ in range(3)]
        _wait_for_commands(service, 3)
        release.set()
        first, *others = [one.result(WAIT_S) for one in asking]
    first.cancel()
    first.cancel()  # its own part, once
    wanted = _greedy([*context, *tiny_engine.random_ids(2, 3)], question)
    for pending in others:
        assert tuple(token.token_id for token in pending) == wanted
        answer = pending.result(WAIT_S)
        assert (answer.token_ids, answer.version) == (wanted, 1)
    assert query.evaluations == 1
    assert service._engine.executor.tokens_forwarded - before == 5 + 9 - 1
    found = service.query(session, question).result(WAIT_S)
    assert (found.token_ids, found.source, found.age) == (wanted, Source.FLASH, 0)


def test_an_evaluation_that_someone_waits_for_is_not_dropped_for_an_append(service):
    context, question = tiny_engine.random_ids(1, 20), _question(1, count=40)
    session = service.create(context)
    query = service.register(session, question)
    release = tiny_service.hold(service)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asking = pool.submit(service.query, session, question)
        _wait_for_commands(service, 1)
        appending = pool.submit(service.append, session, tiny_engine.random_ids(2, 3))
        _wait_for_commands(service, 2)
        release.set()
        asked, appended = asking.result(WAIT_S), appending.result(WAIT_S)
    answer = asked.result(WAIT_S)
    assert (answer.token_ids, answer.version) == (_greedy(context, question), 0)
    assert appended.result(WAIT_S) == 1
    service.wait_until_idle(WAIT_S)
    assert query.answer is not None and query.answer.version == 1
    assert query.evaluations == 2


def test_a_session_has_so_many_registered_questions_and_no_more():
    with tiny_service.started(max_registered=2) as service:
        session, other = service.create([1, 2]), service.create([1, 2])
        first = service.register(session, _question(1))
        service.register(session, _question(2))
        with pytest.raises(
            CapacityError, match="registered questions: expected at most 2 .*, got 2 and 1"
        ):
            service.register(session, _question(3))
        service.register(session, _question(2), risk=0.1)  # is there already
        service.register(other, _question(3))
        service.unregister(session, first.flash_id)
        service.register(session, _question(3))
        assert len(service.flash_queries(session)) == 2


def test_a_tenants_questions_are_submitted_a_few_at_a_time_and_all_answered():
    with tiny_service.started(max_registered=UNASKED) as service:
        names = [service.create([1, 2], tenant=tenant) for tenant in ("ann", "ann", "bob")]
        release = tiny_service.hold(service)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for name in names:  # as if registered between two steps
                board = service._sessions[name].board
                for n in range(UNASKED // 2 + 10):
                    board.register(Question(token_ids=(n // 250 + 1, n % 250 + 1)))
            created = pool.submit(service.create, (), tenant="eve")
            most: list[int] = []
            end = service.listen(lambda: most.append(service._scheduler.waiting[JobClass.FLASH]))
            release.set()
            created.result(WAIT_S)
        service.wait_until_idle(WAIT_S)
        end()
        assert max(most) == UNASKED + UNASKED // 2 + 10  # of ann, of bob
        for name in names:
            assert all(one.answer for one in service.flash_queries(name))


def test_choices_are_registered_like_other_questions(service):
    context = tiny_engine.random_ids(1, 20)
    session = service.create(context)
    question = Question(token_ids=(4, 5), choices=((1, 2), (3,)))
    service.register(session, question)
    service.wait_until_idle(WAIT_S)
    answer = service.query(session, question).result()
    alone = tiny_engine.dense_logprobs([*context, 4, 5])[-1]
    assert answer.source is Source.FLASH
    assert answer.choice == (1 if alone[3] > alone[1] else answer.choice)


def test_choices_of_more_tokens_than_a_step_may_hold_are_scored_beside_an_answer():
    with tiny_service.started(step_tokens=4) as service:
        session = service.create(tiny_engine.random_ids(1, 20))
        asked = service.query(session, _question(2, count=60))
        choices = ((1, 2, 3, 4, 5, 6), (9, 8, 7, 6, 5, 4))
        answer = service.query(session, Question(token_ids=(7, 8), choices=choices)).result(WAIT_S)
        context = [*tiny_engine.random_ids(1, 20), 7, 8]
        scores = []
        for choice in choices:
            logprobs = tiny_engine.dense_logprobs([*context, *choice])[len(context) - 1 :]
            scores.append(sum(row[token] for row, token in zip(logprobs, choice, strict=False)))
        assert answer.choice == int(np.argmax(scores))
        assert len(asked.result(WAIT_S).token_ids) == 60


def test_a_question_that_cannot_be_answered_does_not_keep_the_service_busy(service):
    session = service.create(tiny_engine.random_ids(1, 20))
    flash = service.register(session, _question(3, count=120))
    service.wait_until_idle(WAIT_S)
    assert "exceed the model's 128 positions" in str(flash.error)
    assert flash.answer is None
    service.unregister(session, flash.flash_id)
    with pytest.raises(InputError, match=r"flash_id: expected one of the registered \(none\)"):
        service.unregister(session, flash.flash_id)


@pytest.mark.parametrize(
    "error, pattern, how",
    [
        (InputError, "question: expected at least one token", dict(token_ids=())),
        (InputError, "question: expected token ids in 0 … 96, got 97", dict(token_ids=(1, 97))),
        (InputError, "max_new_tokens: expected at least 1, got 0", dict(max_new_tokens=0)),
        (InputError, "logit_bias and eos_ids: .* got 97", dict(eos_ids=(97,))),
        (InputError, "eos_ids: .* got 97", dict(sampling=Sampling(logit_bias={97: 1.0}))),
        (InputError, "choices: expected token ids in 0 … 96", dict(choices=((1,), (97,)))),
        (InputError, "choices: expected at least one token id", dict(choices=((1,), ()))),
        (InputError, "choices.1.: expected different", dict(choices=((1,), (1,)))),
        (InputError, "choices: expected at most 15 tokens each", dict(choices=((1,) * 17,))),
        (CapacityError, "exceed the model's 128 positions", dict(max_new_tokens=127)),
        (
            CapacityError,
            "exceed the model's 128 positions",
            dict(token_ids=(1,) * 127, choices=((1, 2),)),
        ),
    ],
)
def test_what_no_session_can_answer_is_not_registered(service, error, pattern, how):
    session = service.create()
    with pytest.raises(error, match=pattern):
        service.register(session, Question(**(dict(token_ids=(1, 2)) | how)))
    assert service.flash_queries(session) == []
    with pytest.raises(error):  # as if it were asked
        service.query(session, Question(**(dict(token_ids=(1, 2)) | how))).result(WAIT_S)


def test_wrong_verbs_raise_where_they_are_called_or_waited_for(service):
    session = service.create([1, 2, 3])
    with pytest.raises(SessionError, match="unknown or closed"):
        service.append("nobody", [1])
    with pytest.raises(InputError, match="append"):
        service.append(session, [10**6]).result(WAIT_S)
    with pytest.raises(ExpiredError, match="nothing was run"):
        service.query(session, _question(1), deadline_s=-1.0).result(WAIT_S)


@pytest.mark.parametrize(
    "what, begin",
    [
        ("frozen", lambda service, name, ids: service.create(ids)),
        ("append", lambda service, name, ids: service.append(name, ids)),
        ("update", lambda service, name, ids: service.update(name, ids)),
        ("question", lambda service, name, ids: service.query(name, Question(token_ids=ids))),
        (
            "question",
            lambda service, name, ids: service.query(name, Question(token_ids=ids), commit=True),
        ),
        (
            "choices",
            lambda service, name, ids: service.query(
                name, Question(token_ids=(1,), choices=((2,), ids))
            ),
        ),
        ("prompt", lambda service, name, ids: service.generate(ids, max_new_tokens=1)),
        ("question", lambda service, name, ids: service.register(name, Question(token_ids=ids))),
        ("entry", lambda service, name, ids: service.advance(name, Entry(token_ids=ids))),
        ("header", lambda service, name, ids: service.declare(name, Entry(token_ids=ids))),
    ],
    ids=["prefix", "append", "update", "question", "turn", "choice", "prompt", "registered",
         "entry", "header"],
)  # fmt: skip
def test_more_than_any_context_holds_is_refused_before_the_worker_has_it(
    service, monkeypatch, what, begin
):
    session = service.create([1, 2, 3])

    def call(function):
        raise AssertionError("the worker was asked")

    with monkeypatch.context() as patched:
        patched.setattr(service._commands, "call", call)
        with pytest.raises(CapacityError, match=f"{what}: expected at most 128 tokens, .* got 129"):
            begin(service, session, (1,) * 129)


def test_a_question_that_is_refused_is_not_paid_ahead_of():
    def quota_of(tenant):
        return Quota(max_cells=10 if tenant == "ann" else None)

    with tiny_service.started(quota_of=quota_of) as service:
        for tenant, refusal in (("ann", QuotaError), ("bob", CapacityError)):
            session = service.create([1, 2, 3], tenant=tenant)
            entries = service._sessions[session].prepositions.entries
            for _ in range(2):
                with pytest.raises(refusal):
                    service.query(session, _question(1, 1000))
            assert entries() == []
            for _ in range(2):
                service.query(session, _question(1, 1)).result(WAIT_S)
            assert [entry.token_ids for entry in entries()] == [_question(1).token_ids]


def test_cancelled_questions_end_and_give_their_cells_back(service):
    session = service.create(tiny_engine.random_ids(1, 20))
    service.wait_until_idle(WAIT_S)
    held = service._engine.cells_held
    pending = service.query(session, _question(1, count=60))
    pending.cancel()
    with pytest.raises(CancelledError):
        pending.result(WAIT_S)
    service.wait_until_idle(WAIT_S)
    assert service._engine.cells_held == held


def test_too_many_waiting_verbs_are_refused_with_a_hint():
    engine = tiny_service.engine()
    service = LocalService(engine, max_waiting=2)
    session = service.create([1, 2, 3])
    release = tiny_service.hold(service)
    threads = [
        threading.Thread(target=lambda: service.append(session, [1]).result(WAIT_S))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    _wait_for_commands(service, 2)
    with pytest.raises(BusyError, match="2 verbs of class APPEND wait already") as busy:
        service.append(session, [1])
    assert busy.value.retry_after_s > 0
    release.set()
    for thread in threads:
        thread.join()
    service.close()
    assert engine.session(session).context_len == 5
    engine.close(session)


def test_verbs_that_the_worker_is_about_to_submit_count_as_waiting():
    engine = tiny_service.engine()
    service = LocalService(engine, max_waiting=2)
    session = service.create([1, 2, 3])
    first, second = tiny_service.hold(service), threading.Event()
    held = threading.Event()

    def hold() -> None:
        held.set()
        second.wait(WAIT_S)

    threads = [threading.Thread(target=lambda: service._call(hold))]
    threads += [threading.Thread(target=lambda: service.append(session, [1])) for _ in range(2)]
    for count, thread in enumerate(threads, start=1):
        thread.start()
        _wait_for_commands(service, count)
    first.set()
    assert held.wait(WAIT_S)  # the worker has taken all three
    with pytest.raises(BusyError):
        service.append(session, [1])
    second.set()
    for thread in threads:
        thread.join()
    service.wait_until_idle(WAIT_S)
    service.close()
    assert engine.session(session).context_len == 5
    engine.close(session)


def test_questions_are_answered_while_no_more_appends_are_taken():
    engine = tiny_service.engine()
    service = LocalService(engine, max_waiting=1)
    session = service.create([1, 2, 3])
    release = tiny_service.hold(service)
    pendings = []
    append = threading.Thread(target=lambda: pendings.append(service.append(session, [1])))
    append.start()
    _wait_for_commands(service, 1)
    with pytest.raises(BusyError):
        service.append(session, [1])
    ask = threading.Thread(target=lambda: pendings.append(service.query(session, _question(1))))
    ask.start()
    _wait_for_commands(service, 2)
    release.set()
    append.join()
    ask.join()
    assert len([pending.result(WAIT_S) for pending in pendings]) == 2
    service.close()
    engine.close(session)


def test_closing_ends_what_is_under_way_and_refuses_what_comes_later():
    engine = tiny_service.engine()
    service = LocalService(engine)
    session = service.create([1, 2, 3])
    pending = service.query(session, _question(1, count=100))
    service.close()
    with pytest.raises(CancelledError):
        pending.result(WAIT_S)
    with pytest.raises(CancelledError, match="the service is closed"):
        service.append(session, [1])
    engine.close(session)
    assert engine.cells_held == 0


def test_a_worker_that_breaks_says_so_to_everybody(monkeypatch):
    engine = tiny_service.engine()
    service = LocalService(engine)
    session = service.create([1, 2, 3])
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken(*_):
        raise RuntimeError("broken plan")

    monkeypatch.setattr(service._scheduler, "step", broken)
    with pytest.raises(CancelledError):
        service.query(session, _question(1)).result(WAIT_S)
    with pytest.raises(CancelledError, match="broken plan"):
        service.append(session, [1])
    engine.close(session)


def test_what_a_closing_worker_runs_is_not_said_to_be_left_undone():
    service = LocalService(tiny_service.engine())
    release, ran = tiny_service.hold(service), []
    last = threading.Thread(target=lambda: ran.append(service._call(lambda: "run")))

    with service._changed:
        service._commands.enqueue(service._commands.close)
        service._commands.enqueue(lambda: time.sleep(0.2))  # whoever gives up has time for it
    last.start()
    _wait_for_commands(service, 3)  # which are taken together
    release.set()
    last.join(WAIT_S)
    service.close()
    assert ran == ["run"]


def test_idle_is_only_when_callers_know_of_every_end(service, monkeypatch):
    session = service.create([1, 2, 3])
    commit = service._durable.commit
    monkeypatch.setattr(service._durable, "commit", lambda: (time.sleep(0.2), commit()))
    appended = service.append(session, [4, 5])
    until = time.monotonic() + WAIT_S
    while not appended._ticket.has_ended and time.monotonic() < until:
        time.sleep(0.001)
    service.wait_until_idle(WAIT_S)
    assert appended.is_over
    service.close_session(session)


def _changed_in_many_steps(service):
    """A session whose update or append takes several steps and gives cells up first."""
    session = service.create(tiny_engine.random_ids(1, 8), when_full="slide")
    service.append(session, tiny_engine.random_ids(2, 80)).result(WAIT_S)
    return session, tiny_engine.random_ids(1, 8) + tiny_engine.random_ids(2, 80)


@pytest.mark.parametrize("change", ["update", "append"])
@pytest.mark.parametrize("copy", ["fork", "snapshot", "queued snapshot"])
def test_who_copies_a_session_sees_no_half_of_a_change(service, tmp_path, change, copy):
    session, before = _changed_in_many_steps(service)
    ids = tiny_engine.random_ids(3, 80)
    after = before[:8] + ids if change == "update" else (before[:8] + (before[8:] + ids)[72:])
    copied = []

    def take():
        if copy == "fork":
            copied.append(service.fork(session, new_id="copy"))
        else:
            service.snapshot(session, tmp_path / "one", fingerprint="tiny")
            copied.append(
                service.restore(tmp_path / "one", fingerprint="tiny", session_id="copy")
            )

    taking = threading.Thread(target=take)
    if copy == "queued snapshot":  # comes before the change, and is waited for behind it
        release = tiny_service.hold(service)
        taking.start()
        _wait_for_commands(service, 1)
        pending = []
        changing = threading.Thread(
            target=lambda: pending.append(getattr(service, change)(session, ids))
        )
        changing.start()
        _wait_for_commands(service, 2)
        release.set()
        changing.join(WAIT_S)
        [change] = pending
    else:
        with tiny_service.held_behind_a_step(service) as ran:
            change = getattr(service, change)(session, ids)
            assert ran.wait(WAIT_S)
            taking.start()
            _wait_for_commands(service, 1)
    assert change.result(WAIT_S) == 2
    taking.join(WAIT_S)
    assert copied == ["copy"]
    expected = before if copy == "queued snapshot" else after
    assert service._engine.session("copy").token_ids == expected
    assert service._engine.session(session).token_ids == after
    for name in (session, "copy"):
        service.close_session(name)


def test_no_question_sees_half_of_an_append_behind_one_that_failed(monkeypatch):
    engine = tiny_engine.build(num_pages=64, evict_quantum=48)
    with tiny_service.started(engine, step_tokens=4, preposition=0) as service:
        session = service.create(tiny_engine.random_ids(1, 8), when_full="slide")
        before = tiny_engine.random_ids(1, 8) + tiny_engine.random_ids(2, 88)  # full
        service.append(session, before[8:]).result(WAIT_S)
        record, run, steps = service._engine.session(session), engine.executor.run, []
        second, asked = [], []

        def append():
            second.append(service.append(session, tiny_engine.random_ids(4, 30)))

        def ask():
            asked.append(service.query(session, _question(5, count=2)))

        def failing(groups):
            steps.append(1)
            if len(steps) == 1:  # of an append that has given 48 tokens up
                threading.Thread(target=append).start()
                _wait_for_commands(service, 1)
            if len(steps) == 2:
                raise RuntimeError("no such step")
            if len(steps) > 2 and record.evicted and record.stored is None and not asked:
                threading.Thread(target=ask).start()
                _wait_for_commands(service, 1)
            return run(groups)

        with monkeypatch.context() as patch:
            patch.setattr(engine.executor, "run", failing)
            with pytest.raises(RuntimeError, match="no such step"):
                service.append(session, tiny_engine.random_ids(3, 12)).result(WAIT_S)
            with service._changed:
                assert service._changed.wait_for(lambda: asked, WAIT_S)
            answer = asked[0].result(WAIT_S)
            assert second[0].result(WAIT_S) == 2
        context = {1: before, 2: record.token_ids}[answer.version]
        assert answer.context_len == len(context)
        service.close_session(session)


def test_a_refused_close_leaves_what_waits_alone(service):
    session, before = _changed_in_many_steps(service)
    with tiny_service.held_behind_a_step(service) as ran:
        first = service.append(session, tiny_engine.random_ids(3, 40))
        assert ran.wait(WAIT_S)
        calls = [
            lambda: second.append(service.append(session, [5])),
            lambda: service.close_session(session),
        ]
        second, failures = [], []
        for count, call in enumerate(calls, 1):
            threading.Thread(target=_catching, args=(call, failures)).start()
            _wait_for_commands(service, count)
    assert (first.result(WAIT_S), second[0].result(WAIT_S)) == (2, 3)
    [failure] = failures
    assert isinstance(failure, SessionError) and "is being computed" in str(failure)
    service.close_session(session)


def test_a_restore_without_room_cancels_nothing(service, tmp_path, monkeypatch):
    session, _ = _changed_in_many_steps(service)
    service.snapshot(session, tmp_path / "one", fingerprint="tiny")

    def full(*_):
        raise PoolFullError("no room")

    question = _question(1, count=20)
    with tiny_service.held_behind_a_step(service) as ran:
        answer = service.query(session, question)
        assert ran.wait(WAIT_S)
        failures = []
        put = service._engine.verbs.revival.put_cells
        monkeypatch.setattr(service._engine.verbs.revival, "put_cells", full)
        restore = functools.partial(service.restore, tmp_path / "one", fingerprint="tiny")
        restoring = threading.Thread(target=_catching, args=(restore, failures))
        restoring.start()
        _wait_for_commands(service, 1)
    restoring.join(WAIT_S)
    assert [type(one) for one in failures] == [PoolFullError]
    assert len(answer.result(WAIT_S).token_ids) == 20
    with tiny_service.held_behind_a_step(service) as ran:
        answer = service.query(session, _question(2, count=20))
        assert ran.wait(WAIT_S)
        monkeypatch.setattr(service._engine.verbs.revival, "put_cells", put)
        restoring = threading.Thread(target=restore)
        restoring.start()
        _wait_for_commands(service, 1)
    restoring.join(WAIT_S)
    with pytest.raises(CancelledError):
        answer.result(WAIT_S)
    assert service.version(session) == 2
    service.close_session(session)


def _catching(call, failures):
    try:
        call()
    except Exception as error:
        failures.append(error)


def test_callers_may_wait_while_sessions_come_and_go(service):
    sessions = [service.create() for _ in range(100)]  # takes a while to walk over
    over = threading.Event()
    failures = []

    def wait():
        try:
            while not over.is_set():
                service.wait_until_idle(WAIT_S)
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=wait) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(100):
            service.close_session(service.fork(sessions[0]))
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
        sys.setswitchinterval(interval)
    assert failures == []
    for session in sessions:
        service.close_session(session)
