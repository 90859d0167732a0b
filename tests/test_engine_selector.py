"""An engine whose questions read only part of their context: off by default, named in answers."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tiny_engine
from test_kernels_attention import CACHE_DIR

from jaxstate.kernels_pallas import dispatch
from jaxstate.kernels_pallas.block_selector import BlockSelector

IDS, QUESTION = tiny_engine.random_ids(1, 90), tiny_engine.random_ids(2, 5)
NAMES = ["xla", "pallas_gpu_interpret"]


@functools.cache
def _engine(kept, implementation, dense_layers):
    choice = None
    if kept is not None:
        choice = BlockSelector(kept=kept, sink_tokens=1, recent_tokens=1, dense_layers=dense_layers)
    return tiny_engine.build(
        page_size=16, num_pages=12, stretch_cells=None, implementation=implementation,
        selector=choice, step_shapes=tiny_engine.SHAPES[1:],
    )  # fmt: skip


def _build(kept, implementation="xla", dense_layers=0):
    engine = _engine(kept, implementation, dense_layers)
    for session in engine.session_ids:
        engine.close(session)
    session = engine.create(IDS[:9])
    engine.append(session, IDS[9:])
    return engine, session


def _ask(engine, session):
    logits = np.asarray(engine.advance(session, QUESTION).ready.row_logits())
    answer = engine.query(session, QUESTION, max_new_tokens=4)
    choice = engine.choose(session, QUESTION[:2], [[1, 2], [3]])
    return logits, answer, choice


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.long)])
def test_keeping_all_blocks_changes_no_bit(name):
    exact, approximate = (_ask(*_build(kept, name)) for kept in (None, 1.0))
    np.testing.assert_array_equal(approximate[0], exact[0])
    assert approximate[1].token_ids == exact[1].token_ids
    assert approximate[2].choice_logprobs == exact[2].choice_logprobs


@pytest.mark.parametrize("name", [NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.long)])
def test_keeping_few_blocks_changes_answers_which_say_so(name):
    exact, approximate = (_ask(*_build(kept, name)) for kept in (None, 0.3))
    assert np.abs(approximate[0] - exact[0]).max() > 1e-3
    assert (approximate[1].blocks_kept, approximate[2].blocks_kept) == (0.3, 0.3)
    assert (exact[1].blocks_kept, exact[2].blocks_kept) == (None, None)


def test_first_layers_may_read_everything():
    exact, approximate = (_ask(*_build(*how)) for how in ((None,), (0.3, "xla", 2)))
    np.testing.assert_array_equal(approximate[0], exact[0])


def test_what_becomes_durable_is_computed_from_everything():
    states = []
    for kept in (None, 0.3):
        engine, session = _build(kept)
        if kept:
            engine.advance(session, QUESTION)  # paid approximately: not good enough to keep
        answer = engine.query(session, QUESTION, max_new_tokens=1, commit=True)
        assert answer.blocks_kept is None
        state = tiny_engine.state_of(engine)["sessions"][session]
        states.append((state["token_ids"], state["bits"]))
    assert states[0] == states[1]


def test_prompts_without_a_session_are_read_whole():
    exact, approximate = (_build(kept)[0] for kept in (None, 0.3))
    wanted = exact.generate(IDS[:60], max_new_tokens=4)
    found = approximate.generate(IDS[:60], max_new_tokens=4)
    assert found.token_ids == wanted.token_ids and found.blocks_kept is None


def test_the_implementation_for_cpus_is_not_taken_and_says_why():
    with pytest.raises(NotImplementedError, match="cannot select blocks"):
        _build(0.5, "cpu")
    how = dict(head_dim=16, dtype=np.float32, cache_dir=CACHE_DIR, selects=True)
    assert dispatch.choose("auto", **how) == "xla"


def test_pages_that_cut_a_block_are_refused():
    with pytest.raises(ValueError, match="page_size: expected a multiple of 16 with a selector"):
        tiny_engine.engine_config(page_size=8, selector=BlockSelector(kept=0.5))
