"""The functional session against the history-true reference and against the engine."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import equality, history

from jaxstate import functional
from jaxstate.errors import CapacityError, InputError
from jaxstate.functional import SessionConfig

CONFIG = SessionConfig(
    model=tiny_engine.MODEL,
    page_size=8,
    context_len=64,
    tail_len=24,
    evict_quantum=8,
    when_full="slide",
    chunk_tokens=16,
    stretch_cells=32,
)
CPU_CONFIG = dataclasses.replace(CONFIG, implementation="cpu")
LENGTHS = (1, 5, 16, 23, 40)
"""Appends have one of these lengths, so that few shapes are traced."""


def draw_ids(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(0, tiny_engine.MODEL.vocab_size, count).tolist()


class Reference:
    """What a functional session should be, kept by the history-true reference."""

    def __init__(self, frozen: list[int]):
        self.log = history.History(tiny_engine.params(), tiny_engine.MODEL)
        self.context = self.log.extend((), frozen) if frozen else ()
        self.frozen_len = len(frozen)
        self.evicted = 0

    def append(self, ids: list[int]) -> None:
        overflow = len(self.context) + len(ids) - CONFIG.context_len
        if overflow > 0:
            kept = len(self.context) - self.frozen_len
            quantum = CONFIG.evict_quantum
            dropped = min(-(-overflow // quantum) * quantum, kept)
            self.evicted += dropped
            self.context = (
                self.context[: self.frozen_len] + self.context[self.frozen_len + dropped :]
            )
        self.context += self.log.extend(self.context, ids)

    def logits_after(self, question: list[int]) -> np.ndarray:
        context = self.log.extend(self.context, question) if question else self.context
        return self.log.logits(context[-1])

    def check_answer(self, question: list[int], answer, rule: equality.Rule) -> None:
        drawn = np.asarray(answer.token_ids).tolist()
        wants = [self.logits_after(question + drawn[:n]) for n in range(len(drawn))]
        rule.logits(np.asarray(answer.first.logits[0]), wants[0], "first distribution")
        rule.greedy(drawn, wants, "answer")


STREAMS = given(
    frozen_len=st.sampled_from((0, 3, 8, 13)),
    ticks=st.lists(st.sampled_from(LENGTHS), min_size=3, max_size=12),
    seed=st.integers(0, 2**16),
    implementation=st.sampled_from(("xla", "cpu")),
)


@settings(max_examples=3, deadline=None, derandomize=True)
@STREAMS
def test_any_stream_of_appends_and_queries_equals_the_reference(
    frozen_len, ticks, seed, implementation
):
    _check_stream(frozen_len, ticks, seed, implementation)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@STREAMS
def test_many_streams_of_appends_and_queries_equal_the_reference(
    frozen_len, ticks, seed, implementation
):
    _check_stream(frozen_len, ticks, seed, implementation)


def _check_stream(frozen_len, ticks, seed, implementation):
    rng = np.random.default_rng(seed)
    rule = equality.Rule()
    config = dataclasses.replace(CONFIG, implementation=implementation)
    frozen = draw_ids(rng, frozen_len)
    state = functional.start(tiny_engine.params(), config, frozen)
    reference = Reference(frozen)
    for version, count in enumerate(ticks, start=1):
        ids = draw_ids(rng, count)
        state = functional.append(tiny_engine.params(), state, ids)
        reference.append(ids)
        question = draw_ids(rng, 5)
        state, answer = functional.query(tiny_engine.params(), state, question, max_new_tokens=3)
        reference.check_answer(question, answer, rule)
        assert int(state.length) == len(reference.context)
        assert int(state.evicted) == reference.evicted
        assert int(state.version) == version
        kept = np.asarray(state.token_ids)[: int(state.length)].tolist()
        assert kept == reference.log.token_ids(reference.context)


def test_long_sliding_passes_several_rotation_epochs():
    rng = np.random.default_rng(0)
    rule = equality.Rule()
    state = functional.start(tiny_engine.params(), CONFIG, draw_ids(rng, 3))
    reference = Reference(np.asarray(state.token_ids)[:3].tolist())
    for _ in range(13):
        ids = draw_ids(rng, 40)
        state = functional.append(tiny_engine.params(), state, ids)
        reference.append(ids)
    assert reference.evicted > 3 * (tiny_engine.MODEL.max_positions - 3) // 8 * 8
    question = draw_ids(rng, 5)
    state, answer = functional.query(tiny_engine.params(), state, question, max_new_tokens=3)
    reference.check_answer(question, answer, rule)


def test_the_closed_form_table_shows_the_cells_positions_and_rotations_of_the_engine():
    rng = np.random.default_rng(1)
    engine = tiny_engine.build(context_len=CONFIG.context_len, evict_quantum=CONFIG.evict_quantum)
    frozen = draw_ids(rng, 13)
    session = engine.create(frozen, when_full="slide")
    state = functional.start(tiny_engine.params(), CONFIG, frozen)
    for _ in range(9):
        ids = draw_ids(rng, 23)
        engine.append(session, ids)
        state = functional.append(tiny_engine.params(), state, ids)
        entries = engine.session(session).entries
        expected = sorted(
            (entry.base + cell, entry.base + cell - entry.shift)
            for entry in entries
            for cell in range(entry.first, entry.fill)
        )
        work = functional.table(state, state.length)
        shown = sorted(
            (int(base) + cell, int(base) + cell - int(shift))
            for _, first, fill, base, shift, *_ in np.asarray(work.items)[: int(work.count)]
            for cell in range(int(first), int(fill))
        )
        assert shown == expected


def test_a_query_leaves_the_visible_session_bitwise_unchanged():
    rng = np.random.default_rng(2)
    state = functional.start(tiny_engine.params(), CONFIG, draw_ids(rng, 5))
    state = functional.append(tiny_engine.params(), state, draw_ids(rng, 40))

    def visible(state):
        work = functional.table(state, state.length)
        cells = np.concatenate(
            [
                start + np.arange(first, fill)
                for start, first, fill, *_ in np.asarray(work.items)[: int(work.count)]
            ]
        )
        flat = [
            np.asarray(pages).reshape(tiny_engine.MODEL.num_kv_heads, CONFIG.num_cells, -1)
            for layer in state.pool
            for pages in (layer.k_pages, layer.v_pages)
        ]
        scalars = (state.length, state.evicted, state.version, state.token_ids)
        return [pages[:, cells] for pages in flat] + [np.asarray(one) for one in scalars]

    before = visible(state)
    state, _ = functional.query(tiny_engine.params(), state, draw_ids(rng, 16), max_new_tokens=8)
    for left, right in zip(before, visible(state), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_paid_entry_is_resumed_with_and_without_more_question():
    rng = np.random.default_rng(3)
    rule = equality.Rule()
    state = functional.start(tiny_engine.params(), CONFIG)
    ids, question = draw_ids(rng, 23), draw_ids(rng, 6)
    reference = Reference([])
    state = functional.append(tiny_engine.params(), state, ids)
    reference.append(ids)
    state, ready = functional.advance(tiny_engine.params(), state, question[:4])
    rule.logits(np.asarray(ready.logits[0]), reference.logits_after(question[:4]), "ready")
    assert int(state.paid_len) == 4
    state, answer = functional.query(
        tiny_engine.params(), state, question[4:], max_new_tokens=3, resume=True
    )
    reference.check_answer(question, answer, rule)
    state, _ = functional.advance(tiny_engine.params(), state, question)
    state, answer = functional.query(tiny_engine.params(), state, [], max_new_tokens=3, resume=True)
    reference.check_answer(question, answer, rule)
    state = functional.append(tiny_engine.params(), state, [1])
    assert int(state.paid_len) == 0


def test_padding_tokens_count_for_nothing():
    rng = np.random.default_rng(4)
    ids, question = draw_ids(rng, 5), draw_ids(rng, 3)
    plain = functional.append(
        tiny_engine.params(), functional.start(tiny_engine.params(), CONFIG), ids
    )
    padded = functional.append(
        tiny_engine.params(), functional.start(tiny_engine.params(), CONFIG), ids + [0] * 11, 5
    )
    assert int(padded.length) == 5
    _, left = functional.query(tiny_engine.params(), plain, question, max_new_tokens=3)
    _, right = functional.query(
        tiny_engine.params(), padded, question + [0, 0], 3, max_new_tokens=3
    )
    equality.Rule().logits(
        np.asarray(right.first.logits[0]), np.asarray(left.first.logits[0]), "padded"
    )


def test_runs_inside_scan_over_ticks_like_one_tick_after_another():
    rng = np.random.default_rng(5)
    ticks = np.array([draw_ids(rng, 5) for _ in range(16)], np.int32)
    question = jnp.asarray(draw_ids(rng, 4), jnp.int32)
    params = tiny_engine.params()

    @jax.jit
    def run(state, ticks):
        def tick(state, ids):
            state = functional.append(params, state, ids)
            state, answer = functional.query(params, state, question, max_new_tokens=2)
            return state, answer.first.logits[0]

        return jax.lax.scan(tick, state, ticks)

    state, scanned = run(functional.start(params, CONFIG, [1, 2, 3]), jnp.asarray(ticks))
    assert int(state.evicted) > 0
    step = functional.start(params, CONFIG, [1, 2, 3])
    for index, ids in enumerate(ticks):
        step = functional.append(params, step, ids)
        step, answer = functional.query(params, step, question, max_new_tokens=2)
        equality.Rule().logits(
            np.asarray(scanned[index]), np.asarray(answer.first.logits[0]), f"tick {index}"
        )


def test_vmap_over_sessions_of_different_lengths_equals_each_alone():
    rng = np.random.default_rng(6)
    params = tiny_engine.params()
    starts = [draw_ids(rng, count) for count in (3, 9, 0)]
    lengths = jnp.asarray([5, 2, 4], jnp.int32)
    ids = jnp.asarray([draw_ids(rng, 5) for _ in starts], jnp.int32)
    questions = jnp.asarray([draw_ids(rng, 4) for _ in starts], jnp.int32)
    states = [functional.start(params, CONFIG, frozen) for frozen in starts]
    batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def tick(state, ids, count, question):
        state = functional.append(params, state, ids, count)
        return functional.query(params, state, question, max_new_tokens=2)

    batch, answers = jax.vmap(tick)(batch, ids, lengths, questions)
    for index, state in enumerate(states):
        alone, answer = tick(state, ids[index], lengths[index], questions[index])
        assert int(alone.length) == int(batch.length[index])
        equality.Rule().logits(
            np.asarray(answers.first.logits[index, 0]), np.asarray(answer.first.logits[0]),
            f"session {index}",
        )  # fmt: skip


def test_an_append_that_cannot_fit_raises_or_leaves_a_traced_state_alone():
    params = tiny_engine.params()
    config = dataclasses.replace(CONFIG, when_full="error")
    state = functional.append(params, functional.start(params, config), [1] * 60)
    with pytest.raises(CapacityError, match="60 of 64 tokens are held and 5 more do not fit"):
        functional.append(params, state, [1] * 5)
    with pytest.raises(CapacityError, match="longer than the stream's window of 64"):
        functional.append(params, functional.start(params, CONFIG), [1] * 65)
    before = (int(state.length), int(state.version))
    traced = jax.jit(functional.append)(params, state, jnp.ones(5, jnp.int32))
    assert (int(traced.length), int(traced.version)) == before


def test_wrong_input_is_refused_in_one_sentence():
    params = tiny_engine.params()
    state = functional.start(params, CONFIG)
    with pytest.raises(InputError, match="expected a flat list of token ids"):
        functional.append(params, state, [])
    with pytest.raises(InputError, match="expected token ids in 0 … 96"):
        functional.append(params, state, [97])
    with pytest.raises(CapacityError, match="tail_len=24"):
        functional.query(params, state, [1] * 20, max_new_tokens=5)
    with pytest.raises(CapacityError, match="tail_len=24"):
        functional.advance(params, state, [1] * 25)
    with pytest.raises(CapacityError, match="frozen"):
        functional.start(params, CONFIG, [1] * 64)
    with pytest.raises(ValueError, match="128 positions"):
        dataclasses.replace(CONFIG, context_len=120)


def test_the_state_is_donated_and_each_shape_is_traced_once():
    params = tiny_engine.params()
    state = functional.start(params, CONFIG)
    before = functional._append._cache_size()
    first = functional.append(params, state, [1] * 7)
    assert state.pool[0].k_pages.is_deleted()
    second = functional.append(params, first, [2] * 7)
    functional.append(params, second, [3] * 7)
    assert functional._append._cache_size() == before + 1


def test_answers_end_at_an_end_token():
    params = tiny_engine.params()
    state = functional.append(params, functional.start(params, CONFIG), [5, 6, 7])
    state, free = functional.query(params, state, [8], max_new_tokens=4)
    drawn = np.asarray(free.token_ids).tolist()
    state, ended = functional.query(params, state, [8], max_new_tokens=4, eos_ids=(drawn[0],))
    assert np.asarray(ended.token_ids).tolist() == [drawn[0], -1, -1, -1]
    assert int(ended.num_tokens) == 1
