"""What a service counts is what happened."""

from __future__ import annotations

import functools

import pytest
import tiny_engine

from jaxstate.answer import Source
from jaxstate.flash import Question
from jaxstate.plan import JobClass
from jaxstate.scheduler import State
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
