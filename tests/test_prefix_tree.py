"""Beginnings that are shared: what matches, who may have it, and that nothing is left behind."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tiny_engine

from jaxstate import pages as pages_module
from jaxstate.errors import CapacityError
from jaxstate.pages import Pages
from jaxstate.prefix_tree import PrefixTree

SIZE = 4


class _Kept:
    """Beginnings with pages of their own, put into a tree, and what a plain list says of them."""

    def __init__(self, max_pages=100):
        self.pages = Pages(200, SIZE)
        self.tree = PrefixTree(self.pages, max_pages)
        self.all: list[tuple[str, list[int]]] = []

    def keep(self, tenant, token_ids):
        growth = pages_module.plan_growth(
            self.pages, object(), (), 0, np.zeros(len(token_ids), np.int32), growing=True
        )
        self.pages.hold(growth.entries)
        self.tree.keep(tenant, np.asarray(token_ids, np.int32), growth.entries)
        self.pages.drop(growth.entries)
        self.all.append((tenant, token_ids))

    def match(self, tenant, token_ids):
        return self.tree.match(tenant, np.asarray(token_ids, np.int32))

    def longest(self, tenant, token_ids):
        return max((_common(kept, token_ids) for of, kept in self.all if of == tenant), default=0)


def _common(left, right):
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


def test_matches_of_random_beginnings_are_the_longest_and_cover_every_position():
    rng = np.random.default_rng(0)
    kept = _Kept()
    for _ in range(40):
        tenant = str(rng.integers(2))
        ids = rng.integers(0, 2, rng.integers(1, 15)).tolist()
        count, entries = kept.match(tenant, ids)
        assert count == kept.longest(tenant, ids)
        positions = [e.base + cell for e in entries for cell in range(e.first, e.fill)]
        assert positions == list(range(count))
        kept.keep(tenant, ids)
        assert kept.match(tenant, ids)[0] == len(ids)
    kept.tree.clear()
    assert kept.pages.num_free == 200 and not kept.tree.tables()


def test_a_branch_keeps_the_cells_that_were_there_before_it():
    kept = _Kept()
    kept.keep("", [1, 2, 3, 4, 5, 6])
    _, first = kept.match("", [1, 2, 3, 4, 5, 6])
    kept.keep("", [1, 2, 3, 4, 5, 9, 9])
    assert kept.match("", [1, 2, 3, 4, 5, 6]) == (6, first)
    count, entries = kept.match("", [1, 2, 3, 4, 5, 9, 9])
    assert count == 7 and entries[:2] == pages_module.cut_end(first, 5)
    assert entries[2].page != first[1].page


def test_the_budget_drops_what_was_not_used_for_longest():
    kept = _Kept(max_pages=3)
    for n in range(3):
        kept.keep("", [n] * SIZE)
    kept.match("", [0] * SIZE)
    kept.keep("", [7] * SIZE)
    assert [kept.match("", [n] * SIZE)[0] for n in (0, 1, 2, 7)] == [SIZE, 0, SIZE, SIZE]
    assert kept.tree.num_pages == 3
    kept.keep("", [8] * 100)
    assert kept.match("", [8] * 100)[0] == 3 * SIZE


def test_pages_that_are_kept_go_before_anybody_lacks_one():
    kept = _Kept()
    kept.keep("", [1] * 100 * SIZE)
    assert (kept.pages.num_free, kept.pages.num_available) == (100, 200)
    kept.pages.require(200, [], staying=())
    assert len(kept.pages.allocate(0, 200, after=None, growing=True)) == 200
    assert kept.match("", [1])[0] == 0


# In an engine


@functools.cache
def _compiled():
    return tiny_engine.build(prefix_share=0.5)


@pytest.fixture
def engine():
    with tiny_engine.left_empty(_compiled()) as engine:
        yield engine


def _answer(engine, ids, **how):
    before = engine.executor.tokens_forwarded
    answer = engine.generate(ids, max_new_tokens=3, **how)
    assert answer.token_ids == tuple(tiny_engine.greedy(ids, 3))
    forwarded = engine.executor.tokens_forwarded - before
    assert forwarded == answer.tokens_forwarded == len(ids) - answer.cached_tokens + 2
    return answer.cached_tokens


@pytest.mark.parametrize("common", [1, 7, 8, 21])
def test_prompts_share_any_number_of_tokens_with_an_open_session(engine, common):
    ids = tiny_engine.random_ids(1, 22)
    engine.create(ids)
    assert _answer(engine, ids[:common] + [96] + tiny_engine.random_ids(2, 5)) == common


def test_a_session_is_created_from_another_and_both_go_on_by_themselves(engine):
    ids = tiny_engine.random_ids(1, 21)
    first = engine.create(ids[:10])
    engine.append(first, ids[10:])
    before = engine.executor.tokens_forwarded
    second = engine.create(ids)
    assert engine.executor.tokens_forwarded == before
    assert engine.session(second).cached_tokens == 21 and engine.cells_used == 21
    contexts = {first: ids, second: ids}
    for n in range(4):
        for session in (first, second):
            if n == 2:
                engine.rollback(session, 1) if session == first else None
                contexts[session] = contexts[session][:-1] if session == first else contexts[second]
            new = tiny_engine.random_ids(10 + n + 100 * (session == first), 3)
            engine.append(session, new)
            contexts[session] = contexts[session] + new
            answer = engine.query(session, [5], max_new_tokens=3)
            assert answer.token_ids == tuple(tiny_engine.greedy([*contexts[session], 5], 3))


def test_finished_prompts_and_closed_sessions_are_kept(engine):
    ids = tiny_engine.random_ids(1, 20)
    assert _answer(engine, ids) == 0
    assert _answer(engine, ids) == 19
    session = engine.create(tiny_engine.random_ids(2, 9))
    engine.append(session, [1, 2, 3])
    engine.close(session)
    assert _answer(engine, [*tiny_engine.random_ids(2, 9), 1, 2, 4]) == 11


def test_nothing_crosses_tenants(engine):
    ids = tiny_engine.random_ids(1, 20)
    engine.create(ids, tenant="a")
    assert _answer(engine, ids, tenant="b") == 0
    assert _answer(engine, ids) == 0
    assert _answer(engine, ids, tenant="a") == 19
    other = engine.create(ids, tenant="c")
    assert engine.session(other).cached_tokens == 0
    assert engine.session(engine.fork(other)).tenant == "c"


def test_of_a_session_that_has_slid_only_the_frozen_beginning_is_shared(engine):
    ids = tiny_engine.random_ids(1, 90)
    session = engine.create(ids[:10], when_full="slide")
    engine.append(session, ids[10:])
    engine.append(session, tiny_engine.random_ids(2, 12))
    assert engine.session(session).evicted
    assert _answer(engine, ids[:40]) == 10
    now = engine.session(session).token_ids[:30]
    assert now != ids[:30]
    engine.verbs.prefixes.tree.clear()
    assert _answer(engine, now) == 10


def test_a_full_pool_gives_up_what_is_kept_before_it_refuses(engine):
    for n in range(6):
        _answer(engine, tiny_engine.random_ids(n, 24))
    held = [engine.create(tiny_engine.random_ids(20 + n, 80)) for n in range(4)]
    assert len(held) * 10 == engine.config.num_pages
    with pytest.raises(CapacityError):
        engine.create([1])


def test_an_engine_without_sharing_shares_nothing():
    engine = tiny_engine.build()
    ids = tiny_engine.random_ids(1, 20)
    engine.create(ids)
    assert engine.generate(ids, max_new_tokens=1).cached_tokens == 0
