"""The TPU attention kernel in interpreters, against one softmax in float64 over what is visible."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxstate.kernels_pallas import attention_tpu, attention_xla, rope, work
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection

CAPACITY, NUM_ROWS = 12, 3
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}  # rounding of weights and products in that dtype
WATCHED = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """Static sizes of one compiled attention."""

    heads_per_kv_head: int
    head_dim: int
    page_size: int
    pages: int
    dtype: str = "float32"
    window: int | None = None
    block_tokens: int = 4
    tokens: int = 8
    kv_heads: int = 2

    @property
    def cells(self) -> int:
        return self.pages * self.page_size

    @property
    def blocks(self) -> int:
        return self.cells // BLOCK_CELLS

    @property
    def frequencies(self) -> np.ndarray:
        return np.geomspace(1, 1e-3, self.head_dim // 2).astype(np.float32)

    def __str__(self):
        return "-".join(str(value) for value in dataclasses.astuple(self))


MIXED = Case(1, 64, 16, 24)
MANY_TILES = Case(3, 64, 64, 40, block_tokens=8)  # more than are on their way at once
ONE_BY_ONE = Case(8, 256, 256, 3, block_tokens=1, tokens=4, kv_heads=1)
ALL_BLOCKS = [
    MIXED,
    MANY_TILES,
    ONE_BY_ONE,
    Case(2, 128, 32, 12, window=70),
    Case(4, 128, 128, 4, "bfloat16", kv_heads=1),
    Case(7, 64, 16, 40, "bfloat16", window=200, block_tokens=2),
    Case(1, 128, 16, 3, kv_heads=3),  # a pool of less than a tile
]
SELECTED = [
    MANY_TILES,
    Case(4, 256, 64, 8, "bfloat16", block_tokens=1, tokens=4, kv_heads=1),
    Case(4, 64, 64, 6, block_tokens=128, tokens=128, kv_heads=1),  # chunks of a block
]
CASES = [(case, False) for case in ALL_BLOCKS] + [(case, True) for case in SELECTED]
LONG = Case(2, 128, 16, 136, block_tokens=2, tokens=4, kv_heads=1)  # five tiles and more
HEADS = Case(3, 64, 64, 6, "bfloat16", window=150, block_tokens=2, tokens=4)
WATCHED_CASES = [
    (LONG, False),
    pytest.param(LONG, True, marks=pytest.mark.long),
    pytest.param(HEADS, True, marks=pytest.mark.long),
]


@functools.cache
def _attention(case: Case, interpret):
    def attend(inputs, table, selection):
        tail = attention_xla.tail_visible(inputs["positions"], inputs["tail_mask"], case.window)
        angles = rope.angles_at(table.items[:, work.SHIFT], jnp.asarray(case.frequencies))
        return attention_tpu.attention(
            inputs["q"], inputs["k"], inputs["v"], inputs["positions"], inputs["token_rows"],
            tail, inputs["k_pages"], inputs["v_pages"], (table,), (angles,),
            block_tokens=case.block_tokens, window=case.window,
            precision=jax.lax.Precision.HIGHEST, selection=selection, interpret=interpret,
        )  # fmt: skip

    # Compiling is what takes time here, but for products in bf16.
    level = {"xla_backend_optimization_level": 0} if case.dtype == "float32" else None
    return jax.jit(attend, compiler_options=level)


def _run(case, inputs, items, selection=None, interpret=True):
    table = np.tile(np.asarray([0, 0, case.cells, 0, 0, 0, NUM_ROWS, 0], np.int32), (CAPACITY, 1))
    table[: len(items)] = np.asarray(items, np.int32).reshape(-1, work.NUM_COLUMNS)
    table = work.WorkList(
        items=table, count=np.asarray(len(items), np.int32), cells_per_item=case.cells
    )
    with jax.numpy_dtype_promotion("strict"):
        return np.asarray(_attention(case, interpret)(inputs, table, selection))


def _inputs(case, rng):
    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)

    pool = (case.kv_heads, case.pages, case.page_size, case.head_dim)
    return dict(
        q=normal(case.tokens, case.kv_heads * case.heads_per_kv_head, case.head_dim),
        k=normal(case.tokens, case.kv_heads, case.head_dim),
        v=normal(case.tokens, case.kv_heads, case.head_dim),
        positions=rng.integers(0, case.cells, case.tokens).astype(np.int32),
        token_rows=np.sort(rng.integers(0, NUM_ROWS, case.tokens)).astype(np.int32),
        tail_mask=rng.random((case.tokens, case.tokens)) < 0.5,
        k_pages=normal(*pool),
        v_pages=normal(*pool),
    )


def _random_items(case, rng):
    """Items of any length, or of one cell, one full page, nothing, all up to the pool's end."""
    items = []
    for _ in range(rng.integers(CAPACITY // 2, CAPACITY + 1)):
        begin, end = np.sort(rng.integers(0, case.cells + 1, 2))
        match rng.integers(6):
            case 0:
                end = begin
            case 1:
                begin = min(begin, case.cells - 1)
                end = begin + 1
            case 2:
                begin = rng.integers(case.pages) * case.page_size
                end = begin + case.page_size
            case 3:
                end = case.cells
        start = rng.integers(0, begin + 1)
        row_begin = rng.integers(0, NUM_ROWS)
        item = (
            start,
            begin - start,
            end - start,
            rng.integers(-case.cells // 2, case.cells // 4),
            rng.choice([0, 0, 5, rng.integers(-400, 400)]),
            row_begin,
            rng.integers(row_begin, NUM_ROWS) + 1,
            rng.integers(0, case.tokens // case.block_tokens),
        )
        items.append(tuple(int(value) for value in item))
    return items


def _selection(case, blocks_of_heads):
    """Lists of blocks; what stands behind a count is a block that all items may show, or none."""
    blocks = np.resize(np.asarray([0, 2**30], np.int32), (case.kv_heads, case.blocks))
    for head, named in enumerate(blocks_of_heads):
        blocks[head, : len(named)] = named
    count = np.asarray([len(named) for named in blocks_of_heads], np.int32)
    return Selection(blocks=blocks, count=count)


def _random_selection(case, rng):
    """Per head another part of the blocks, often none or all but few."""
    return _selection(
        case,
        [
            np.flatnonzero(rng.random(case.blocks) < rng.choice([0, 0.1, 0.5, 0.9, 1]))
            for _ in range(case.kv_heads)
        ],
    )


def _used(case, items, selection=None):
    """[kv_heads, cells] bool: cells that an item shows and the head's list names."""
    used = np.zeros((case.kv_heads, case.cells), bool)
    for start, first, fill, *_ in items:
        used[:, start + first : start + fill] = True
    if selection is not None:
        for head, kept in enumerate(selection.count):
            named = np.isin(np.arange(case.blocks), selection.blocks[head, :kept])
            used[head] &= np.repeat(named, BLOCK_CELLS)
    return used


def _poisoned(case, inputs, used):
    """Keys and values of all other cells are no numbers."""
    poisoned = dict(inputs)
    for name in ("k_pages", "v_pages"):
        pages = np.array(inputs[name]).reshape(case.kv_heads, case.cells, -1)
        pages[~used] = np.nan
        poisoned[name] = jnp.asarray(pages.reshape(inputs[name].shape))
    return poisoned


def _turned(case, x, positions):
    pairs = x[..., : case.head_dim // 2] + 1j * x[..., case.head_dim // 2 :]
    pairs = pairs * np.exp(1j * np.multiply.outer(positions, case.frequencies.astype(np.float64)))
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def _reference(case, inputs, items, selection=None):
    """One float64 softmax per token and head over all it sees; zeros where that is nothing."""
    q, k, v = (np.asarray(inputs[name], np.float64) for name in ("q", "k", "v"))
    k_cells, v_cells = (
        np.asarray(inputs[name], np.float64).reshape(case.kv_heads, case.cells, -1)
        for name in ("k_pages", "v_pages")
    )
    used = _used(case, items, selection)
    out = np.zeros(q.shape)
    for token, (position, row) in enumerate(
        zip(inputs["positions"], inputs["token_rows"], strict=True)
    ):

        def in_reach(others, position=position):
            distance = int(position) - np.asarray(others, np.int64)
            return (distance >= 0) & (distance < (case.window or 2**40))

        tail = np.flatnonzero(inputs["tail_mask"][token] & in_reach(inputs["positions"]))
        for head in range(q.shape[1]):
            kv_head = head // case.heads_per_kv_head
            scores, values = [k[tail, kv_head] @ q[token, head]], [v[tail, kv_head]]
            for start, first, fill, base, shift, row_begin, row_end, block in items:
                if block != token // case.block_tokens or not row_begin <= row < row_end:
                    continue
                index = np.arange(first, fill)
                cells = start + index[in_reach(base + index)]
                cells = cells[used[kv_head, cells]]
                scores.append(k_cells[kv_head, cells] @ _turned(case, q[token, head], -shift))
                values.append(v_cells[kv_head, cells])
            scores, values = np.concatenate(scores), np.concatenate(values)
            if len(scores):
                weights = np.exp((scores - scores.max()) / np.sqrt(case.head_dim))
                out[token, head] = weights @ values / weights.sum()
    return out


def _check(case, seed, selected, items=None, interpret=True):
    rng = np.random.default_rng(seed)
    inputs = _inputs(case, rng)
    items = items or _random_items(case, rng)
    selection = _random_selection(case, rng) if selected else None
    inputs = _poisoned(case, inputs, _used(case, items, selection))
    wanted = _reference(case, inputs, items, selection)
    found = _run(case, inputs, items, selection, interpret)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE[case.dtype], rtol=0)
    assert np.abs(wanted).max() > 0.1


def _case_id(value):
    return ("all", "selected")[value] if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("case, selected", CASES, ids=_case_id)
def test_interpreted_kernel_equals_one_softmax_over_everything_visible(case, selected):
    for seed in range(8):
        _check(case, seed, selected)


@pytest.mark.parametrize("case, selected", WATCHED_CASES, ids=_case_id)
def test_tpu_interpreter_finds_no_race_and_no_read_out_of_bounds(case, selected):
    everywhere = [
        (0, 3, case.cells - 5, -case.cells, 9, 0, NUM_ROWS, block)
        for block in range(case.tokens // case.block_tokens)
    ]
    for seed in range(2):
        few = _random_items(case, np.random.default_rng(seed))[:3]
        _check(case, seed, selected, [few[0], *everywhere, *few[1:]], WATCHED)
        assert tpu_interpreter.races is not None
        assert not tpu_interpreter.races.races_found


END, PAGE = MIXED.cells, MIXED.page_size


@pytest.mark.parametrize(
    "items",
    {
        "nothing": [],
        "an empty item": [(40, 3, 3, 0, 0, 0, 3, 0)],
        "one cell": [(0, 37, 38, 0, 7, 0, 3, 0), (0, 37, 38, 0, 7, 0, 3, 1)],
        "the last cell": [(END - 1, 0, 1, -300, 0, 0, 3, 0)],
        "a full page": [(3 * PAGE, 0, PAGE, 0, 90, 0, 3, 1)],
        "the last page": [(END - PAGE, 0, PAGE, 0, 0, 0, 3, 0)],
        "all pages": [(0, 0, END, -300, -50, 0, 3, 0)],
        "all but the first cells": [(0, 3, END, -300, -50, 0, 3, 0)],
        "all but the last cells": [(0, 0, END - 3, -300, -50, 0, 3, 0)],
        "neighbours up to the end": [(END - 9 * PAGE, 5, 9 * PAGE, -5, 1, 0, 3, 0)],
        "a page seen by two rows at other places": [
            (PAGE, 0, PAGE, 10, 30, 0, 1, 0), (PAGE, 0, PAGE, 50, -30, 1, 2, 0),
            (PAGE, 4, 9, 90, -30, 1, 2, 0),
        ],
    }.items(),
    ids=lambda pair: pair[0],
)  # fmt: skip
def test_interpreted_kernel_reads_items_as_they_come(items):
    inputs = _inputs(MIXED, np.random.default_rng(3)) | {
        "positions": np.arange(100, 108, dtype=np.int32),
        "token_rows": np.asarray([0, 0, 1, 1, 1, 2, 2, 2], np.int32),
    }
    wanted = _reference(MIXED, inputs, items[1])
    found = _run(MIXED, _poisoned(MIXED, inputs, _used(MIXED, items[1])), items[1])
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE[MIXED.dtype], rtol=0)


def test_interpreted_kernel_gives_zero_where_nothing_is_visible():
    inputs = _inputs(MIXED, np.random.default_rng(4))
    inputs["tail_mask"][:] = False
    inputs["positions"][:] = 19
    inputs["token_rows"][:] = np.asarray([0, work.PADDING_ROW] * 4)
    found = _run(MIXED, inputs, [(0, 2, 5, 14, 4, 0, 1, block) for block in range(2)])
    assert (found[1::2] == 0).all()
    assert (np.abs(found[::2]).max(axis=(1, 2)) > 0).all()


def test_interpreted_kernel_gives_all_blocks_the_bits_of_no_selection():
    case = MANY_TILES
    everything = _selection(case, [np.arange(case.blocks)] * case.kv_heads)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        inputs, items = _inputs(case, rng), _random_items(case, rng)
        inputs = _poisoned(case, inputs, _used(case, items))
        found = _run(case, inputs, items, everything)
        assert found.tobytes() == _run(case, inputs, items).tobytes()


@pytest.mark.parametrize("case, selected", [CASES[0], CASES[-1]], ids=_case_id)
def test_interpreted_kernel_gives_the_same_bits_again(case, selected):
    rng = np.random.default_rng(5)
    inputs, items = _inputs(case, rng), _random_items(case, rng)
    selection = _random_selection(case, rng) if selected else None
    assert len({_run(case, inputs, items, selection).tobytes() for _ in range(3)}) == 1


def test_interpreted_kernel_gives_a_row_the_same_bits_in_any_place_and_company():
    case = ONE_BY_ONE
    inputs = _inputs(case, np.random.default_rng(6)) | {
        "tail_mask": np.eye(case.tokens, dtype=bool),
        "token_rows": np.arange(case.tokens, dtype=np.int32),
    }
    items = [(90 * t, 2, 110 * (t + 1), -30, 5 * t, t, t + 1, t) for t in range(case.tokens)]
    together = _run(case, inputs, items)
    order = np.asarray([2, 0, 3, 1])
    moved = inputs | {name: inputs[name][order] for name in ("q", "k", "v", "positions")}
    place = np.argsort(order)
    moved_items = [(*i[:5], place[i[7]], place[i[7]] + 1, place[i[7]]) for i in items]
    np.testing.assert_array_equal(_run(case, moved, moved_items), together[order])
    alone = inputs | {"token_rows": np.asarray([work.PADDING_ROW] * 3 + [3], np.int32)}
    np.testing.assert_array_equal(_run(case, alone, items[3:])[3], together[3])


@pytest.mark.parametrize(
    "head_dim, dtype, page_size, reason",
    [
        (64, jnp.float32, 16, "it runs on the TPU backend, this is cpu"),
        (72, jnp.float32, 16, "head_dim must be a multiple of 16 from 16 to 256, got 72"),
        (512, jnp.bfloat16, 16, "got 512"),
        (64, jnp.float16, 16, "float32 or bfloat16, got float16"),
        (64, jnp.float32, 24, "whole blocks of 16 cells, got page_size 24"),
    ],
)
def test_tpu_kernel_says_what_it_cannot_run(head_dim, dtype, page_size, reason):
    assert reason in attention_tpu.unsupported(head_dim, dtype, page_size)
    interpreted = attention_tpu.unsupported(head_dim, dtype, page_size, interpret=True)
    assert (interpreted is None) == ("backend" in reason)
