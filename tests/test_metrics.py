"""What a service counts is what happened."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import pytest
import tiny_engine

from jaxstate.answer import Source
from jaxstate.flash import Question
from jaxstate.metrics import Cells, count_cells
from jaxstate.plan import JobClass
from jaxstate.scheduler import State
from jaxstate.serving import compilations
from jaxstate.serving.compilations import Compilations
from jaxstate.serving.local_service import LocalService

WAIT_S = 60
SHARED = tiny_engine.random_ids(1, 30)


@functools.cache
def _compiled():
    return tiny_engine.build(num_pages=96, prefix_share=0.5)


def _question(seed, count):
    return Question(token_ids=tuple(tiny_engine.random_ids(seed, 5)), max_new_tokens=count)


def test_verbs_tokens_and_answers_are_counted_by_class_and_source():
    engine = _compiled()
    service = LocalService(engine, preposition=0)
    forwarded = engine.executor.tokens_forwarded
    session = service.create(tiny_engine.random_ids(2, 10))
    service.append(session, tiny_engine.random_ids(3, 7)).result(WAIT_S)
    service.register(session, _question(4, 3))
    service.wait_until_idle(WAIT_S)
    for _ in range(5):
        service.query(session, _question(4, 3)).result(WAIT_S)
    service.query(session, _question(5, 2)).result(WAIT_S)
    service.query(session, _question(4, 4)).result(WAIT_S)  # behind what was evaluated
    service.close()
    metrics = service.metrics
    by_class = metrics.by_class
    assert by_class[JobClass.APPEND].tokens == 17
    assert by_class[JobClass.FLASH].tokens == 5 + 2
    assert by_class[JobClass.QUERY].tokens == (5 + 1) + 1
    counted = sum(figures.tokens for figures in by_class.values())
    assert counted == engine.executor.tokens_forwarded - forwarded
    assert by_class[JobClass.QUERY].ended == {State.DONE: 2}
    assert len(by_class[JobClass.QUERY].service_s) == 2
    assert all(wait >= 0 for wait in by_class[JobClass.QUERY].wait_s)
    asked = by_class[JobClass.QUERY]
    assert asked.longest_s == max(asked.sojourn_s) >= max(asked.service_s)
    whole = [wait + took for wait, took in zip(asked.wait_s, asked.service_s, strict=True)]
    assert list(asked.sojourn_s) == pytest.approx(whole)
    # Every class is served within steps.
    assert len(metrics.step_s) >= 5
    assert metrics.busy_s == pytest.approx(sum(metrics.step_s))
    assert metrics.busy_s >= max(max(one.service_s, default=0) for one in by_class.values())
    assert metrics.answers == {Source.FLASH: 5, Source.COMPUTED: 1, Source.RESUMED: 1}
    assert (metrics.entries_used, metrics.stale_answers) == (1, 0)
    engine.close(session)


def test_prompts_of_a_service_share_what_is_computed_and_tenants_do_not():
    engine = _compiled()
    service = LocalService(engine)
    prompts = [[*SHARED, n, n + 1] for n in range(4)]

    def ask(tenant):
        pending = [service.generate(ids, max_new_tokens=2, tenant=tenant) for ids in prompts]
        return [one.result(WAIT_S) for one in pending]

    for tenant in ("one", "other"):
        before = engine.executor.tokens_forwarded
        for answer, ids in zip(ask(tenant), prompts, strict=True):
            assert answer.token_ids == tuple(tiny_engine.greedy(ids, 2))
        # Two tokens of each prompt are its own, and one of each answer.
        assert engine.executor.tokens_forwarded - before == len(SHARED) + 4 * 3
    again = service.generate(prompts[0], max_new_tokens=2, tenant="other").result(WAIT_S)
    assert again.cached_tokens == len(prompts[0]) - 1
    tokens = [one.token_id for one in service.generate(prompts[1], max_new_tokens=3)]
    assert tokens == tiny_engine.greedy(prompts[1], 3)
    service.close()
    engine.verbs.prefixes.tree.clear()
    assert engine.cells_held == 0


def test_every_page_is_counted_once_with_whoever_holds_it(tmp_path):
    """Pages of 8 cells, expected numbers from the lengths alone."""
    engine = tiny_engine.build(
        num_pages=40, prefix_share=0.5, host_bytes=10**9, swap_dir=str(tmp_path),
        step_shapes=tiny_engine.SHAPES[-1:],
    )  # fmt: skip
    ids = tiny_engine.random_ids
    kept = engine.create(ids(1, 40))
    engine.close(kept)
    long, short, host, disk, back = (
        engine.create(ids(seed, count))
        for seed, count in ((2, 20), (3, 9), (4, 17), (5, 8), (9, 30))
    )
    engine.fork(long)
    engine.advance(long, ids(6, 5))
    engine.move_out(host, "host")
    engine.move_out(disk, "disk")
    engine.move_out(back, "host")
    engine.advance(back, ids(6, 1))
    before = count_cells(engine.verbs)
    pages = Cells(
        sessions=3 + 2 + 4, prefixes=5, tails=1 + 1, free=40 - 16, host=3, disk=1, copies=4
    )
    assert before == Cells(**{name: 8 * count for name, count in vars(pages).items()})
    answer = engine.stream(short, ids(7, 9), max_new_tokens=3)
    next(answer)
    during = count_cells(engine.verbs)
    assert (during.tails, during.free) == (before.tails + 16, before.free - 16)
    answer.close()
    assert count_cells(engine.verbs) == before
    # A kept beginning that a session sees is the session's: all but a last token that it forwards.
    again = engine.create(ids(1, 40) + [1])
    shared = count_cells(engine.verbs)
    assert shared.sessions == before.sessions + 48 and shared.prefixes == 0
    engine.close(again)
    for session in engine.session_ids:
        engine.close(session)
    engine.verbs.prefixes.tree.clear()
    assert count_cells(engine.verbs) == Cells(
        sessions=0, prefixes=0, tails=0, free=320, host=0, disk=0, copies=0
    )


def test_a_service_counts_its_cells_between_steps():
    engine = _compiled()
    with tiny_engine.left_empty(engine):
        service = LocalService(engine, preposition=0)
        session = service.create(tiny_engine.random_ids(8, 25))
        service.register(session, _question(9, 3))
        service.wait_until_idle(WAIT_S)
        found = service.cells()
        # Of the evaluation's five and two tokens a page is kept.
        assert (found.sessions, found.tails, found.free) == (32, 8, 96 * 8 - 40)
        service.close()


def test_what_the_worker_compiles_is_counted_and_nothing_else():
    engine = _compiled()
    with tiny_engine.left_empty(engine):
        service = LocalService(engine)
        session = service.create(tiny_engine.random_ids(10, 12))
        service.register(session, _question(11, 2))
        service.query(session, _question(12, 2)).result(WAIT_S)
        jax.jit(lambda x: x + 3)(jnp.arange(5))
        service.wait_until_idle(WAIT_S)
        service.append(session, [1]).result(WAIT_S)
        service.wait_until_idle(WAIT_S)
        assert service.metrics.compilations == 0
        three = jnp.arange(3)
        service._call(lambda: jax.jit(lambda x: x * 5)(three))
        service.append(session, [2]).result(WAIT_S)
        service.wait_until_idle(WAIT_S)
        assert service.metrics.compilations == 1
        service.close()


def test_where_jax_does_not_tell_the_count_is_unknown_instead_of_zero(monkeypatch):
    monkeypatch.setattr(compilations, "_EVENT", "/jax/of/another/version")
    with Compilations() as found:
        assert found.count is None


def test_a_thread_counts_while_it_is_in_it_only():
    with Compilations() as found:
        thread = threading.Thread(target=lambda: jax.jit(lambda x: x - 7)(1.0))
        thread.start()
        thread.join()
        assert found.count == 0
        jax.jit(lambda x: x - 8)(jnp.ones(3))
        assert (counted := found.count) is not None and counted >= 1
    jax.jit(lambda x: x - 9)(jnp.ones(3))
    assert found.count == counted
