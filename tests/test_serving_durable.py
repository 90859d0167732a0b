"""Durable verbs of one session from many threads: as if one had come after the other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import random
import threading
import time

import pytest
import tiny_engine
import tiny_service

from jaxstate import needs
from jaxstate.errors import (
    CancelledError,
    CapacityError,
    ConflictError,
    SessionError,
    SessionExistsError,
    UnknownSessionError,
)
from jaxstate.flash import Question
from jaxstate.serving.journal import Journal
from jaxstate.serving.local_service import LocalService
from jaxstate.session import Session

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


@contextlib.contextmanager
def _held_within(service):
    """Hold the worker up behind the first step that begins a verb."""
    step, reached, release = service._scheduler.step, threading.Event(), threading.Event()

    def stepped(*args):
        found = step(*args)
        if service._scheduler.running:
            reached.set()
            assert release.wait(WAIT_S)
        return found

    service._scheduler.step = stepped

    def wait():
        assert reached.wait(WAIT_S)

    try:
        yield wait
    finally:
        release.set()
        service._scheduler.step = step


def test_the_id_of_a_session_that_is_being_created_is_taken(tmp_path):
    def journal():
        return Journal(tmp_path / "journal", durability="normal", fingerprint="tiny")

    prefix, row = tiny_engine.random_ids(0, 64), tiny_engine.random_ids(1, 5)
    with tiny_service.started(journal=journal()) as service:
        used = service.cells()
        service.create(row, session_id="other")
        service.append("other", row).result(WAIT_S)
        service.snapshot("other", tmp_path / "saved", fingerprint="tiny")
        others = (
            functools.partial(service.create, row, session_id="feed"),
            functools.partial(service.create, session_id="feed"),
            functools.partial(service.fork, "other", new_id="feed"),
            functools.partial(
                service.restore, tmp_path / "saved", fingerprint="tiny", session_id="feed"
            ),
        )
        with concurrent.futures.ThreadPoolExecutor(len(others)) as pool:
            with _held_within(service) as wait:
                created = service.begin_create(prefix, session_id="feed")
                wait()
                futures = [pool.submit(one) for one in others]
                with service._changed:
                    assert service._changed.wait_for(
                        lambda: len(service._commands) == len(others), WAIT_S
                    )
            for future in futures:
                with pytest.raises(SessionExistsError, match="feed exists already"):
                    future.result(WAIT_S)
        assert created.result(WAIT_S) == "feed"
        assert service.append("feed", row).result(WAIT_S) == 1
        service.close()
        held = {name: tiny_service.engine().session(name).token_ids for name in ("feed", "other")}
        for name in held:
            tiny_service.engine().close(name)
        service = LocalService(tiny_service.engine(), journal=journal())
        assert held["feed"] == [*prefix, *row]
        for name, token_ids in held.items():
            assert tiny_service.engine().session(name).token_ids == token_ids
            service.close_session(name)
        assert service.cells() == used
        service.close()


def test_the_id_of_a_session_that_did_not_come_to_be_is_free_again(service):
    with _held_within(service) as wait:
        pending = service.begin_create(tiny_engine.random_ids(0, 64), session_id="feed")
        wait()
        pending.cancel()
    with pytest.raises(CancelledError):
        pending.result(WAIT_S)
    assert service.create(tiny_engine.random_ids(1, 8), session_id="feed") == "feed"


@pytest.mark.parametrize("verb", ["append", "update"])
def test_a_change_is_not_noted_under_an_id_that_is_anothers_by_now(verb):
    with tiny_engine.left_empty(tiny_service.engine()) as engine:
        engine.create(tiny_engine.random_ids(0, 8), session_id="feed")
        before = engine.session("feed")
        other = Session(session_id="feed", owner=-1, when_full="error")

        def replaced():
            steps = getattr(engine.verbs, verb)("feed", tiny_engine.random_ids(1, 5))
            need = next(steps)
            engine.verbs.sessions["feed"] = other
            while True:
                need = steps.send((yield need))

        with pytest.raises(ConflictError, match="was closed or replaced"):
            needs.run_alone(engine.executor, replaced())
        assert (before.version, other.version) == (0, 0)
        engine.verbs.sessions["feed"] = before
