"""Cells of a session out of the pool in order of position, and back onto any pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxstate.executor import Executor
from jaxstate.kernels_pallas.selection import BLOCK_CELLS
from jaxstate.models.config import ModelConfig
from jaxstate.page_copy import PAGES_AT_ONCE
from jaxstate.pages import Entry, Growth

Cells = list[tuple[np.ndarray, np.ndarray]]
"""By layer, keys and values [num_kv_heads, cells, head_dim]; keys as they are stored, rotated."""


def described(model: ModelConfig, count: int) -> list[list[tuple[tuple[int, ...], np.dtype]]]:
    """Shape and dtype of the arrays of `count` cells, by layer."""
    shape = (model.num_kv_heads, count, model.head_dim)
    return [[(shape, np.dtype(model.dtypes.cache_dtype))] * 2 for _ in range(model.num_layers)]


def take(executor: Executor, entries: Sequence[Entry]) -> tuple[Cells, np.ndarray]:
    """Copy the cells that a table sees to host memory.

    Returns:
      the cells in order of position, and their shifts, [cells] int32.
    """
    size = executor.config.page_size
    pages = sorted({entry.page for entry in entries})
    place = {page: index * size for index, page in enumerate(pages)}
    where = [np.arange(e.first, e.fill) + place[e.page] for e in entries]
    index = np.concatenate([np.zeros(0, np.int64), *where])
    shifts = [np.full(e.fill - e.first, e.shift, np.int32) for e in entries]
    parts = executor.read_pages(pages) if pages else []
    shapes = executor.page_shapes

    def cells_of(leaf: int) -> np.ndarray:
        (heads, *_, width), dtype = shapes[leaf]
        whole = [part[leaf].reshape(heads, -1, width) for part in parts]
        return np.concatenate([np.empty((heads, 0, width), dtype), *whole], axis=1)[:, index]

    cells = [(cells_of(keys), cells_of(values)) for keys, values in _kv_leaves(executor)]
    return cells, np.concatenate([np.zeros(0, np.int32), *shifts])


def put(executor: Executor, growth: Growth, cells: Cells) -> None:
    """Write cells to the fresh pages of a growth, whose first cell is its first page's first."""
    if not growth.new_pages:
        return
    size = executor.config.page_size
    padded = -(-len(growth.new_pages) // PAGES_AT_ONCE) * PAGES_AT_ONCE
    # The last page fills the last part, see page_copy.padded.
    order = np.minimum(np.arange(padded), len(growth.new_pages) - 1)
    place = {page: at * size for at, page in enumerate(growth.new_pages)}
    base = np.array([place[cell // size] for cell in growth.cells.tolist()])
    index = base + growth.cells % size
    leaves: dict[int, np.ndarray] = {}
    for layer, (keys, values) in zip(cells, _kv_leaves(executor), strict=True):
        for leaf, array in zip((keys, values), layer, strict=True):
            whole = np.zeros(
                (array.shape[0], len(growth.new_pages) * size, array.shape[-1]), array.dtype
            )
            whole[:, index] = array
            leaves[leaf] = whole.reshape(array.shape[0], -1, size, array.shape[-1])[:, order]
        if executor.config.selector is not None:
            leaves[values + 1], leaves[values + 2] = _bounds(leaves[keys], index, order, size)
    parts = [
        [leaves[leaf][:, at : at + PAGES_AT_ONCE] for leaf in sorted(leaves)]
        for at in range(0, padded, PAGES_AT_ONCE)
    ]
    executor.write_pages(growth.new_pages, parts)


def _kv_leaves(executor: Executor) -> list[tuple[int, int]]:
    """Where keys and values of each layer are among a pool's arrays."""
    count = 2 if executor.config.selector is None else 4
    return [(at, at + 1) for at in range(0, len(executor.page_shapes), count)]


def _bounds(
    keys: np.ndarray, index: np.ndarray, order: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the blocks of cells that were written; see key_bounds.

    Args:
      keys: [heads, pages, page_size, head_dim].
      index: of the written cells among those of the pages before they were put in order.
    """
    written = np.zeros((order.max() + 1) * size, bool)
    written[index] = True
    seen = written.reshape(-1, size)[order].reshape(1, len(order), -1, BLOCK_CELLS, 1)
    blocks = keys.reshape(keys.shape[0], len(order), -1, BLOCK_CELLS, keys.shape[-1])
    wide = blocks.astype(np.float32)
    low = np.where(seen, wide, np.inf).min(axis=3)
    high = np.where(seen, wide, -np.inf).max(axis=3)
    return low.astype(keys.dtype), high.astype(keys.dtype)
