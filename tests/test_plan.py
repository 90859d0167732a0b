"""The pure plan of a step: who goes first, who waits, and for how long at most."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_simulator import Arrival, simulate

from jaxstate.plan import AGE_S, Job, JobClass, Limits, Piece, plan

SETTINGS = settings(max_examples=200, deadline=None, derandomize=True)
LIMITS = Limits(tokens=32, rows=4)


def _job(job_id, job_class=JobClass.QUERY, **changes):
    how = dict(session=f"s{job_id}", tokens=5, arrived=0.0) | changes
    return Job(job_id=job_id, job_class=job_class, **how)


def _pieces(step):
    return {piece.job_id: piece.tokens for piece in step.pieces}


jobs_lists = st.lists(
    st.builds(
        dict,
        job_class=st.sampled_from(JobClass),
        session=st.sampled_from("abc"),
        tokens=st.sampled_from([1, 2, 7, 30, 100]),
        at_once=st.integers(0, 3).map(lambda n: n == 0),
        started=st.booleans(),
        decodes=st.integers(0, 3).map(lambda n: n == 0),
        gave_way=st.booleans(),
        outputs=st.sampled_from([0, 1, 3]),
        pages=st.sampled_from([0, 2, 5]),
        arrived=st.sampled_from([0.0, 5.0, 9.0, 9.5]),
        deadline=st.sampled_from([math.inf, 4.0, 10.0, 11.0]),
        after=st.sets(st.integers(0, 5), max_size=1),
        exclusive=st.integers(0, 4).map(lambda n: n == 0),
    ),
    max_size=9,
)


def _jobs(drawn):
    jobs = []
    for job_id, fields in enumerate(drawn):
        fields = dict(fields)
        if fields["decodes"]:
            fields |= dict(tokens=1, outputs=1, started=True, job_class=JobClass.QUERY)
        if fields.pop("at_once"):
            fields["least"] = fields["tokens"]
        if fields["started"]:
            fields["pages"] = 0
        fields["after"] = frozenset(other for other in fields["after"] if other < job_id)
        jobs.append(Job(job_id=job_id, **fields))
    return jobs


@SETTINGS
@given(jobs_lists, st.integers(1, 6), st.integers(1, 40), st.integers(0, 8), st.randoms())
def test_any_plan_keeps_to_its_limits_and_to_the_jobs(drawn, rows, tokens, free, random):
    jobs = _jobs(drawn)
    limits = Limits(tokens=tokens, rows=rows)
    step = plan(jobs, limits, free, now=10.0)
    by_id = {job.job_id: job for job in jobs}
    assert step.tokens <= tokens or [by_id[p.job_id].least for p in step.pieces] == [step.tokens]
    finished = [by_id[piece.job_id] for piece in step.pieces if piece.last]
    assert len(step.decodes) + sum(job.outputs for job in finished) <= rows or not finished
    assert len(step.decodes) <= rows
    assert sum(by_id[piece.job_id].pages for piece in step.pieces) <= free
    assert not any(by_id[job_id].gave_way for job_id in step.gave_way)
    planned = [*step.decodes, *step.gave_way, *(piece.job_id for piece in step.pieces)]
    assert len(planned) == len(set(planned))
    assert step.pieces or not step.gave_way
    for piece in step.pieces:
        job = by_id[piece.job_id]
        assert job.least <= piece.tokens <= job.tokens
        assert piece.last == (piece.tokens == job.tokens)
        assert not job.after & set(by_id) - set(step.expired)
        assert job.started or job.deadline > 10.0
    assert set(step.expired) == {
        job.job_id for job in jobs if job.deadline <= 10.0 and not job.started
    }
    assert all(by_id[job_id].pages > 0 for job_id in step.short_of_pages)
    alive = [job for job in jobs if job.job_id not in step.expired]
    for job_id in planned:
        job = by_id[job_id]
        older = [o for o in alive if o.session == job.session and o.job_id < job_id]
        assert not any(other.exclusive for other in older) and not (job.exclusive and older)
        if job.job_class is JobClass.APPEND:
            assert not any(
                other.job_class is JobClass.APPEND and other.session == job.session
                and other.job_id < job_id and other.job_id not in step.expired
                for other in jobs
            )  # fmt: skip
    shuffled = list(jobs)
    random.shuffle(shuffled)
    assert plan(shuffled, limits, free, now=10.0) == step


@SETTINGS
@given(jobs_lists)
def test_something_runs_whenever_something_can(drawn):
    jobs = [dataclasses.replace(job, pages=0, deadline=math.inf) for job in _jobs(drawn)]
    step = plan(jobs, Limits(tokens=8, rows=4), 0, now=10.0)
    assert bool(step.tokens) == bool(jobs)


def test_running_answers_come_first_and_a_question_joins_their_step_without_appends():
    answers = [_job(n, tokens=1, decodes=True, started=True) for n in range(3)]
    append = _job(5, JobClass.APPEND, tokens=100, outputs=0)
    question = _job(9, tokens=20)
    step = plan([append, question, *answers], LIMITS, 10, now=0.1)
    assert step.decodes == (0, 1, 2)
    assert step.pieces == (Piece(job_id=9, tokens=20, last=True),)
    step = plan([append, *answers], LIMITS, 10, now=0.1)
    assert step.pieces == (Piece(job_id=5, tokens=29, last=False),)


def test_an_overdue_append_has_half_of_a_step_beside_a_question():
    question = _job(9, tokens=20, arrived=3.0)
    for changes, tokens in (
        ({"arrived": 1.4}, 16), ({"arrived": 1.6}, 0),
        ({"started": True, "ran": 2.7}, 16), ({"started": True, "ran": 2.9}, 0),
        ({"started": True, "ran": 2.7, "arrived": 1.6}, 0),
    ):  # fmt: skip
        append = _job(5, JobClass.APPEND, tokens=100, outputs=0, **changes)
        pieces = _pieces(plan([append, question], LIMITS, 10, now=3.0))
        assert pieces == ({5: tokens, 9: 16} if tokens else {9: 20})


def test_more_answers_than_rows_take_turns_and_leave_a_row_to_a_question():
    answers = [_job(n, tokens=1, decodes=True, started=True, arrived=-n) for n in range(6)]
    assert plan(answers, LIMITS, 0, now=0.1).decodes == (2, 3, 4, 5)
    step = plan([*answers, _job(9)], LIMITS, 0, now=0.1)
    assert step.decodes == (3, 4, 5)
    assert _pieces(step) == {9: 5}


def test_short_appends_of_many_sessions_are_packed_into_one_step():
    appends = [_job(n, JobClass.APPEND, outputs=0) for n in range(6)]
    assert _pieces(plan(appends, LIMITS, 0, now=0.1)) == dict.fromkeys(range(6), 5)


def test_sessions_take_turns_within_a_class():
    flood = [_job(n, session="loud", tokens=16) for n in range(5)]
    step = plan([*flood, _job(9, session="quiet", tokens=16)], LIMITS, 0, now=0.1)
    assert _pieces(step) == {0: 16, 9: 16}


def test_nearer_deadlines_go_first_and_passed_ones_are_not_run():
    jobs = [_job(0, tokens=20), _job(1, tokens=20, deadline=1.0), _job(2, deadline=0.05)]
    step = plan(jobs, LIMITS, 0, now=0.1)
    assert step.expired == (2,)
    assert _pieces(step) == {1: 20, 0: 12}


def test_what_has_started_is_finished_past_its_deadline():
    assert _pieces(plan([_job(0, deadline=0.05, started=True)], LIMITS, 0, now=0.1)) == {0: 5}


def test_idle_work_waits_until_nothing_else_does_or_it_is_overdue():
    flash = _job(0, JobClass.FLASH, tokens=50)
    append = _job(1, JobClass.APPEND, tokens=50, outputs=0, arrived=0.1)
    assert _pieces(plan([flash, append], LIMITS, 0, now=0.14)) == {1: 32}
    assert _pieces(plan([flash], LIMITS, 0, now=0.14)) == {0: 32}
    overdue = plan([flash, append], LIMITS, 0, now=0.15)
    assert _pieces(overdue) == {0: 16, 1: 16}


def test_overdue_idle_work_leaves_half_of_the_rows_to_what_is_waited_for():
    flash = [_job(n, JobClass.FLASH, tokens=2) for n in range(4)]
    asked = _job(9, tokens=3, arrived=0.9)
    assert _pieces(plan([*flash, asked], LIMITS, 0, now=1.0)) == {0: 2, 1: 2, 9: 3}
    assert _pieces(plan(flash, LIMITS, 0, now=1.0)) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_idle_work_begins_beside_answers_that_nobody_waits_for_and_beside_no_others():
    flash = _job(0, JobClass.FLASH)
    for job_class, pieces in ((JobClass.FLASH, {0: 5}), (JobClass.QUERY, {})):
        running = _job(1, job_class, tokens=1, started=True, decodes=True)
        step = plan([flash, running], LIMITS, 0, now=0.1)
        assert (step.decodes, _pieces(step)) == ((1,), pieces)


def test_idle_work_does_not_begin_where_no_row_is_left_for_its_end():
    rows = LIMITS.rows
    flash = [_job(n, JobClass.FLASH, tokens=2) for n in range(rows + 2)]
    assert list(_pieces(plan(flash, LIMITS, 0, now=0.1))) == list(range(rows))
    running = [dataclasses.replace(one, tokens=1, started=True, decodes=True) for one in flash[:2]]
    step = plan(running + flash[2:], LIMITS, 0, now=0.1)
    assert list(_pieces(step)) == list(range(2, rows))
    # More rows than there ever are: it takes what it can get.
    assert _pieces(plan([_job(0, JobClass.FLASH, outputs=rows + 1)], LIMITS, 0, now=0.1)) == {0: 4}


def test_a_job_that_waits_for_another_runs_behind_it():
    jobs = [_job(0, JobClass.APPEND), _job(1, after=frozenset({0}))]
    assert _pieces(plan(jobs, LIMITS, 0, now=0.1)) == {0: 5}
    assert _pieces(plan(jobs[1:], LIMITS, 0, now=0.1)) == {1: 5}


def test_an_exclusive_job_runs_behind_what_came_before_it_and_before_what_came_later():
    jobs = [
        _job(0, session="s"), _job(1, JobClass.APPEND, session="s", exclusive=True),
        _job(2, session="s"), _job(3, session="t"),
    ]  # fmt: skip
    assert set(_pieces(plan(jobs, LIMITS, 0, now=0.1))) == {0, 3}
    assert set(_pieces(plan(jobs[1:3], LIMITS, 0, now=0.1))) == {1}
    assert set(_pieces(plan(jobs[2:], LIMITS, 0, now=0.1))) == {2, 3}


@pytest.mark.parametrize("job_class", [JobClass.FLASH, JobClass.ADVANCE, JobClass.MAINTENANCE])
def test_what_an_exclusive_job_waits_for_is_as_urgent_as_it_is(job_class):
    answers = _answers(2)
    idle = _job(5, job_class, session="s", tokens=3, arrived=2.9)
    for urgent in (JobClass.QUERY, JobClass.APPEND):
        write = _job(6, urgent, session="s", exclusive=True, arrived=2.95)
        other = _job(7, JobClass.APPEND, session="t", outputs=0, arrived=2.8)
        assert _pieces(plan([*answers, idle, other], LIMITS, 0, now=3.0)) == {7: 5}
        jobs = [*answers, idle, write, other]
        first = {5: 3} if urgent is JobClass.QUERY else {7: 5, 5: 3}
        assert _pieces(plan(jobs, LIMITS, 0, now=3.0)) == first


def test_what_an_exclusive_job_waits_for_is_overdue_when_the_first_of_both_is():
    write = _job(6, JobClass.APPEND, session="s", exclusive=True, arrived=3.0)
    question = _job(8, tokens=20, arrived=4.4)
    for job_class, now, is_overdue in (
        (JobClass.ADVANCE, 4.45, False), (JobClass.ADVANCE, 4.55, True),
        (JobClass.FLASH, 4.45, True),
    ):  # fmt: skip
        idle = _job(5, job_class, session="s", tokens=3, arrived=2.9)
        pieces = _pieces(plan([idle, write, question], LIMITS, 0, now=now))
        assert pieces == ({5: 3, 8: 20} if is_overdue else {8: 20})


def test_what_an_exclusive_job_waits_for_keeps_no_append_from_running():
    jobs = [
        _job(0, JobClass.ADVANCE, session="s", tokens=3), _job(1, JobClass.ADVANCE, session="s"),
        _job(2, JobClass.APPEND, session="s", tokens=4, outputs=0),
        _job(3, JobClass.APPEND, session="s", exclusive=True, outputs=0),
    ]  # fmt: skip
    assert _pieces(plan(jobs, LIMITS, 0, now=0.1)) == {0: 3, 1: 5, 2: 4}


def test_small_ones_pass_a_job_short_of_pages_until_it_is_overdue():
    large, small = _job(0, pages=8), _job(1, pages=2, arrived=0.2)
    step = plan([large, small], LIMITS, 4, now=0.25)
    assert (_pieces(step), step.short_of_pages) == ({1: 5}, (0,))
    step = plan([large, small], LIMITS, 4, now=0.3)
    assert (_pieces(step), step.short_of_pages) == ({}, (0, 1))


def test_a_job_with_more_outputs_than_rows_are_left_runs_but_for_its_last_token():
    jobs = [_job(0, outputs=3), _job(1, outputs=3)]
    assert plan(jobs, LIMITS, 0, now=0.1).pieces == (
        Piece(job_id=0, tokens=5, last=True), Piece(job_id=1, tokens=4, last=False),
    )  # fmt: skip


def _answers(count, **changes):
    how = dict(tokens=1, decodes=True, started=True, arrived=2.9, ran=2.9) | changes
    return [_job(n, **how) for n in range(count)]


def test_overdue_choices_have_all_their_rows_in_a_step_and_answers_the_next_one():
    limits = Limits(tokens=32, rows=8)
    part = dict(tokens=8, least=8, outputs=8, started=True)
    fresh, overdue = (_job(9, arrived=at, **part) for at in (2.8, 2.0))
    for answers in (_answers(1), _answers(7)):
        everybody = tuple(job.job_id for job in answers)
        assert plan([*answers, fresh], limits, 0, now=3.0).decodes == everybody
        step = plan([*answers, overdue], limits, 0, now=3.0)
        assert (step.decodes, step.gave_way) == ((), everybody)
        assert step.pieces == (Piece(job_id=9, tokens=8, last=True),)
        answers = [dataclasses.replace(job, gave_way=True) for job in answers]
        step = plan([*answers, overdue], limits, 0, now=3.0)
        assert (step.decodes, step.gave_way, step.pieces) == (everybody, (), ())
    # What ran of late is not overdue again so soon, and fewer rows cost fewer answers.
    rested = dataclasses.replace(overdue, ran=2.95)
    assert not plan([*_answers(7), rested], limits, 0, now=3.0).gave_way
    small = _job(9, tokens=3, least=3, outputs=3, started=True, arrived=2.0)
    step = plan([*_answers(7), small], limits, 0, now=3.0)
    assert (len(step.decodes), step.gave_way, _pieces(step)) == (5, (5, 6), {9: 3})


def test_what_takes_more_tokens_at_once_than_a_step_holds_has_a_step_of_its_own():
    limits = Limits(tokens=4, rows=4)
    for job_class in JobClass:
        whole = _job(9, job_class, tokens=6, least=6, outputs=3, arrived=2.99)
        step = plan([whole], limits, 0, now=3.0)
        assert step.pieces == (Piece(job_id=9, tokens=6, last=True),)
        assert plan([*_answers(2), whole], limits, 0, now=3.0).decodes == (0, 1)
        overdue = dataclasses.replace(whole, arrived=-300.0)
        question = _job(8, arrived=2.99)
        step = plan([*_answers(2), question, overdue], limits, 0, now=3.0)
        assert (step.decodes, step.gave_way, _pieces(step)) == ((), (0, 1), {9: 6})


@pytest.mark.parametrize("job_class", JobClass)
def test_no_class_waits_for_ever_for_a_row_or_a_token_beside_answers(job_class):
    outputs = 0 if job_class is JobClass.APPEND else 1
    for limits, tokens in ((Limits(tokens=32, rows=4), 1), (Limits(tokens=4, rows=4), 5)):
        how = dict(tokens=tokens, outputs=outputs, started=True, arrived=-300.0, ran=-300.0)
        job = _job(9, job_class, **how)
        step = plan([*_answers(6), job], limits, 0, now=3.0)
        assert _pieces(step) == {9: 1} and len(step.decodes) >= 3


def test_many_choices_keep_neither_answers_nor_questions_from_going_on():
    limits, now, step_s = Limits(tokens=64, rows=8), 0.0, 0.02
    jobs = {job.job_id: job for job in _answers(7, arrived=0.0)}
    asked, waits, parts, tokens = 100, [], {}, dict.fromkeys(jobs, 0)
    for turn in range(600):
        if turn % 8 == 0:  # more of them than there are steps for
            parts[asked] = 5
            jobs[asked] = _job(asked, tokens=9, least=9, outputs=8, started=True, arrived=now,
                               ran=now)  # fmt: skip
            asked += 1
        if turn % 20 == 0:
            jobs[asked] = _job(asked, tokens=20, arrived=now)
            asked += 1
        step = plan(list(jobs.values()), limits, 0, now)
        now += step_s
        for job_id in step.gave_way:
            jobs[job_id] = dataclasses.replace(jobs[job_id], gave_way=True)
        for job_id in step.decodes:
            tokens[job_id] += 1
            jobs[job_id] = dataclasses.replace(jobs[job_id], gave_way=False, arrived=now)
        for piece in step.pieces:
            job = jobs[piece.job_id]
            if parts.get(piece.job_id, 0) > 1:
                parts[piece.job_id] -= 1
                jobs[piece.job_id] = dataclasses.replace(job, ran=now)
            elif piece.last:
                if piece.job_id not in parts:
                    waits.append(now - job.arrived)
                del jobs[piece.job_id]
            else:
                left = job.tokens - piece.tokens
                jobs[piece.job_id] = dataclasses.replace(job, tokens=left, started=True, ran=now)
    assert min(tokens.values()) >= 600 / 2  # half of the steps at least
    assert len(waits) == 30 and max(waits) <= AGE_S[JobClass.QUERY]
    assert sum(5 - left for left in parts.values()) >= 600 / 2 * 0.8


@pytest.mark.parametrize("changes", [dict(tokens=0), dict(rows=0), dict(age_s={})])
def test_limits_that_make_no_sense_are_refused(changes):
    with pytest.raises(ValueError, match="expected"):
        Limits(**dict(tokens=32, rows=4) | changes)


# Recorded arrivals


def _poisson(rng, rate, until):
    return np.cumsum(rng.exponential(1 / rate, int(2 * rate * until) + 20)).tolist()


def _mixed(seed, *, share, until=60.0):
    """A minute of appends, questions and Flash evaluations that fill a share of the time.

    A token costs 1 ms and a step 4 ms.
    """
    rng = np.random.default_rng(seed)
    arrivals = []
    for job_class, tokens, answer, part in (
        (JobClass.APPEND, (5, 60), 0, 0.4),
        (JobClass.QUERY, (8, 30), 4, 0.4),
        (JobClass.FLASH, (20, 40), 4, 0.15),
        (JobClass.ADVANCE, (10, 20), 1, 0.05),
    ):
        cost = 0.001 * (np.mean(tokens) + answer) + 0.004 * (1 + answer)
        for at in _poisson(rng, part * share / cost, until):
            if at < until:
                arrivals.append(
                    Arrival(
                        at=at, job_class=job_class, session=f"s{rng.integers(16)}",
                        tokens=int(rng.integers(*tokens)), answer_tokens=answer,
                    )
                )  # fmt: skip
    return sorted(arrivals, key=lambda arrival: arrival.at)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_waits_past_its_limit_at_four_fifths_of_the_capacity(seed):
    arrivals = _mixed(seed, share=0.8)
    record = simulate(arrivals, Limits(tokens=64, rows=8))
    for arrival, outcome in zip(arrivals, record.outcomes, strict=True):
        assert outcome.ended is not None
        assert outcome.started <= AGE_S[arrival.job_class]
    queries = np.asarray(record.sojourns(arrivals)[JobClass.QUERY])
    assert np.percentile(queries, 99) <= 8 * np.median(queries)


def test_a_question_starts_in_the_step_after_it_came_whatever_else_waits():
    rng = np.random.default_rng(0)
    appends = [
        Arrival(at=0.0, job_class=JobClass.APPEND, session=f"s{n}", tokens=4000) for n in range(4)
    ]
    asked = [
        Arrival(at=at, job_class=JobClass.QUERY, session="q", tokens=20, answer_tokens=4)
        for at in np.sort(rng.uniform(0, 0.9, 12)).tolist()
    ]
    arrivals = [*appends, *asked]
    limits = Limits(tokens=64, rows=8, age_s={**AGE_S, JobClass.APPEND: 1e9})
    record = simulate(arrivals, limits)
    longest_step = 0.004 + 0.064
    for outcome in record.outcomes[len(appends) :]:
        assert outcome.started <= longest_step + 1e-9
    for _, step, _ in record.steps:
        kinds = {arrivals[piece.job_id].job_class for piece in step.pieces}
        assert len(kinds) <= 1  # a question's own step holds no appends


def test_overdue_appends_go_on_under_a_flood_of_questions():
    flood = [
        Arrival(at=0.02 * n, job_class=JobClass.QUERY, session=f"s{n % 9}", tokens=30,
                answer_tokens=2)
        for n in range(500)
    ]  # fmt: skip
    append = Arrival(at=0.0, job_class=JobClass.APPEND, session="feed", tokens=200)
    arrivals = [append, *flood]
    outcome = simulate(arrivals, Limits(tokens=32, rows=4)).outcomes[0]
    # Half of a step, every tenth of its limit.
    assert outcome.ended <= AGE_S[JobClass.APPEND] * (1 + 0.1 * 200 / 16) + 1.0


def test_ended_requests_give_all_pages_back():
    rng = np.random.default_rng(1)
    arrivals = [
        Arrival(at=float(at), job_class=JobClass.QUERY, session=f"s{n}", tokens=10,
                answer_tokens=3, pages=int(rng.integers(1, 6)), deadline_s=0.3)
        for n, at in enumerate(np.sort(rng.uniform(0, 0.4, 60)))
    ]  # fmt: skip
    record = simulate(arrivals, LIMITS, pages=8)
    for _, step, jobs in record.steps:
        assert all(job.pages <= 8 for job in jobs) and step.tokens <= LIMITS.tokens
    ended = [outcome for outcome in record.outcomes if outcome.ended is not None]
    expired = [outcome for outcome in record.outcomes if outcome.expired]
    assert ended and expired and len(ended) + len(expired) == len(arrivals)
    assert all(outcome.started < 0.3 for outcome in ended)
