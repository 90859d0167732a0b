"""A step that fails on the device fails its own verbs; all else goes on with rebuilt cells."""

from __future__ import annotations

import functools
import time

import jax
import pytest
import tiny_engine

from jaxstate.errors import PoolLostError
from jaxstate.flash import Question
from jaxstate.serving.journal import Journal
from jaxstate.serving.local_service import LocalService
from jaxstate.serving.snapshots import Snapshots

WAIT_S = 120
FATAL = 13  # ten of these in one step break the device


@functools.cache
def _compiled():
    engine = tiny_engine.build(num_pages=64, prefix_share=0.2)
    steps = engine.executor._steps
    for shape, step in steps.items():
        steps[shape] = functools.partial(_breaking, step)
    return engine


def _breaking(step, params, pool, rows, bits):
    if (rows.token_ids == FATAL).sum() < 10:
        return step(params, pool, rows, bits)
    for array in jax.tree.leaves(pool):  # donated, and nothing came back
        array.delete()
    raise RuntimeError("the device has fallen off the bus")


def _ids(seed, count):
    return [one for one in tiny_engine.random_ids(seed, 2 * count) if one != FATAL][:count]


def _ask(service, session, count=3):
    question = Question(token_ids=tuple(_ids(90, 4)), max_new_tokens=count)
    return service.query(session, question).result(WAIT_S), list(question.token_ids)


def _start(engine, directory):
    journal = Journal(directory / "journal", durability="normal", fingerprint="tiny")
    snapshots = Snapshots(directory / "snapshots", fingerprint="tiny", idle_s=1e9)
    return LocalService(engine, journal=journal, snapshots=snapshots)


def test_sessions_are_rebuilt_from_snapshot_and_journal_and_others_wait_for_it(tmp_path):
    with tiny_engine.left_empty(_compiled()) as engine:
        service = _start(engine, tmp_path)
        slid = service.create(_ids(1, 5), when_full="slide")
        for seed in range(8):
            service.append(slid, _ids(seed, 17)).result(WAIT_S)
        service.close()
        engine.close(slid)
        service = _start(engine, tmp_path)  # its cells come from a snapshot
        service.append(slid, _ids(20, 17)).result(WAIT_S)  # which does not know this
        before, _ = _ask(service, slid)
        whole = service.create(_ids(2, 20))
        step = service._scheduler.step
        service._scheduler.step = lambda *args: (time.sleep(0.01), step(*args))[1]
        growing = service.append(whole, _ids(3, 60))
        fatal = Question(token_ids=(FATAL,) * 16, max_new_tokens=2)
        with pytest.raises(PoolLostError, match="off the bus"):
            service.query(slid, fatal).result(WAIT_S)
        assert growing.result(WAIT_S) == 1
        after, _ = _ask(service, slid)
        assert (after.token_ids, after.version, after.rebuilt) == (before.token_ids, 9, False)
        answer, question = _ask(service, whole)
        context = [*_ids(2, 20), *_ids(3, 60), *question]
        assert answer.token_ids == tuple(tiny_engine.greedy(context, 3))
        prompt = _ids(2, 20)  # what was kept of beginnings is gone
        answer = service.generate(prompt, max_new_tokens=3).result(WAIT_S)
        assert answer.token_ids == tuple(tiny_engine.greedy(prompt, 3))
        service.close()


def test_an_append_that_breaks_the_device_is_not_done_and_nothing_of_it_stays(tmp_path):
    with tiny_engine.left_empty(_compiled()) as engine:
        service = _start(engine, tmp_path)
        session = service.create(_ids(1, 20))
        number = ("feed", 1)
        with pytest.raises(PoolLostError):
            service.append(session, [FATAL] * 16, number=number).result(WAIT_S)
        assert service.version(session) == 0
        with pytest.raises(PoolLostError):  # it is tried again, being no part of anything
            service.append(session, [FATAL] * 16, number=number).result(WAIT_S)
        assert service.append(session, _ids(3, 9)).result(WAIT_S) == 1
        answer, question = _ask(service, session)
        context = [*_ids(1, 20), *_ids(3, 9), *question]
        assert answer.token_ids == tuple(tiny_engine.greedy(context, 3))
        service.close()


def test_an_engine_alone_goes_on_as_well():
    with tiny_engine.left_empty(_compiled()) as engine:
        session = engine.create(_ids(1, 20))
        other = engine.fork(session)
        with pytest.raises(PoolLostError):
            engine.append(session, [FATAL] * 16)
        for name in (session, other):
            want = tiny_engine.greedy([*_ids(1, 20), *_ids(9, 3)], 2)
            assert engine.query(name, _ids(9, 3), max_new_tokens=2).token_ids == tuple(want)


@pytest.mark.parametrize("commit", [False, True])
def test_a_stream_that_was_open_ends_with_the_pool(commit):
    with tiny_engine.left_empty(_compiled()) as engine:
        session, other = engine.create(_ids(1, 20)), engine.create(_ids(2, 20))
        stream = engine.stream(session, _ids(9, 3), max_new_tokens=6, commit=commit)
        next(stream)
        with pytest.raises(PoolLostError):
            engine.append(other, [FATAL] * 16)
        with pytest.raises(PoolLostError, match="while this was running"):
            list(stream)
        assert engine.session(session).version == 0
        want = tiny_engine.greedy([*_ids(1, 20), *_ids(9, 3)], 2)
        assert engine.query(session, _ids(9, 3), max_new_tokens=2).token_ids == tuple(want)
