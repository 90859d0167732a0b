"""Every attention implementation against one softmax in float64 over all visible cells."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pathlib
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
import pytest
from hypothesis import stateful
from interpreted import options_for
from oracle import tiny
from oracle.machine import machine_for

from jaxstate.kernels_pallas import attention_cpu, attention_xla, dispatch, rope, work
from jaxstate.kernels_pallas.selection import BLOCK_CELLS

KV_HEADS, PAGE_SIZE, HEAD_DIM, CAPACITY, NUM_ROWS = 2, 4, 16, 12, 3
FREQUENCIES = (100.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32)
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}  # rounding of weights and products in that dtype
CACHE_DIR = pathlib.Path(platformdirs.user_cache_path("jaxstate")) / "kernels"


@dataclasses.dataclass(frozen=True)
class Case:
    """Static sizes of one compiled attention."""

    implementation: str
    heads_per_kv_head: int
    block_tokens: int
    window: int | None
    dtype: str = "float32"
    tokens: int = 8
    pages: int = 6
    stretches: tuple[int, ...] = (8, 3)

    @property
    def cells(self) -> int:
        return self.pages * PAGE_SIZE

    def __str__(self):
        return "-".join(str(value) for value in dataclasses.astuple(self)[:6])


CASES = [
    Case("xla", 1, 8, None),
    Case("xla", 3, 8, 5),
    Case("xla", 4, 8, None),
    Case("xla", 1, 2, 7),
    Case("xla", 3, 4, None),
    Case("xla", 3, 1, 6),
    Case("xla", 4, 4, None, "bfloat16"),
    Case("xla", 3, 8, 9, "bfloat16"),
    Case("cpu", 1, 8, None),
    Case("cpu", 3, 8, 5),
    Case("cpu", 1, 2, 7),
    Case("cpu", 3, 4, None),
    Case("cpu", 1, 1, None, tokens=1),
    Case("cpu", 3, 1, 6, tokens=1),
    Case("cpu", 4, 1, 6, tokens=1),
    # More query rows than one task takes, more cells than one share of the context has.
    Case("cpu", 4, 32, 400, tokens=32, pages=256, stretches=(700, 90)),
    Case("cpu", 3, 8, None, tokens=24, pages=256, stretches=(700,)),
    # Tiles of rows of several sizes.
    Case("cpu", 3, 6, 40, tokens=6, pages=64, stretches=(180, 20)),
    Case("cpu", 3, 12, None, tokens=12, pages=64, stretches=(180, 20)),
    Case("cpu", 1, 17, None, tokens=17, pages=64, stretches=(180, 20)),
    # More tokens than a block has cells.
    Case("cpu", 3, 48, None, tokens=96, pages=64, stretches=(180, 20)),
    Case("pallas_gpu_interpret", 1, 8, None),
    Case("pallas_gpu_interpret", 3, 8, 5),
    Case("pallas_gpu_interpret", 2, 2, 7),
    Case("pallas_gpu_interpret", 7, 4, None),
    Case("pallas_gpu_interpret", 8, 1, 6, tokens=1),
    Case("pallas_gpu_interpret", 4, 4, None, "bfloat16"),
    # Many tiles, cut into shares of the context; tokens of a block cut into chunks.
    Case("pallas_gpu_interpret", 1, 1, 300, tokens=1, pages=256, stretches=(700, 90)),
    Case("pallas_gpu_interpret", 4, 32, 400, tokens=32, pages=256, stretches=(700, 90)),
]
SMALL = [case for case in CASES if case.cells < 100]
INTERPRETED = [case for case in CASES if case.implementation == "pallas_gpu_interpret"]
FEW = [SMALL[0], SMALL[4], SMALL[5], SMALL[8], SMALL[11], SMALL[12], *INTERPRETED[1:4]]


def _turned(x, positions):
    """Rotate [..., head_dim] in float64, element i paired with i + head_dim / 2."""
    angles = np.asarray(positions, np.float64)[..., None] * FREQUENCIES.astype(np.float64)
    pairs = x[..., : HEAD_DIM // 2] + 1j * x[..., HEAD_DIM // 2 :]
    pairs = pairs * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


@functools.cache
def _attention(case: Case):
    """The attention of one layer as a step calls it, compiled once per case."""
    name = dispatch.choose(case.implementation, HEAD_DIM, jnp.dtype(case.dtype), CACHE_DIR)
    assert name == case.implementation

    def attend(inputs, works):
        frequencies = jnp.asarray(FREQUENCIES)
        tail = attention_xla.tail_visible(inputs["positions"], inputs["tail_mask"], case.window)
        shifts = [rope.angles_at(one.items[:, work.SHIFT], frequencies) for one in works]
        return dispatch.attend(
            name,
            inputs["q"],
            inputs["k"],
            inputs["v"],
            inputs["positions"],
            inputs["token_rows"],
            tail,
            inputs["k_pages"],
            inputs["v_pages"],
            works,
            shifts,
            block_tokens=case.block_tokens,
            window=case.window,
            precision=jax.lax.Precision.HIGHEST,
        )

    return jax.jit(attend, compiler_options=options_for(name))


def _run(case, inputs, items_by_length):
    if case.implementation == "cpu" and attention_cpu.unsupported(HEAD_DIM, jnp.float32):
        pytest.skip(attention_cpu.unsupported(HEAD_DIM, jnp.float32))
    with jax.numpy_dtype_promotion("strict"):
        return np.asarray(_attention(case)(inputs, _works(case, items_by_length)))


def _inputs(case, seed):
    """Random tokens of three rows and a pool of random cells."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)

    heads = KV_HEADS * case.heads_per_kv_head
    pool = (KV_HEADS, case.pages, PAGE_SIZE, HEAD_DIM)
    return dict(
        q=normal(case.tokens, heads, HEAD_DIM),
        k=normal(case.tokens, KV_HEADS, HEAD_DIM),
        v=normal(case.tokens, KV_HEADS, HEAD_DIM),
        positions=rng.integers(0, case.cells, case.tokens).astype(np.int32),
        token_rows=np.sort(rng.integers(0, NUM_ROWS, case.tokens)).astype(np.int32),
        tail_mask=rng.random((case.tokens, case.tokens)) < 0.5,
        k_pages=normal(*pool),
        v_pages=normal(*pool),
    )


def _works(case, items_by_length):
    """Fill tables; what stands behind the count, if read, is an item that every row sees."""
    works = []
    for items, cells in zip(items_by_length, case.stretches, strict=True):
        table = np.tile(np.asarray([0, 0, cells, 0, 0, 0, NUM_ROWS, 0], np.int32), (CAPACITY, 1))
        table[: len(items)] = np.asarray(items, np.int32).reshape(-1, work.NUM_COLUMNS)
        count = np.asarray(len(items), np.int32)
        works.append(work.WorkList(items=table, count=count, cells_per_item=cells))
    return tuple(works)


def _random_items(case, seed):
    rng = np.random.default_rng(seed + 1)
    items_by_length = []
    for cells in case.stretches:
        items = []
        for _ in range(rng.integers(0, CAPACITY + 1)):
            first = rng.integers(0, cells)
            row_begin = rng.integers(0, NUM_ROWS)
            item = (
                rng.integers(0, case.cells - cells + 1),
                first,
                rng.integers(first, cells + 1),
                rng.integers(-cells, case.cells // 2),
                rng.integers(-40, 40),
                row_begin,
                rng.integers(row_begin, NUM_ROWS + 1),
                rng.integers(0, case.tokens // case.block_tokens),
            )
            items.append(tuple(int(value) for value in item))
        items_by_length.append(items)
    return items_by_length


def _visible(case, inputs, items_by_length, token):
    """Context cells a token sees, the shift of each, and the step's tokens it sees."""
    position, row = int(inputs["positions"][token]), int(inputs["token_rows"][token])

    def in_reach(others):
        distance = position - np.asarray(others, np.int64)
        return (distance >= 0) & (distance < (case.window or 2**40))

    cells, shifts = [], []
    for items in items_by_length:
        for start, first, fill, base, shift, row_begin, row_end, block in items:
            if block == token // case.block_tokens and row_begin <= row < row_end:
                index = np.arange(first, fill)
                index = index[in_reach(base + index)]
                cells += (start + index).tolist()
                shifts += [shift] * len(index)
    tail = np.flatnonzero(inputs["tail_mask"][token] & in_reach(inputs["positions"]))
    return cells, shifts, tail


def _reference(case, inputs, items_by_length):
    """One float64 softmax per token and head over all it sees; zeros where that is nothing."""
    q, k, v = (np.asarray(inputs[name], np.float64) for name in ("q", "k", "v"))
    pool = (KV_HEADS, case.cells, HEAD_DIM)
    k_cells, v_cells = (
        np.asarray(inputs[name], np.float64).reshape(pool) for name in ("k_pages", "v_pages")
    )
    out = np.zeros(q.shape)
    for token in range(case.tokens):
        cells, shifts, tail = _visible(case, inputs, items_by_length, token)
        if not cells and not len(tail):
            continue
        for head in range(q.shape[1]):
            kv_head = head // case.heads_per_kv_head
            # The query comes rotated at its position, a key at its position - shift.
            turned = _turned(np.tile(q[token, head], (len(cells), 1)), -np.asarray(shifts))
            scores = np.concatenate(
                [(turned * k_cells[kv_head, cells]).sum(-1), k[tail, kv_head] @ q[token, head]]
            )
            values = np.concatenate([v_cells[kv_head, cells], v[tail, kv_head]])
            weights = np.exp((scores - scores.max()) / math.sqrt(HEAD_DIM))
            out[token, head] = weights @ values / weights.sum()
    return out


def _nothing(case):
    return [[] for _ in case.stretches]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_one_softmax_over_everything_visible(case):
    for seed in range(12 if case in SMALL else 4):
        inputs = _inputs(case, seed)
        items = _random_items(case, seed)
        np.testing.assert_allclose(
            _run(case, inputs, items),
            _reference(case, inputs, items),
            atol=TOLERANCE[case.dtype],
            rtol=0,
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_empty_context_leaves_the_tail_alone(case):
    inputs = _inputs(case, 3)
    np.testing.assert_allclose(
        _run(case, inputs, _nothing(case)),
        _reference(case, inputs, _nothing(case)),
        atol=TOLERANCE[case.dtype],
        rtol=0,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_out_is_zero_where_nothing_is_visible(case):
    inputs = _inputs(case, 4)
    inputs["tail_mask"][:] = False
    blind = np.arange(0, case.tokens, 3)
    inputs["token_rows"][:] = 0
    inputs["token_rows"][blind] = 2**30
    inputs["positions"][:] = 19
    items = _nothing(case)
    items[0] = [(0, 2, 5, 14, 4, 0, 1, b) for b in range(case.tokens // case.block_tokens)]
    found = _run(case, inputs, items)
    assert (found[blind] == 0).all()
    seeing = np.setdiff1d(np.arange(case.tokens), blind)
    np.testing.assert_allclose(
        found[seeing],
        _reference(case, inputs, items)[seeing],
        atol=TOLERANCE[case.dtype],
        rtol=0,
    )
    assert (np.abs(found[seeing]).max(axis=(1, 2), initial=1e-9) > 0).all()


@pytest.mark.parametrize("case", [CASES[2], CASES[9], INTERPRETED[0]], ids=str)
def test_items_in_any_order_and_cut_anywhere_give_the_same_result(case):
    inputs = _inputs(case, 5)
    whole = [[(4, 0, 8, 2, 3, 0, 3, 0), (12, 0, 8, 4, -7, 0, 3, 0)], []]
    pieces = [
        [(12, 0, 8, 4, -7, 0, 3, 0), (4, 0, 4, 2, 3, 0, 3, 0)],
        [(9, 1, 3, 7, 3, 0, 3, 0), (7, 1, 3, 5, 3, 0, 3, 0)],
    ]
    np.testing.assert_allclose(
        _run(case, inputs, pieces), _run(case, inputs, whole), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("case", [CASES[1], CASES[9], INTERPRETED[1]], ids=str)
def test_moving_everything_by_a_table_edit_changes_nothing(case):
    """Only distances count: positions, bases and shifts grow alike, keys in the pool stay."""
    inputs, items = _inputs(case, 6), _random_items(case, 6)
    moved = dict(inputs, positions=inputs["positions"] + 50)
    for name in ("q", "k"):
        turned = _turned(np.asarray(inputs[name], np.float64), np.full((case.tokens, 1), 50))
        moved[name] = jnp.asarray(turned.astype(np.float32))
    edited = [[(*i[:3], i[3] + 50, i[4] + 50, *i[5:]) for i in part] for part in items]
    np.testing.assert_allclose(
        _run(case, moved, edited), _run(case, inputs, items), atol=5e-5, rtol=0
    )


@pytest.mark.parametrize("case", FEW, ids=str)
def test_query_tokens_of_other_rows_do_not_matter(case):
    inputs = _inputs(case, 7)
    inputs["tail_mask"] &= inputs["token_rows"][:, None] == inputs["token_rows"]
    items = _random_items(case, 7)
    before = _run(case, inputs, items)
    others = inputs["token_rows"] != inputs["token_rows"][0]
    for name in ("q", "k", "v"):
        inputs[name] = jnp.where(others[:, None, None], inputs[name] * 3, inputs[name])
    np.testing.assert_array_equal(before[~others], _run(case, inputs, items)[~others])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_inputs_give_the_same_bits(case):
    inputs, items = _inputs(case, 8), _random_items(case, 8)
    found = {_run(case, inputs, items).tobytes() for _ in range(4)}
    assert len(found) == 1


# What lies in cells that nobody sees


def _partly_filled(case):
    """Stretches of which only a part is visible, as around half-full pages."""
    items = _nothing(case)
    for block in range(case.tokens // case.block_tokens):
        items[0].append((0, 1, 5, 0, 2, 0, 3, block))
        items[1].append((21, 1, 3, 3, 0, 0, 3, block))
    return items


def _poison(case, inputs, name, cells, value):
    flat = np.array(inputs[name]).reshape(KV_HEADS, case.cells, HEAD_DIM)
    flat[:, cells] = value
    return inputs | {name: jnp.asarray(flat.reshape(inputs[name].shape))}


def _unseen(case):
    unseen = np.ones(case.cells, bool)
    for items in _partly_filled(case):
        for start, first, fill, *_ in items:
            unseen[start + first : start + fill] = False
    return unseen


@pytest.mark.parametrize("case", FEW, ids=str)
@pytest.mark.parametrize("name, value", [("k_pages", np.nan), ("v_pages", 1e30)])
def test_unused_cells_do_not_matter(case, name, value):
    inputs = _inputs(case, 8)
    before = _run(case, inputs, _partly_filled(case))
    inputs = _poison(case, inputs, name, _unseen(case), value)
    np.testing.assert_array_equal(_run(case, inputs, _partly_filled(case)), before)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_cells_outside_all_stretches_may_hold_anything(case):
    inputs = _inputs(case, 9)
    before = _run(case, inputs, _partly_filled(case))
    for name in ("k_pages", "v_pages"):
        inputs = _poison(case, inputs, name, np.arange(8, 21), np.nan)
    np.testing.assert_array_equal(_run(case, inputs, _partly_filled(case)), before)


@pytest.mark.parametrize("case", [case for case in FEW if case.implementation == "cpu"], ids=str)
def test_values_of_unused_cells_may_be_nan_in_the_cpu_kernel(case):
    inputs = _inputs(case, 8)
    before = _run(case, inputs, _partly_filled(case))
    inputs = _poison(case, inputs, "v_pages", _unseen(case), np.nan)
    np.testing.assert_array_equal(_run(case, inputs, _partly_filled(case)), before)


@pytest.mark.parametrize("case", [case for case in FEW if case.implementation == "xla"], ids=str)
def test_values_of_unused_cells_may_be_nan_in_plain_xla(case):
    inputs = _inputs(case, 8)
    before = _run(case, inputs, _partly_filled(case))
    inputs = _poison(case, inputs, "v_pages", _unseen(case), np.nan)
    np.testing.assert_array_equal(_run(case, inputs, _partly_filled(case)), before)


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
def test_interpreted_kernel_reads_no_unused_cell(case, name):
    inputs = _inputs(case, 8)
    before = _run(case, inputs, _partly_filled(case))
    inputs = _poison(case, inputs, name, _unseen(case), np.nan)
    np.testing.assert_array_equal(_run(case, inputs, _partly_filled(case)), before)


@pytest.mark.parametrize(
    "name, head_dim, page_size, dtype",
    [
        ("pallas_gpu_interpret", 64, 16, "bfloat16"),
        ("pallas_gpu_interpret", 64, 256, "float32"),
        ("pallas_gpu_interpret", 128, 64, "bfloat16"),
        ("pallas_gpu_interpret", 256, 128, "float32"),
        *(("cpu", head_dim, 64, "float32") for head_dim in (48, 64, 80, 256)),
    ],
)
def test_kernel_equals_plain_xla_at_every_head_dim(name, head_dim, page_size, dtype):
    if name == "cpu" and attention_cpu.unsupported(head_dim, jnp.float32):
        pytest.skip(attention_cpu.unsupported(head_dim, jnp.float32))
    dispatch.choose(name, head_dim, jnp.dtype(dtype), CACHE_DIR)
    rng = np.random.default_rng(head_dim)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    pool = (2, 1024 // page_size, page_size, head_dim)
    rows = [(0, 5, 600, -20, 9, 0, 1, 0), (300, 0, 400, 0, -70, 1, 2, 1), (9, 0, 1, 0, 0, 0, 2, 1)]
    items = work.WorkList(items=np.asarray(rows, np.int32), count=3, cells_per_item=600)
    inputs = (
        normal(4, 6, head_dim),
        normal(4, 2, head_dim),
        normal(4, 2, head_dim),
        np.asarray([500, 640, 300, 80], np.int32),
        np.asarray([0, 0, 1, 1], np.int32),
        np.tri(4, dtype=bool),
        normal(*pool),
        normal(*pool),
        (items,),
        (rope.angles_at(items.items[:, work.SHIFT], jnp.geomspace(1, 1e-3, head_dim // 2)),),
    )
    xla, kernel = (
        jax.jit(
            functools.partial(
                dispatch.attend, one, block_tokens=2, window=None,
                precision=jax.lax.Precision.HIGHEST,
            ),
            compiler_options=options_for(one),
        )(*inputs)
        for one in ("xla", name)
    )  # fmt: skip
    np.testing.assert_allclose(kernel, xla, atol=TOLERANCE[dtype], rtol=0)
    assert np.abs(xla).max() > 0.1


# What a batch must not change

ONE_BY_ONE = Case("pallas_gpu_interpret", 2, 1, None, tokens=4, pages=256, stretches=(700,))


def test_interpreted_kernel_gives_a_row_the_same_bits_in_any_place_and_company():
    case = ONE_BY_ONE
    inputs = _inputs(case, 10)
    inputs["tail_mask"][:] = np.eye(case.tokens, dtype=bool)
    inputs["token_rows"][:] = range(case.tokens)
    items = [(90 * t, 2, 150 * (t + 1), -30, 5 * t, t, t + 1, t) for t in range(case.tokens)]
    together = _run(case, inputs, [items])
    order = np.asarray([2, 0, 3, 1])
    moved = inputs | {name: inputs[name][order] for name in ("q", "k", "v", "positions")}
    place = np.argsort(order)
    moved_items = [(*i[:5], place[i[7]], place[i[7]] + 1, place[i[7]]) for i in items]
    np.testing.assert_array_equal(_run(case, moved, [moved_items]), together[order])
    alone = inputs | {"token_rows": np.asarray([work.PADDING_ROW] * 3 + [3], np.int32)}
    np.testing.assert_array_equal(_run(case, alone, [items[3:]])[3], together[3])


# The engine


def _interpreted(setup: tiny.Setup, name: str) -> tiny.Setup:
    sizes = dataclasses.replace(setup.sizes, implementation=name, stretch_cells=None)
    if name == "pallas_tpu_interpret":  # whole blocks, and as many cells
        pages = -(-2 * setup.sizes.num_cells // BLOCK_CELLS)
        sizes = dataclasses.replace(sizes, page_size=BLOCK_CELLS, num_pages=pages)
    return dataclasses.replace(setup, name=f"{setup.name}-{name}", sizes=sizes)


@pytest.mark.parametrize(
    "setup",
    [
        _interpreted(tiny.ROTATING, "pallas_gpu_interpret"),
        _interpreted(tiny.ROTATING, "pallas_tpu_interpret"),
        *(
            pytest.param(_interpreted(setup, f"pallas_{name}_interpret"), marks=pytest.mark.long)
            for setup in (tiny.GROUPED, tiny.WINDOWED)
            for name in ("gpu", "tpu")
        ),
    ],
    ids=lambda setup: setup.name,
)
def test_engine_verbs_equal_history_with_interpreted_kernels(setup):
    machine = machine_for(setup)
    stateful.run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            deadline=None,
            database=None,
            max_examples=10,
            stateful_step_count=25,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
    machine.tally.check_near_ties()
    assert machine.tally.events["slid"] and machine.tally.events["query"]


# Choosing an implementation


def test_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match='expected one of "auto", "xla", .*, got "gpu"'):
        dispatch.choose("gpu", HEAD_DIM, jnp.float32, CACHE_DIR)


@pytest.mark.parametrize(
    "head_dim, dtype, reason",
    [(8, jnp.float32, "multiple of 16"), (16, jnp.bfloat16, "float32"), (512, jnp.float32, "256")],
)
def test_cpu_kernel_says_what_it_cannot_run_and_auto_takes_xla(head_dim, dtype, reason):
    with pytest.raises(NotImplementedError, match=reason):
        dispatch.choose("cpu", head_dim, dtype, CACHE_DIR)
    assert dispatch.choose("auto", head_dim, dtype, CACHE_DIR) == "xla"


@pytest.mark.parametrize(
    "head_dim, dtype, reason",
    [
        (64, jnp.float32, "it runs on the GPU backend, this is cpu"),
        (80, jnp.float32, "powers of two.*got 80"),
        (512, jnp.bfloat16, "from 16 to 256, got 512"),
        (64, jnp.float16, "float32 or bfloat16, got float16"),
    ],
)
def test_gpu_kernel_says_what_it_cannot_run(head_dim, dtype, reason):
    with pytest.raises(NotImplementedError, match=reason):
        dispatch.choose("pallas_gpu", head_dim, dtype, CACHE_DIR)


def test_interpreted_kernel_needs_no_gpu_but_keeps_the_other_limits():
    assert dispatch.choose("pallas_gpu_interpret", 64, jnp.bfloat16, CACHE_DIR)
    with pytest.raises(NotImplementedError, match="got 80"):
        dispatch.choose("pallas_gpu_interpret", 80, jnp.float32, CACHE_DIR)


def test_auto_leaves_the_untried_gpu_kernel_alone_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [mock.Mock(compute_capability="9.0")])
    dispatch._took.cache_clear()
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert dispatch.choose("auto", 128, jnp.bfloat16, CACHE_DIR) == "xla"
        assert dispatch.choose("auto", 80, jnp.bfloat16, CACHE_DIR) == "xla"
        assert dispatch.choose("pallas_gpu", 128, jnp.bfloat16, CACHE_DIR) == "pallas_gpu"
    assert caplog.text.count("attention: xla (pallas_gpu: no device has tried it yet") == 1
    assert "attention: xla (pallas_gpu: Triton's tiles are powers of two" in caplog.text
    monkeypatch.setattr(jax, "devices", lambda: [mock.Mock(compute_capability="7.5")])
    with pytest.raises(NotImplementedError, match="8.0 or more, the device has 7.5"):
        dispatch.choose("pallas_gpu", 128, jnp.bfloat16, CACHE_DIR)


@pytest.mark.parametrize("name", ["xla", "cpu", "pallas_gpu"])
@pytest.mark.parametrize("num_cells", [1, 100, 1000, 5000])
def test_stretches_fit_the_pool_longest_first(name, num_cells):
    cells = dispatch.stretch_cells(name, num_cells)
    assert list(cells) == sorted(set(cells), reverse=True)
    assert 0 < cells[0] <= num_cells
