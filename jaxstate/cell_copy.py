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
    pages = list(dict.fromkeys(entry.page for entry in entries))
    place = {page: at * size for at, page in enumerate(pages)}
    where = [np.arange(e.first, e.fill) + place[e.page] for e in entries]
    index = np.concatenate([np.zeros(0, np.int64), *where])
    shifts = [np.full(e.fill - e.first, e.shift, np.int32) for e in entries]
    shapes = executor.page_shapes

    def empty(leaf: int) -> np.ndarray:
        (heads, *_, width), dtype = shapes[leaf]
        return np.empty((heads, len(index), width), dtype)

    cells = [(empty(keys), empty(values)) for keys, values in _kv_leaves(executor)]
    width = PAGES_AT_ONCE * size
    for number, part in enumerate(executor.read_pages(pages)):
        to = np.flatnonzero(index // width == number)
        origin = _run(index[to] - number * width)
        for layer, leaves in zip(cells, _kv_leaves(executor), strict=True):
            for array, leaf in zip(layer, leaves, strict=True):
                array[:, _run(to)] = part[leaf].reshape(array.shape[0], width, -1)[:, origin]
    return cells, np.concatenate([np.zeros(0, np.int32), *shifts])


def _run(index: np.ndarray) -> slice | np.ndarray:
    """Return an index as a slice if it is one, as it is as good as always: copies are faster."""
    begin = int(index[0])
    is_run = np.array_equal(index, np.arange(begin, begin + len(index)))
    return slice(begin, begin + len(index)) if is_run else index


def put(executor: Executor, growth: Growth, cells: Cells) -> None:
    """Write cells to the fresh pages of a growth, whose first cell is its first page's first."""
    if not growth.new_pages:
        return
    size = executor.config.page_size
    place = {page: at * size for at, page in enumerate(growth.new_pages)}
    base = np.array([place[cell // size] for cell in growth.cells.tolist()])
    index = base + growth.cells % size
    has_bounds = executor.config.selector is not None

    def part(first: int) -> list[np.ndarray]:
        """Return what belongs on some pages, made when it is needed: memory is used again."""
        pages = min(PAGES_AT_ONCE, len(growth.new_pages) - first)
        begin, end = np.searchsorted(index, [first * size, (first + pages) * size])
        where = index[begin:end] - first * size
        leaves = []
        for layer in cells:
            keys, values = (_on_pages(array[:, begin:end], where, pages, size) for array in layer)
            leaves += [keys, values, *(_bounds(keys, where, pages, size) if has_bounds else ())]
        return leaves

    executor.write_pages(
        growth.new_pages, map(part, range(0, len(growth.new_pages), PAGES_AT_ONCE))
    )


def _on_pages(array: np.ndarray, where: np.ndarray, pages: int, size: int) -> np.ndarray:
    """Spread cells over pages: [heads, PAGES_AT_ONCE, page_size, head_dim].

    The last page fills those behind it, see page_copy.padded.
    """
    heads, count, width = array.shape
    if count == PAGES_AT_ONCE * size:  # as good as always: no copy yet
        return array.reshape(heads, PAGES_AT_ONCE, size, width)
    whole = np.zeros((heads, PAGES_AT_ONCE * size, width), array.dtype)
    whole[:, _run(where)] = array
    paged = whole.reshape(heads, PAGES_AT_ONCE, size, width)
    paged[:, pages:] = paged[:, pages - 1 : pages]
    return paged


def _kv_leaves(executor: Executor) -> list[tuple[int, int]]:
    """Where keys and values of each layer are among a pool's arrays."""
    count = 2 if executor.config.selector is None else 4
    return [(at, at + 1) for at in range(0, len(executor.page_shapes), count)]


def _bounds(
    keys: np.ndarray, where: np.ndarray, pages: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the blocks of cells that were written; see key_bounds.

    Args:
      keys: [heads, PAGES_AT_ONCE, page_size, head_dim], see _on_pages.
      where: of the written cells among those of the pages.
    """
    written = _on_pages(np.ones((1, len(where), 1), bool), where, pages, size)
    seen = written.reshape(1, PAGES_AT_ONCE, -1, BLOCK_CELLS, 1)
    blocks = keys.reshape(keys.shape[0], PAGES_AT_ONCE, -1, BLOCK_CELLS, keys.shape[-1])
    wide = blocks.astype(np.float32)
    low = np.where(seen, wide, np.inf).min(axis=3)
    high = np.where(seen, wide, -np.inf).max(axis=3)
    return low.astype(keys.dtype), high.astype(keys.dtype)
