"""A service in idle time: entries paid for ahead, and gates that answer at a measured risk."""

from __future__ import annotations

import pytest
import tiny_engine
import tiny_service

from jaxstate.answer import Source
from jaxstate.errors import CapacityError, InputError
from jaxstate.flash import Question
from jaxstate.plan import JobClass
from jaxstate.prepositioning import Entry
from jaxstate.sampling import Sampling

WAIT_S = 60
CONTEXT = tiny_engine.random_ids(1, 8)


@pytest.fixture
def service():
    with tiny_service.started() as service:
        yield service


def _ids(seed, count=6):
    return tuple(tiny_engine.random_ids(seed, count))


def _ask(service, session, question, **how):
    return service.query(session, question, **how).result(WAIT_S)


def test_a_registered_question_drawn_otherwise_resumes_behind_it(service):
    session = service.create(CONTEXT)
    question = Question(token_ids=_ids(2), max_new_tokens=4)
    service.register(session, question)
    service.wait_until_idle(WAIT_S)
    sampling = Sampling(temperature=1.0, seed=3)
    drawn = Question(token_ids=_ids(2), max_new_tokens=4, sampling=sampling)
    resumed = _ask(service, session, drawn)
    assert (resumed.source, resumed.tokens_forwarded) == (Source.RESUMED, 3)
    other = service.create(CONTEXT)
    computed = _ask(service, other, drawn)
    assert computed.source is Source.COMPUTED and computed.token_ids == resumed.token_ids
    # A longer greedy answer goes on where the kept one ended.
    longer = _ask(service, session, Question(token_ids=_ids(2), max_new_tokens=6))
    assert (longer.source, longer.tokens_forwarded) == (Source.RESUMED, 2)
    want = tiny_engine.greedy([*CONTEXT, *_ids(2)], 6)
    assert longer.token_ids == tuple(want)


def test_a_session_has_so_many_declared_headers_and_no_more():
    with tiny_service.started(max_headers=2) as service:
        session = service.create(CONTEXT)
        for seed in (1, 2):
            service.declare(session, Entry(token_ids=_ids(seed)))
        with pytest.raises(
            CapacityError, match="declared headers: expected at most 2 .*, got 2 and 1"
        ):
            service.declare(session, Entry(token_ids=_ids(3)))
        service.declare(session, Entry(token_ids=_ids(2), max_new_tokens=2))  # is there already
        service.declare(service.create(CONTEXT), Entry(token_ids=_ids(3)))


def test_headers_of_one_session_are_in_nobodys_way():
    with tiny_service.started(max_waiting=4) as service:
        session, other = service.create(CONTEXT), service.create(CONTEXT, tenant="bob")
        for seed in range(8):
            service.declare(session, Entry(token_ids=_ids(seed), max_new_tokens=30))
        service.append(session, _ids(9)).result(WAIT_S)
        with service._changed:
            assert service._changed.wait_for(lambda: len(service._questions.advancing) > 4, WAIT_S)
        assert service.advance(other, Entry(token_ids=_ids(3))).result(WAIT_S).token_ids


def test_a_declared_header_is_decoded_ahead_after_every_change(service):
    session = service.create(CONTEXT)
    header = _ids(4)
    service.declare(session, Entry(token_ids=header, max_new_tokens=3))
    service.wait_until_idle(WAIT_S)
    steps = service._engine.executor.steps
    answer = _ask(service, session, Question(token_ids=header, max_new_tokens=4))
    assert (answer.source, answer.tokens_forwarded) == (Source.RESUMED, 0)
    assert service._engine.executor.steps == steps
    assert answer.token_ids == tuple(tiny_engine.greedy([*CONTEXT, *header], 4))
    new = tiny_engine.random_ids(5, 3)
    service.append(session, new).result(WAIT_S)
    service.wait_until_idle(WAIT_S)
    behind = _ask(service, session, Question(token_ids=(*header, 7), max_new_tokens=2))
    assert behind.source is Source.RESUMED and behind.tokens_forwarded == 2
    want = tiny_engine.greedy([*CONTEXT, *new, *header, 7], 2)
    assert (behind.token_ids, behind.version) == (tuple(want), 1)


def test_questions_that_come_again_are_paid_for_before_they_come(service):
    session = service.create(CONTEXT)
    question = Question(token_ids=_ids(6), max_new_tokens=1)
    for _ in range(2):
        assert _ask(service, session, question).source is not Source.FLASH
    service.append(session, tiny_engine.random_ids(7, 2)).result(WAIT_S)
    service.wait_until_idle(WAIT_S)
    answer = _ask(service, session, question)
    assert (answer.source, answer.tokens_forwarded, answer.version) == (Source.RESUMED, 0, 1)
    assert service.metrics.entries_used >= 1
    assert service.metrics.by_class[JobClass.ADVANCE].tokens == 2 * len(question.token_ids)


def test_an_entry_that_does_not_fit_is_left_and_the_service_stays_idle(service):
    session = service.create(CONTEXT)
    service.declare(session, Entry(token_ids=_ids(8), max_new_tokens=120))
    service.wait_until_idle(WAIT_S)
    assert _ask(service, session, Question(token_ids=_ids(8), max_new_tokens=1)).token_ids


@pytest.mark.parametrize(
    "error, pattern, how",
    [
        (InputError, "header: expected token ids", dict(token_ids=(-1,))),
        (InputError, "header: expected at least one", dict(token_ids=())),
        (InputError, "max_new_tokens: expected at least 0", dict(max_new_tokens=-1)),
        (InputError, "eos_ids: expected ids in 0 … 96, got 97", dict(eos_ids=(97,))),
        (InputError, "slot_ids: expected ids in 0 … 96, got 97", dict(slot_ids=(97,))),
        (CapacityError, "exceed the model's 128 positions", dict(max_new_tokens=127)),
    ],
)
def test_what_no_session_can_pay_for_is_not_declared(service, error, pattern, how):
    session = service.create()
    entry = Entry(**(dict(token_ids=(1, 2)) | how))
    with pytest.raises(error, match=pattern):
        service.declare(session, entry)
    assert service._sessions[session].prepositions.declared == []
    with pytest.raises(error):  # as if it were paid for now
        service.advance(session, entry).result(WAIT_S)


def test_a_gate_answers_from_an_older_version_only_at_a_risk_it_has_measured(service, monkeypatch):
    session = service.create(CONTEXT, when_full="slide")
    question = Question(token_ids=tuple(tiny_engine.random_ids(0, 5)), choices=((1,), (2,)))
    query = service.register(session, question)

    def append(version):
        service.append(session, tiny_engine.random_ids(100 + version, 3)).result(WAIT_S)

    for version in range(700):
        append(version)
        service.wait_until_idle(WAIT_S)
    assert len(query.stale.samples) == 700
    # As if it had no idle time.
    monkeypatch.setattr(service._after_steps, "evaluate", lambda changing: None)
    append(700)
    stale = _ask(service, session, question, stale="serve")
    assert (stale.source, stale.version, stale.age) == (Source.FLASH, 700, 1)
    gated = _ask(service, session, question, risk=0.3)
    assert (gated.source, gated.version, gated.age) == (Source.GATED, 700, 1)
    assert (gated.choice, gated.tokens_forwarded) == (stale.choice, 0)
    said = gated.evidence
    assert said is not None and said.gap > said.tau and said.bound <= said.risk == 0.3
    assert query.fires == 1
    # Without a risk, or at one that was not shown, the answer is the full one.
    for version, risk in ((701, 0.01), (702, None)):
        full = _ask(service, session, question, risk=risk)
        assert (full.version, full.evidence) == (version, None)
        assert full.source in (Source.COMPUTED, Source.RESUMED)
        append(version)
    with pytest.raises(InputError, match="risk"):
        service.query(session, question, risk=0.9)


def test_first_tokens_and_headers_are_compared_with_fresh_answers(service):
    session = service.create(CONTEXT)
    header = _ids(9)
    choices = ((1, 2), (3, 4))
    query = service.register(session, Question(token_ids=_ids(10), choices=choices))
    service.wait_until_idle(WAIT_S)  # else the header might lead somewhere before the first answer
    service.declare(session, Entry(token_ids=header))
    service.wait_until_idle(WAIT_S)
    for version in range(20):
        service.append(session, tiny_engine.random_ids(version, 2)).result(WAIT_S)
        service.wait_until_idle(WAIT_S)
    assert len(query.first.samples) >= 20
    assert {one.stale_version == one.version for one in query.first.samples} == {True}
    [gate] = query.headers.values()
    assert len(gate.samples) >= 19
    assert all(one.version - one.stale_version == 1 for one in gate.samples)
    # A gate without enough samples does not fire, whatever may answer.
    answer = _ask(service, session, query.question, risk=0.3, entry="header")
    assert answer.source is Source.FLASH and answer.age == 0
