"""Proof that the kernels' tests see: one small fault at a time in a kernel, each of which shows."""

from __future__ import annotations

import numpy as np
import pytest
import test_kernels_attention as dense
import test_kernels_block_selector as bounds
import test_kernels_selection as selected
from test_kernels_attention import Case
from test_oracle_mutation import Fault, on_host

from jaxstate.kernels_pallas import attention_gpu, block_selector, key_bounds, tiles

CASE = Case("pallas_gpu_interpret", 3, 4, 40, pages=64, stretches=(180, 20))

KERNEL = [
    on_host(name, attention_gpu, "_kernel", old, new)
    for name, old, new in (
        ("cells behind an item's fill are seen", "(cell < fill)", "(cell <= fill)"),
        ("an item's first cell is hidden", "(cell >= first)", "(cell > first)"),
        ("cells behind a token are seen", "(distance >= 0)", "(distance >= -1)"),
        ("a window is one too long", "distance < window", "distance <= window"),
        ("rows see what the next row sees", "(token_rows < row_end)", "(token_rows <= row_end)"),
        ("queries are turned the wrong way", "+ partner_ref[...]", "- partner_ref[...]"),
        ("a new peak keeps old sums as they are", "total * kept", "total"),
        ("a tile is attended at its neighbour's place", "(tile_idx - begin)", "(tile_idx - end)"),
        ("a share misses its last tile", "(tile_end, end),", "(tile_end, end) - 1,"),
    )
]  # fmt: skip
PLAN = [
    on_host(name, tiles, "plan", old, new)
    for name, old, new in (
        ("items of other blocks are read", "== block)", ">= block)"),
        ("the window's oldest cells are left out", "oldest - base)", "oldest - base + 20)"),
    )
]  # fmt: skip
CHOICE = [
    on_host(name, module, function, old, new)
    for name, module, function, old, new in (
        (
            "an item's last block is left out", tiles, "plan",
            "-(-fill // BLOCK_CELLS)", "fill // BLOCK_CELLS",
        ),
        (
            "garbage behind a list is read", attention_gpu, "_kernel",
            "places < end_place", "places <= end_place",
        ),
        (
            "cells of a block are mixed up", attention_gpu, "_kernel",
            "lanes % BLOCK_CELLS", "lanes % 8",
        ),
        (
            "a list is read from a neighbour on", tiles, "_places",
            "searchsorted(one, flat)", "searchsorted(one, flat, side='right')",
        ),
    )
]  # fmt: skip
BOUNDS = [
    on_host(f"bounds: {old}", key_bounds, "write", old, new)
    for old, new in (("jnp.inf, keys)", "-1e9, keys)"), ("> last[", ">= last["))
]


def _dense_differs() -> bool:
    dense._attention.cache_clear()
    return any(
        _differs(dense._run(CASE, inputs, items), dense._reference(CASE, inputs, items))
        for inputs, items in (
            (dense._inputs(CASE, n), dense._random_items(CASE, n)) for n in range(3)
        )
    )


def _selected_differs() -> bool:
    selected._attention.cache_clear()
    found = []
    for seed in range(3):
        inputs, items = dense._inputs(CASE, seed), dense._random_items(CASE, seed)
        chosen = selected._some(CASE, seed)
        wanted = selected._reference(CASE, inputs, items, chosen)
        found.append(_differs(selected._run(CASE, inputs, items, chosen), wanted))
    return any(found)


def _differs(found, wanted) -> bool:
    return not np.allclose(found, wanted, atol=dense.TOLERANCE[CASE.dtype], rtol=0)


@pytest.fixture(autouse=True)
def _compiled_anew():
    """Nothing compiled with a fault outlives it."""
    yield
    dense._attention.cache_clear()
    selected._attention.cache_clear()


def test_interpreted_kernels_without_a_fault_equal_the_reference():
    assert not _dense_differs() and not _selected_differs()


@pytest.mark.parametrize("fault", [*KERNEL, *PLAN], ids=lambda fault: fault.name)
def test_mutation_of_the_interpreted_kernel_shows(fault: Fault, monkeypatch):
    fault.plant(monkeypatch)
    assert _dense_differs()


@pytest.mark.parametrize("fault", CHOICE, ids=lambda fault: fault.name)
def test_mutation_of_reading_by_list_shows_in_the_interpreted_kernel(fault: Fault, monkeypatch):
    fault.plant(monkeypatch)
    assert _selected_differs()


@pytest.mark.parametrize("fault", BOUNDS, ids=lambda fault: fault.name)
def test_mutation_of_bounds_shows(fault: Fault, monkeypatch):
    fault.plant(monkeypatch)
    bounds._write.clear_cache()
    with pytest.raises(AssertionError):
        bounds.test_bounds_are_those_of_the_keys_written_whatever_lay_there_before(0)
    bounds._write.clear_cache()


@pytest.mark.parametrize(
    "old, new",
    [
        ("jnp.maximum(turned, 0)", "turned"),
        ("angles[item_idx].reversed", "angles[item_idx]"),
        ("(oldest <= positions[:, None])", "(newest <= positions[:, None])"),
        ("jnp.argsort(-scores", "jnp.argsort(scores"),
        (".max(axis=1)\n", ".min(axis=1)\n"),
    ],
)
def test_mutation_of_the_choice_of_blocks_shows(old, new, monkeypatch):
    on_host("choice", block_selector, "select", old, new).plant(monkeypatch)
    with pytest.raises(AssertionError):
        for kept in (0.05, 0.3, 0.6):
            bounds.test_blocks_with_the_highest_bounds_are_kept(kept)
        bounds.test_everything_kept_is_everything_seen()
