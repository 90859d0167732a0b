"""Packing rows: every token reads exactly its own cells, once, and sees exactly its ancestors."""

from __future__ import annotations

import collections
import dataclasses

import hypothesis
import numpy as np
import pytest
import tiny_engine
from hypothesis import strategies as st

from jaxstate import rows as rows_module
from jaxstate.config import DEFAULT_STEP_SHAPES
from jaxstate.errors import CapacityError
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.pages import Stretch
from jaxstate.rows import Group, RowInput
from jaxstate.state import StepShape

SETTINGS = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
CONFIG = tiny_engine.engine_config(
    num_pages=12, page_size=4, context_len=40, stretch_cells=(16, 4), table_capacity=256
)
ONE_BLOCK = StepShape(num_tokens=16, block_tokens=16, num_rows=4)
FOUR_BLOCKS = StepShape(num_tokens=16, block_tokens=4, num_rows=4)


def _row(count, context=(), *, wanted=(), parents=None, first_id=10):
    return RowInput(
        token_ids=np.arange(first_id, first_id + count, dtype=np.int32),
        positions=np.arange(100, 100 + count, dtype=np.int32),
        cells=np.arange(count, dtype=np.int32),
        shifts=np.arange(count, dtype=np.int32) - 3,
        context=context,
        wanted=wanted,
        parents=parents,
    )


def _reads(packed, shape, token):
    """(cell, position, shift) of each context cell a token sees, with how often it sees it."""
    seen = collections.Counter()
    row, block = packed.token_rows[token], token // shape.block_tokens
    for work in packed.work:
        for item in work.items[: work.count].tolist():
            begin, end = item[work_columns.ROW_BEGIN], item[work_columns.ROW_END]
            if item[work_columns.BLOCK] != block or not begin <= row < end:
                continue
            for index in range(item[work_columns.FIRST], item[work_columns.FILL]):
                cell = item[work_columns.START] + index
                position = item[work_columns.BASE] + index
                seen[(cell, position, item[work_columns.SHIFT])] += 1
    return seen


def _cells(context):
    return collections.Counter(
        (cell, base + cell, shift)
        for begin, end, base, shift in context
        for cell in range(begin, end)
    )


@st.composite
def _contexts(draw):
    """A few stretches anywhere in the pool, its last cells included."""
    context = []
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, CONFIG.num_cells - 1))
        end = draw(st.integers(begin + 1, CONFIG.num_cells))
        base, shift = draw(st.integers(-60, 60)), draw(st.integers(-20, 20))
        context.append(Stretch(begin, end, base, shift))
    return tuple(context)


@st.composite
def _groups(draw, max_tokens):
    """Groups whose tokens fit a step of one block."""
    groups = []
    left = max_tokens
    while left and len(groups) < 3:
        rows = []
        for _ in range(draw(st.integers(1, 2))):
            if not left:
                break
            count = draw(st.integers(1, min(left, 6)))
            rows.append(_row(count, draw(_contexts()), first_id=10 * len(groups)))
            left -= count
        groups.append(Group(rows=rows, context=draw(_contexts())))
    return groups


def _places(groups, shape):
    """(group, row, index in row) of each token of the step, laid out by the rule in words."""
    places = []
    for group in groups:
        if shape.block_tokens < shape.num_tokens:
            while len(places) % shape.block_tokens:
                places.append(None)
        for row in group.rows:
            places += [(group, row, index) for index in range(len(row.token_ids))]
    return places + [None] * (shape.num_tokens - len(places))


@SETTINGS
@hypothesis.given(_groups(max_tokens=16), st.sampled_from([ONE_BLOCK, FOUR_BLOCKS]))
def test_every_token_reads_exactly_its_rows_and_groups_cells_once(groups, shape):
    hypothesis.assume(rows_module.choose_shape(groups, [shape], 100.0) is shape)
    packed = rows_module.pack(groups, shape, CONFIG)
    for work, cells in zip(packed.work, CONFIG.stretch_cells, strict=True):
        assert work.cells_per_item == cells
        for item in work.items[: work.count]:
            assert 0 <= item[work_columns.START] <= CONFIG.num_cells - cells
            assert 0 <= item[work_columns.FIRST] < item[work_columns.FILL] <= cells
    for token, place in enumerate(_places(groups, shape)):
        if place is None:
            assert not _reads(packed, shape, token)
            assert packed.write_cells[token] >= CONFIG.num_cells
            assert packed.token_rows[token] >= shape.num_rows
            assert np.flatnonzero(packed.tail_mask[token]).tolist() == [token]
            continue
        group, row, index = place
        assert _reads(packed, shape, token) == _cells(row.context) + _cells(group.context)
        assert packed.token_ids[token] == row.token_ids[index]
        assert packed.positions[token] == row.positions[index]
        assert packed.write_cells[token] == row.cells[index]
        assert packed.write_shifts[token] == row.shifts[index]
        seen = range(token - index, token + 1)
        assert np.flatnonzero(packed.tail_mask[token]).tolist() == list(seen)


def test_stretch_that_ends_with_the_pool_is_read_whole():
    context = (Stretch(CONFIG.num_cells - 3, CONFIG.num_cells, 0, 0),)
    packed = rows_module.pack([Group(rows=[_row(1, context)])], ONE_BLOCK, CONFIG)
    assert _reads(packed, ONE_BLOCK, 0) == _cells(context)


def test_long_stretches_are_read_by_long_items_and_the_rest_by_short_ones():
    context = (Stretch(3, 3 + 16 + 5, 0, 0),)
    packed = rows_module.pack([Group(rows=[_row(1, context)])], ONE_BLOCK, CONFIG)
    assert [int(work.count) for work in packed.work] == [1, 2]


def test_blocks_without_tokens_of_a_row_do_not_visit_its_context():
    here, there = (Stretch(0, 4, 0, 0),), (Stretch(8, 12, 0, 0),)
    groups = [Group(rows=[_row(5, here)]), Group(rows=[_row(2, there)])]
    packed = rows_module.pack(groups, FOUR_BLOCKS, CONFIG)
    items = np.concatenate([work.items[: work.count] for work in packed.work])
    visits = {(int(item[work_columns.START]), int(item[work_columns.BLOCK])) for item in items}
    assert visits == {(0, 0), (0, 1), (8, 2)}


@SETTINGS
@hypothesis.given(st.data())
def test_tree_tokens_see_their_ancestors_and_no_one_else(data):
    count = data.draw(st.integers(1, 9))
    parents = [data.draw(st.integers(-1, index - 1)) for index in range(count)]
    groups = [Group(rows=[_row(2), _row(count, parents=parents), _row(3)])]
    packed = rows_module.pack(groups, ONE_BLOCK, CONFIG)
    for index in range(count):
        ancestors = {index}
        at = index
        while parents[at] >= 0:
            at = parents[at]
            ancestors.add(at)
        wanted = sorted(2 + ancestor for ancestor in ancestors)
        assert np.flatnonzero(packed.tail_mask[2 + index]).tolist() == wanted


def test_outputs_come_in_the_order_of_groups_rows_and_wanted():
    groups = [
        Group(rows=[_row(3, wanted=[2, 0]), _row(1)]),
        Group(rows=[_row(2, wanted=[1])]),
    ]
    packed = rows_module.pack(groups, ONE_BLOCK, CONFIG)
    assert packed.num_outputs == 3
    assert packed.output_tokens[:3].tolist() == [2, 0, 5]
    blocks = rows_module.pack(groups, FOUR_BLOCKS, CONFIG)
    assert blocks.output_tokens[:3].tolist() == [2, 0, 5]


def test_second_group_starts_a_new_block():
    groups = [Group(rows=[_row(3)]), Group(rows=[_row(2, wanted=[1], first_id=50)])]
    packed = rows_module.pack(groups, FOUR_BLOCKS, CONFIG)
    assert packed.token_ids[4:6].tolist() == [50, 51]
    assert packed.output_tokens[0] == 5


@SETTINGS
@hypothesis.given(
    st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), max_size=4),
    st.integers(0, 3),
)
def test_smallest_shape_that_holds_the_rows_is_chosen(sizes, wanted):
    shapes = [
        StepShape(num_tokens=4, block_tokens=4, num_rows=1),
        StepShape(num_tokens=8, block_tokens=4, num_rows=2),
        StepShape(num_tokens=16, block_tokens=8, num_rows=8),
        StepShape(num_tokens=16, block_tokens=16, num_rows=8),
    ]
    groups = [
        Group(rows=[_row(count, wanted=[0] if idx < wanted else []) for count in counts])
        for idx, counts in enumerate(sizes)
    ]
    num_wanted = sum(len(counts) for counts in sizes[:wanted])

    def holds(shape):
        at = 0
        for counts in sizes:
            while shape.block_tokens < shape.num_tokens and at % shape.block_tokens:
                at += 1
            at += sum(counts)
        return at <= shape.num_tokens and num_wanted <= shape.num_rows

    fitting = [shape for shape in shapes if holds(shape)]
    chosen = rows_module.choose_shape(groups, shapes, 100.0)
    assert chosen == (fitting[0] if fitting else None)


@pytest.mark.parametrize(
    "counts, context, blocks",
    [
        ([5], 7000, (8, 8)),
        ([1], 7000, (1, 1)),
        ([1] * 6, 7000, (8, 1)),
        ([1] * 6, 0, (8, 8)),
        ([14] * 4, 7000, (64, 16)),
        ([60], 7000, (64, 64)),
        ([14] * 4, 0, (64, 64)),
    ],
)
def test_rows_with_long_contexts_of_their_own_go_in_blocks_of_their_own(counts, context, blocks):
    own = [
        Group(rows=[_row(count, [Stretch(10_000 * n, 10_000 * n + context, 0, 0)])])
        for n, count in enumerate(counts)
    ]
    shape = rows_module.choose_shape(own, DEFAULT_STEP_SHAPES, 3900.0)
    assert (shape.num_tokens, shape.block_tokens) == blocks


def test_rows_that_share_a_context_go_in_one_block():
    shared = [Group(rows=[_row(1) for _ in range(8)], context=[Stretch(0, 7000, 0, 0)])]
    shape = rows_module.choose_shape(shared, DEFAULT_STEP_SHAPES, 3900.0)
    assert (shape.num_tokens, shape.block_tokens) == (8, 8)


def test_more_stretches_than_the_table_holds_are_refused():
    config = tiny_engine.engine_config(
        num_pages=12, page_size=4, context_len=40, stretch_cells=(16, 4), table_capacity=2
    )
    context = [Stretch(begin, begin + 2, 0, 0) for begin in (0, 10, 20)]
    rows_module.pack([Group(rows=[_row(1, context[:2])])], ONE_BLOCK, config)
    with pytest.raises(CapacityError, match="reads 3 stretches of 4 cells, the table holds 2"):
        rows_module.pack([Group(rows=[_row(1, context)])], ONE_BLOCK, config)


@SETTINGS
@hypothesis.given(_contexts(), st.integers(1, 8), st.sampled_from([ONE_BLOCK, FOUR_BLOCKS]))
def test_context_is_refused_ahead_exactly_when_packing_would_refuse(context, capacity, shape):
    config = dataclasses.replace(CONFIG, table_capacity=capacity)
    groups = [Group(rows=[_row(shape.num_tokens, context)])]
    try:
        rows_module.pack(groups, shape, config)
    except CapacityError as error:
        with pytest.raises(CapacityError) as ahead:
            rows_module.check_context(context, 0, shape, config)
        assert str(ahead.value) == str(error)
    else:
        rows_module.check_context(context, 0, shape, config)


def test_pages_that_later_steps_read_count_as_scattered():
    config = dataclasses.replace(CONFIG, table_capacity=3)
    context = (Stretch(0, 4, 0, 0),)
    rows_module.check_context(context, 2, ONE_BLOCK, config)
    with pytest.raises(CapacityError, match="reads 4 stretches of 4 cells, the table holds 3"):
        rows_module.check_context(context, 3, ONE_BLOCK, config)


def test_empty_step_writes_and_reads_nothing():
    packed = rows_module.pack([], FOUR_BLOCKS, CONFIG)
    assert all(work.count == 0 for work in packed.work)
    assert packed.num_outputs == 0
    assert (packed.write_cells >= CONFIG.num_cells).all()
    np.testing.assert_array_equal(packed.tail_mask, np.eye(16, dtype=bool))
