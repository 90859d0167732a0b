"""Attention over chosen blocks: only what a head's list names is seen, or even read."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kernels_attention as dense
from interpreted import options_for
from test_kernels_attention import Case

from jaxstate.kernels_pallas import attention_xla, dispatch, rope, work
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection, num_blocks

CASES = [
    Case("xla", 3, 8, None, pages=64, stretches=(180, 20)),
    Case("xla", 2, 2, 90, pages=64, stretches=(180, 20)),
    Case("xla", 4, 4, None, "bfloat16", pages=64, stretches=(180, 20)),
    Case("pallas_gpu_interpret", 3, 8, None, pages=64, stretches=(180, 20)),
    Case("pallas_gpu_interpret", 2, 2, 90, pages=64, stretches=(180, 20)),
    Case("pallas_gpu_interpret", 4, 4, None, "bfloat16", pages=64, stretches=(180, 20)),
    # A pool that ends within a block; many tiles and shares.
    Case("pallas_gpu_interpret", 1, 1, None, tokens=1, pages=255, stretches=(700, 90)),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)


@functools.cache
def _attention(case: Case, selected: bool):
    def attend(inputs, works, selection):
        tail = attention_xla.tail_visible(inputs["positions"], inputs["tail_mask"], case.window)
        frequencies = jnp.asarray(dense.FREQUENCIES)
        return dispatch.attend(
            case.implementation, inputs["q"], inputs["k"], inputs["v"], inputs["positions"],
            inputs["token_rows"], tail, inputs["k_pages"], inputs["v_pages"], works,
            [rope.angles_at(one.items[:, work.SHIFT], frequencies) for one in works],
            block_tokens=case.block_tokens, window=case.window,
            precision=jax.lax.Precision.HIGHEST, selection=selection if selected else None,
        )  # fmt: skip

    # Unoptimized products in bf16 differ from program to program.
    options = options_for(case.implementation) if case.dtype == "float32" else None
    return jax.jit(attend, compiler_options=options)


def _run(case, inputs, items, chosen=None):
    """Attend; chosen: blocks of each head, None = no selection."""
    selection = None if chosen is None else _selection(case, chosen)
    with jax.numpy_dtype_promotion("strict"):
        attend = _attention(case, chosen is not None)
        return np.asarray(attend(inputs, dense._works(case, items), selection))


def _selection(case, chosen):
    """Lists with garbage behind their counts: blocks that other tokens would see."""
    blocks = np.random.default_rng(0).integers(
        0, num_blocks(case.cells), (len(chosen), num_blocks(case.cells) + 3)
    )
    for head, mine in enumerate(chosen):
        blocks[head, : len(mine)] = mine
    count = np.asarray([len(mine) for mine in chosen], np.int32)
    return Selection(blocks=jnp.asarray(blocks, jnp.int32), count=jnp.asarray(count))


def _all(case):
    return [np.arange(num_blocks(case.cells))] * dense.KV_HEADS


def _some(case, seed):
    """About half of the blocks, others for each head, none at all for some."""
    rng = np.random.default_rng(seed)
    drawn = [rng.random(num_blocks(case.cells)) < rng.choice([0, 0.5]) for _ in range(2)]
    return [np.flatnonzero(mine) for mine in drawn]


def _reference(case, inputs, items, chosen):
    """Per head, what the dense reference gives where only listed cells exist."""
    out = np.zeros(inputs["q"].shape)
    shared = case.heads_per_kv_head
    for head, mine in enumerate(chosen):
        listed = np.repeat(np.isin(np.arange(num_blocks(case.cells)), mine), BLOCK_CELLS)
        kept = []
        for part in items:
            kept.append(
                [
                    (start, at, at + 1, *rest)
                    for start, first, fill, *rest in part
                    for at in range(first, fill)
                    if listed[start + at]
                ]
            )
        heads = slice(head * shared, (head + 1) * shared)
        out[:, heads] = dense._reference(case, inputs, kept)[:, heads]
    return out


@cases
def test_all_blocks_give_what_no_selection_gives_bitwise(case):
    for seed in range(3):
        inputs, items = dense._inputs(case, seed), dense._random_items(case, seed)
        found = _run(case, inputs, items, _all(case))
        np.testing.assert_array_equal(found, _run(case, inputs, items))


@cases
def test_only_listed_blocks_are_seen_and_the_others_may_hold_nan(case):
    for seed in range(4):
        inputs, items = dense._inputs(case, seed), dense._random_items(case, seed)
        chosen = _some(case, seed)
        wanted = _reference(case, inputs, items, chosen)
        for name in ("k_pages", "v_pages"):
            flat = np.array(inputs[name]).reshape(dense.KV_HEADS, case.cells, dense.HEAD_DIM)
            for head, mine in enumerate(chosen):
                listed = np.isin(np.arange(case.cells) // BLOCK_CELLS, mine)
                flat[head, ~listed] = np.nan
            inputs[name] = jnp.asarray(flat.reshape(inputs[name].shape))
        np.testing.assert_allclose(
            _run(case, inputs, items, chosen), wanted, atol=dense.TOLERANCE[case.dtype], rtol=0
        )


@cases
def test_empty_lists_leave_the_tail_alone(case):
    inputs = dense._inputs(case, 3)
    found = _run(case, inputs, dense._random_items(case, 3), [[], []])
    wanted = dense._reference(case, inputs, dense._nothing(case))
    np.testing.assert_allclose(found, wanted, atol=dense.TOLERANCE[case.dtype], rtol=0)


def test_kernel_for_cpus_refuses_a_selection():
    case = Case("cpu", 1, 8, None)
    inputs = dense._inputs(case, 0)
    with pytest.raises(NotImplementedError, match='cannot select blocks; use implementation "xla"'):
        _run(case, inputs, dense._nothing(case), _all(case))
