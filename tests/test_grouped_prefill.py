"""Prompts with one beginning that arrive together: it is computed once, whatever ends halfway."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tiny_engine

from jaxstate.grouped_prefill import Prefill, leaders
from jaxstate.plan import JobClass, Limits
from jaxstate.scheduler import Scheduler, State

COUNT = 3


def _line(*prompts, tenants=None):
    found = []
    for job_id, ids in enumerate(prompts):
        tenant = tenants[job_id] if tenants else ""
        one = Prefill(
            job_id=job_id, tenant=tenant, token_ids=np.asarray(ids), cells=9, most=len(ids) - 1
        )
        found.append(one.beside(found))
    return found


def test_each_waits_for_the_one_before_it_that_saves_most():
    line = _line([1, 2, 3, 4], [1, 2, 5, 6, 7], [1, 2, 5, 6, 8], [9, 9])
    assert leaders(dict.fromkeys(range(4), 0), line, 1) == {1: 0, 2: 1}
    assert leaders({1: 2, 2: 2}, line, 1) == {2: 1}
    assert leaders({1: 2, 2: 4}, line, 1) == {}
    assert leaders({1: 0, 2: 0}, line[1:], 3) == {2: 1}
    assert leaders({1: 0, 2: 0}, _line([1, 2], [1, 2, 3], tenants="ab"), 1) == {}


@functools.cache
def _compiled():
    return tiny_engine.build(num_pages=64, prefix_share=0.5)


class _Prompts:
    """A scheduler, and prompts submitted to it."""

    def __init__(self, tenants=("",) * 5):
        self.engine = _compiled()
        self.now = 0.0
        self.scheduler = Scheduler(
            self.engine.executor, self.engine.pages, Limits(tokens=16, rows=4),
            prefixes=self.engine.verbs.prefixes,
        )  # fmt: skip
        shared = tiny_engine.random_ids(1, 43)
        self.prompts = [[*shared, n, *tiny_engine.random_ids(50 + n, 2 + n)] for n in range(5)]
        self.before = self.engine.executor.tokens_forwarded
        self.tickets = [
            self.scheduler.submit(
                functools.partial(
                    self.engine.verbs.stream_generate, ids, max_new_tokens=COUNT, tenant=tenant
                ),
                job_class=JobClass.QUERY, session=f"new {n}", tokens=len(ids),
                cells=len(ids) + COUNT, now=0.0, prefix=ids, tenant=tenant,
            )
            for n, (ids, tenant) in enumerate(zip(self.prompts, tenants, strict=True))
        ]  # fmt: skip

    def run(self, steps=1000):
        for _ in range(steps):
            if not self.scheduler.num_waiting:
                break
            self.now += 0.01
            self.scheduler.step(self.now)

    def check(self, most_alike):
        """Forwarded: what is shared as often as `most_alike` says, every rest and answer once."""
        done = [(t, ids) for t, ids in zip(self.tickets, self.prompts, strict=True) if t.result]
        for ticket, ids in done:
            assert ticket.state is State.DONE
            assert ticket.result.token_ids == tuple(tiny_engine.greedy(ids, COUNT))
        rest = sum(len(ids) - 43 + COUNT - 1 for _, ids in done)
        assert self.engine.executor.tokens_forwarded - self.before == 43 * most_alike + rest
        self.engine.verbs.prefixes.tree.clear()
        assert self.engine.cells_held == 0
        return len(done)


def test_the_shared_beginning_is_forwarded_once():
    prompts = _Prompts()
    prompts.run()
    assert prompts.check(1) == 5


def test_tenants_compute_their_own():
    prompts = _Prompts(tenants=("a", "b", "a", "b", "a"))
    prompts.run()
    assert prompts.check(2) == 5


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_leader_that_is_cancelled_leaves_what_it_computed(steps):
    prompts = _Prompts()
    prompts.run(steps)
    assert prompts.scheduler.cancel(prompts.tickets[0], prompts.now)
    prompts.run()
    assert prompts.check(1) == 4
