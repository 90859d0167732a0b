"""Bounds of blocks' keys follow what is written; the blocks they choose are those that matter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstate.kernels_pallas import block_selector, key_bounds, kv_write_xla, rope, work
from jaxstate.kernels_pallas.block_selector import BlockSelector
from jaxstate.kernels_pallas.key_bounds import KeyBounds
from jaxstate.kernels_pallas.selection import BLOCK_CELLS

KV_HEADS, SHARED, HEAD_DIM, PAGES, PAGE_SIZE = 2, 3, 8, 6, 32
NUM_CELLS = PAGES * PAGE_SIZE
NUM_BLOCKS = NUM_CELLS // BLOCK_CELLS
FREQUENCIES = jnp.geomspace(1.0, 0.01, HEAD_DIM // 2)


def _normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# Bounds


@jax.jit
def _write(bounds, k_pages, new, cells):
    k_pages = kv_write_xla.kv_write(k_pages, new, cells)
    return key_bounds.write(bounds, k_pages, cells), k_pages


def _nan_bounds():
    nothing = jnp.full((KV_HEADS, NUM_BLOCKS, HEAD_DIM), jnp.nan)
    return KeyBounds(low=nothing, high=nothing)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_those_of_the_keys_written_whatever_lay_there_before(seed):
    """Pages grow by runs of any length and are cut back and grown again, as sessions do."""
    rng = np.random.default_rng(seed)
    k_pages = jnp.full((KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM), jnp.nan)
    bounds, fills = _nan_bounds(), np.zeros(PAGES, int)
    for _ in range(25):
        page = rng.integers(PAGES)
        fills[page] = rng.integers(0, fills[page] + 1)  # roll back
        count = min(rng.integers(1, 25), PAGE_SIZE - fills[page])
        cells = np.full(24, NUM_CELLS, np.int32)
        cells[:count] = page * PAGE_SIZE + fills[page] + np.arange(count)
        fills[page] += count
        order = rng.permutation(24)
        new = rng.standard_normal((24, KV_HEADS, HEAD_DIM)).astype(np.float32)
        with jax.numpy_dtype_promotion("strict"):
            bounds, k_pages = _write(bounds, k_pages, new, cells[order])
        keys = np.asarray(k_pages).reshape(KV_HEADS, NUM_BLOCKS, BLOCK_CELLS, HEAD_DIM)
        for block in range(NUM_BLOCKS):
            page, first = divmod(block * BLOCK_CELLS, PAGE_SIZE)
            used = keys[:, block, : max(fills[page] - first, 0)]
            if used.size:
                # Never too tight; exact in blocks that this write touched.
                assert (np.asarray(bounds.low)[:, block] <= used.min(axis=1)).all()
                assert (np.asarray(bounds.high)[:, block] >= used.max(axis=1)).all()
        for block in {cell // BLOCK_CELLS for cell in cells[:count]}:
            page, first = divmod(block * BLOCK_CELLS, PAGE_SIZE)
            used = keys[:, block, : fills[page] - first]
            np.testing.assert_array_equal(np.asarray(bounds.low)[:, block], used.min(axis=1))
            np.testing.assert_array_equal(np.asarray(bounds.high)[:, block], used.max(axis=1))


def test_tokens_that_write_nothing_leave_all_bounds_alone():
    k_pages = jnp.zeros((KV_HEADS, PAGES, PAGE_SIZE, HEAD_DIM))
    cells = np.asarray([NUM_CELLS, 2**31 - 1], np.int32)
    bounds, _ = _write(_nan_bounds(), k_pages, _normal(0, 2, KV_HEADS, HEAD_DIM), cells)
    assert np.isnan(bounds.low).all() and np.isnan(bounds.high).all()


# Choosing

ITEMS = [
    # start, first, fill, base, shift, row begin, row end, block
    (0, 3, 70, -3, 4, 0, 1, 0),
    (64, 16, 90, 51, -9, 0, 2, 0),
    (160, 0, 10, 5, 0, 1, 2, 0),
]
POSITIONS = np.asarray([141, 142, 10, 90], np.int32)
ROWS = np.asarray([0, 0, 1, work.PADDING_ROW], np.int32)
ALL_SELECT = np.ones(4, bool)


def _choose(selector, selects=ALL_SELECT, seed=0, items=ITEMS):
    """Random keys and queries: (selection, queries, keys by head and cell)."""
    keys = _normal(seed, KV_HEADS, NUM_CELLS, HEAD_DIM)
    q = _normal(seed + 1, len(POSITIONS), KV_HEADS * SHARED, HEAD_DIM)
    blocks = keys.reshape(KV_HEADS, NUM_BLOCKS, BLOCK_CELLS, HEAD_DIM)
    table = np.zeros((5, work.NUM_COLUMNS), np.int32)
    table[: len(items)] = items
    works = [
        work.WorkList(items=table, count=np.int32(len(items)), cells_per_item=cells)
        for cells in (NUM_CELLS, 96)
    ]

    @jax.jit
    def run(q, bounds, one):
        angles = rope.angles_at(one.items[:, work.SHIFT], FREQUENCIES)
        return block_selector.select(selector, q, bounds, POSITIONS, ROWS, selects, [one], [angles])

    bounds = KeyBounds(low=blocks.min(axis=2), high=blocks.max(axis=2))
    found = []
    for one in works:
        with jax.numpy_dtype_promotion("strict"):
            selection = jax.device_get(run(q, bounds, one))
        found.append([selection.blocks[h, : selection.count[h]].tolist() for h in range(KV_HEADS)])
    assert found[0] == found[1], "stretches of any length show the same blocks"
    return found[0], q, keys


def _seen():
    """By block: the cells each token sees, as (token, cell, shift, position)."""
    seen = {}
    for start, first, fill, base, shift, row_begin, row_end, _ in ITEMS:
        for cell in range(first, fill):
            for token, (position, row) in enumerate(zip(POSITIONS, ROWS, strict=True)):
                if row_begin <= row < row_end and base + cell <= position:
                    block = (start + cell) // BLOCK_CELLS
                    seen.setdefault(block, []).append((token, start + cell, shift, base + cell))
    return seen


def _scores(q, keys, head):
    """The highest bound of any token and query head that reads a block, in float64."""
    best = {}
    for block, cells in _seen().items():
        mine = keys[head, block * BLOCK_CELLS : (block + 1) * BLOCK_CELLS].astype(np.float64)
        bounds = []
        for token, _, shift, _ in set((t, 0, s, 0) for t, _, s, _ in cells):
            for query in q[token, head * SHARED : (head + 1) * SHARED]:
                angles = rope.angles_at(jnp.int32(shift), FREQUENCIES).reversed
                turned = np.asarray(rope.turn(jnp.asarray(query), angles), np.float64)
                bounds.append(np.maximum(turned * mine.min(0), turned * mine.max(0)).sum())
        best[block] = max(bounds)
    return best


@pytest.mark.parametrize("kept", [0.05, 0.3, 0.6])
def test_blocks_with_the_highest_bounds_are_kept(kept):
    selector = BlockSelector(kept=kept, sink_tokens=0, recent_tokens=0)
    chosen, q, keys = _choose(selector)
    for head in range(KV_HEADS):
        scores = _scores(q, keys, head)
        count = int(np.ceil(kept * len(scores)))
        best = sorted(scores, key=lambda block: -scores[block])[:count]
        assert chosen[head] == sorted(best)


def test_everything_kept_is_everything_seen():
    chosen, _, _ = _choose(BlockSelector(kept=1.0))
    assert chosen == [sorted(_seen())] * KV_HEADS
    assert len(chosen[0]) < NUM_BLOCKS


def test_sinks_and_recent_tokens_are_kept_even_past_the_budget():
    selector = BlockSelector(kept=1e-6, sink_tokens=6, recent_tokens=20)
    chosen, _, _ = _choose(selector)
    wanted = {
        block
        for block, cells in _seen().items()
        for token, _, _, position in cells
        if position < 6 or POSITIONS[token] - position < 20
    }
    assert chosen == [sorted(wanted)] * KV_HEADS
    assert 0 < len(wanted) < len(_seen())


def test_tokens_that_do_not_select_keep_all_they_see():
    selector = BlockSelector(kept=1e-6, sink_tokens=0, recent_tokens=0)
    chosen, _, _ = _choose(selector, selects=np.asarray([True, True, False, True]))
    wanted = sorted(
        block for block, cells in _seen().items() if any(token == 2 for token, *_ in cells)
    )
    assert chosen == [wanted] * KV_HEADS
    assert len(wanted) < len(_seen())


def test_bounds_of_blocks_that_nobody_sees_may_hold_nan():
    """Among them is the block at the pool's end, beside blocks that are seen."""
    selector = BlockSelector(kept=0.5)
    _, q, keys = _choose(selector)
    blocks = keys.reshape(KV_HEADS, NUM_BLOCKS, BLOCK_CELLS, HEAD_DIM)
    unseen = [block for block in range(NUM_BLOCKS) if block not in _seen()]
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    one = work.WorkList(
        items=np.asarray(ITEMS, np.int32), count=np.int32(3), cells_per_item=NUM_CELLS
    )
    angles = rope.angles_at(one.items[:, work.SHIFT], FREQUENCIES)

    @jax.jit
    def run(bounds, one):
        return block_selector.select(
            selector, jnp.asarray(q), bounds, POSITIONS, ROWS, ALL_SELECT, [one], [angles]
        )

    found = []
    for value in (0.0, np.nan):
        for bound in (low, high):
            bound[:, unseen] = value
        found.append(run(KeyBounds(low=low.copy(), high=high.copy()), one))
    assert unseen
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(kept=0.0), r"kept: expected a share in \(0, 1\], got 0.0"),
        (dict(kept=1.5), "got 1.5"),
        (dict(kept=0.1, sink_tokens=-1), "sink_tokens: expected at least 0, got -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BlockSelector(**changes)
