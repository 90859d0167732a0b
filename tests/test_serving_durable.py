"""Durable verbs of one session from many threads: as if one had come after the other."""

from __future__ import annotations

import concurrent.futures
import random
import time

import pytest
import tiny_engine
import tiny_service

from jaxstate.errors import (
    CancelledError,
    CapacityError,
    ConflictError,
    SessionError,
    UnknownSessionError,
)
from jaxstate.flash import Question

WAIT_S = 60


@pytest.fixture
def service():
    with tiny_service.started() as service:
        yield service


def _question(seed, count=3):
    return Question(token_ids=tuple(tiny_engine.random_ids(seed, 3)), max_new_tokens=count)


def _greedy(context, question):
    return tuple(tiny_engine.greedy([*context, *question.token_ids], question.max_new_tokens))


def test_verbs_of_many_threads_are_as_if_one_had_come_after_the_other(service):
    frozen = tiny_engine.random_ids(0, 8)
    session = service.create(frozen)

    def verb(n):
        """Run one; returns its version, what it was, and its tokens or answer."""
        rng = random.Random(n)
        kind = rng.choice(("append", "update", "rollback", "commit", "query", "query"))
        ids = tiny_engine.random_ids(n % 3, rng.randint(10, 36))  # of several steps, some alike
        try:
            if kind == "append":
                return service.append(session, ids[:20]).result(WAIT_S), kind, ids[:20]
            if kind == "update":
                return service.update(session, ids).result(WAIT_S), kind, ids
            if kind == "rollback":
                return service.rollback(session, 9).result(WAIT_S), kind, 9
            question = _question(n, 8)
            answer = service.query(session, question, commit=kind == "commit").result(WAIT_S)
            return answer.version + (kind == "commit"), kind, (question, answer)
        except CapacityError:
            return None  # full
        except ConflictError as error:
            assert "another turn" in str(error)
        except SessionError as error:
            assert "cannot roll back" in str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        done = [one for one in pool.map(verb, range(90), timeout=WAIT_S) if one]
    streams: list[list[int]] = [[]]
    changes = [one for one in done if one[1] != "query"]
    for version, kind, what in sorted(changes, key=lambda one: one[0]):
        assert version == len(streams)
        before = streams[-1]
        if kind == "append":
            streams.append(before + what)
        elif kind == "update":
            streams.append(list(what))
        elif kind == "rollback":
            streams.append(before[:-what])
        else:
            question, answer = what
            streams.append([*before, *question.token_ids, *answer.token_ids])
    assert tiny_service.engine().session(session).token_ids == [*frozen, *streams[-1]]
    for _, kind, what in done:
        if kind in ("query", "commit"):
            question, answer = what
            assert answer.token_ids == _greedy([*frozen, *streams[answer.version]], question)
    kinds = {kind for _, kind, _ in done}
    assert kinds == {"append", "update", "rollback", "commit", "query"}


def test_registered_questions_are_answered_again_after_every_durable_verb(service):
    frozen = tiny_engine.random_ids(0, 8)
    session = service.create(frozen)
    service.register(session, _question(1))
    stream = tiny_engine.random_ids(2, 6)
    verbs = (
        (lambda: service.update(session, stream), stream),
        (lambda: service.rollback(session, 2), stream[:4]),
    )
    for version, (verb, expected) in enumerate(verbs, 1):
        assert verb().result(WAIT_S) == version
        answer = service.query(session, _question(1), stale="wait").result(WAIT_S)
        assert answer.version == version
        assert answer.token_ids == _greedy([*frozen, *expected], _question(1))


def test_an_append_behind_one_that_failed_is_not_run(service):
    session = service.create(tiny_engine.random_ids(0, 8))
    tokens = tiny_service.engine().config.context_len
    too_long = service.append(session, [1] * tokens)
    behind = service.append(session, [1], behind=too_long)
    with pytest.raises(CancelledError, match="was not done"):
        behind.result(WAIT_S)
    assert service.append(session, [1]).result(WAIT_S) == 1


def test_a_session_that_is_cancelled_before_it_is_open_is_none(service):
    step = service._scheduler.step
    service._scheduler.step = lambda *args: time.sleep(0.05) or step(*args)
    pending = service.begin_create(tiny_engine.random_ids(0, 64), session_id="s")
    pending.cancel()
    with pytest.raises(CancelledError):
        pending.result(WAIT_S)
    with pytest.raises(UnknownSessionError, match="s is unknown"):
        service.version("s")
    assert service.create(session_id="s") == "s"
