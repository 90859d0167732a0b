"""Engine sizes: what is refused before anything is allocated, and what the defaults give."""

from __future__ import annotations

import pytest
import tiny_engine

from jaxstate.config import DEFAULT_STEP_SHAPES, EngineConfig
from jaxstate.state import StepShape


def _config(**changes):
    sizes = dict(num_pages=64, page_size=64, context_len=512, evict_quantum=64)
    return EngineConfig(**(sizes | changes))


@pytest.mark.parametrize(
    "name", ["num_pages", "page_size", "context_len", "evict_quantum", "table_capacity"]
)
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        _config(**{name: 0})


def test_cells_are_pages_times_their_size():
    assert _config(num_pages=7, page_size=3, stretch_cells=(21,)).num_cells == 21


def test_step_shapes_must_be_there_and_ascend():
    with pytest.raises(ValueError, match="step_shapes: expected at least one shape, got none"):
        _config(step_shapes=())
    with pytest.raises(ValueError, match="step_shapes: expected ascending num_tokens, got"):
        _config(step_shapes=DEFAULT_STEP_SHAPES[::-1])


@pytest.mark.parametrize("stretches", [(16, 64), (64, 64)])
def test_stretches_must_descend(stretches):
    with pytest.raises(ValueError, match="stretch_cells: expected descending lengths"):
        _config(stretch_cells=stretches)


def test_stretch_longer_than_the_pool_is_refused():
    with pytest.raises(ValueError, match="at most the pool's 4096 cells, got 4097"):
        _config(stretch_cells=(4097, 128))


@pytest.mark.parametrize("stretches", [(), (16, 0)])
def test_stretches_must_hold_cells(stretches):
    with pytest.raises(ValueError, match="stretch_cells"):
        _config(stretch_cells=stretches)


def test_context_must_leave_positions_for_questions():
    limit = tiny_engine.MODEL.max_positions
    tiny_engine.engine_config(context_len=limit - 1).check_model(tiny_engine.MODEL)
    with pytest.raises(ValueError, match=f"context_len: .* {limit} positions .* got {limit}"):
        tiny_engine.engine_config(context_len=limit).check_model(tiny_engine.MODEL)


def test_blocks_must_tile_a_step():
    with pytest.raises(ValueError, match="block_tokens: .* num_tokens=8, got 3"):
        StepShape(num_tokens=8, block_tokens=3, num_rows=1)


def test_default_shapes_stay_within_the_budget_of_executables():
    config = _config()
    rows = {shape.num_rows for shape in config.step_shapes}
    helpers = 2 + 2 * len(rows)
    assert len(config.step_shapes) + helpers <= 24
    assert config.step_shapes[0].num_tokens == 1
