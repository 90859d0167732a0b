"""Packing what sessions want forwarded into the Rows of one step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxstate.config import EngineConfig
from jaxstate.errors import CapacityError
from jaxstate.kernels_pallas.work import NUM_COLUMNS, PADDING_ROW, WorkList
from jaxstate.pages import Stretch
from jaxstate.state import Rows, StepShape

LEAST_TOKENS = 8
LEAST_BLOCK_TOKENS = 3
"""See step_cost; measured on CPUs, where one token attends to 4,096 cells in 6.7 ms and 24 tokens
in 52, and a step of one token takes as long as one of eight less their attention."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowInput:
    """New tokens of one row.

    Attributes:
      token_ids: [tokens] int32.
      positions: [tokens] int32.
      cells: [tokens] int32 pool cells to write.
      shifts: [tokens] int32, see Entry.
      context: cells only this row sees.
      wanted: token indices whose next-token distributions are wanted.
      parents: index of the token that each one follows, -1 for the first; None = a plain sequence.
        A token sees its ancestors.
      selects: whether a selector may leave out blocks of the row's context.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    cells: np.ndarray
    shifts: np.ndarray
    context: Sequence[Stretch] = ()
    wanted: Sequence[int] = ()
    parents: Sequence[int] | None = None
    selects: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that share a context, which is read once for all of them."""

    rows: Sequence[RowInput]
    context: Sequence[Stretch] = ()


def choose_shape(
    groups: Sequence[Group], shapes: Sequence[StepShape], token_cells: float
) -> StepShape | None:
    """Return the shape in which the groups cost least, the first of equals; None = none fits.

    Args:
      token_cells: as in `step_cost`.
    """
    costs = [(step_cost(groups, shape, token_cells), index) for index, shape in enumerate(shapes)]
    cost, index = min(costs, default=(math.inf, 0))
    return None if cost == math.inf else shapes[index]


def step_cost(groups: Sequence[Group], shape: StepShape, token_cells: float) -> float:
    """Estimate what a step costs, in context cells that one query token attends to.

    A step reads all weights, which a few tokens do not pay for: it costs that of
    LEAST_TOKENS at least. A block of query tokens visits each of its contexts whole, with all its
    tokens, and reading a cell costs as much as attending LEAST_BLOCK_TOKENS to it.

    Args:
      token_cells: cells whose attention costs as much as all else that a token does.
    Returns:
      inf where the groups do not fit.
    """
    block = shape.block_tokens
    wanted = sum(len(row.wanted) for group in groups for row in group.rows)
    at, visited = 0, 0
    for group in groups:
        if block < shape.num_tokens:
            at = -(-at // block) * block
        first = at
        for row in group.rows:
            visited += _cells(row.context) * len(_blocks(at, len(row.token_ids), block))
            at += len(row.token_ids)
        visited += _cells(group.context) * len(_blocks(first, at - first, block))
    if at > shape.num_tokens or wanted > shape.num_rows:
        return math.inf
    linear = token_cells * max(shape.num_tokens, LEAST_TOKENS)
    # Shapes of fewer tokens are never worse: they break ties among the smallest.
    return linear + visited * max(block, LEAST_BLOCK_TOKENS) + shape.num_tokens


def _cells(context: Sequence[Stretch]) -> int:
    return sum(stretch.end - stretch.begin for stretch in context)


def pack(groups: Sequence[Group], shape: StepShape, config: EngineConfig) -> Rows:
    """Lay groups out as the Rows of one step.

    Outputs come in the order of groups, rows and `wanted`. With several blocks each group starts
    a new one, so that no block visits a context that none of its tokens sees.

    Raises:
      CapacityError: a step would read more stretches than the table holds.
    """
    tokens = shape.num_tokens
    token_ids = np.zeros(tokens, np.int32)
    positions = np.zeros(tokens, np.int32)
    token_rows = np.full(tokens, PADDING_ROW, np.int32)
    selects = np.zeros(tokens, bool)
    write_cells = np.full(tokens, config.num_cells, np.int32)
    write_shifts = np.zeros(tokens, np.int32)
    tail_mask = np.eye(tokens, dtype=bool)
    output_tokens = np.zeros(shape.num_rows, np.int32)
    sizes = config.stretch_cells
    assert sizes is not None, "the executor fills in the implementation's sizes"
    items: list[list[tuple[int, ...]]] = [[] for _ in sizes]
    num_outputs = 0
    row_idx = 0
    at = 0
    for group in groups:
        if shape.block_tokens < tokens:
            at = -(-at // shape.block_tokens) * shape.block_tokens
        first_row, first_token = row_idx, at
        for row in group.rows:
            count = len(row.token_ids)
            span = slice(at, at + count)
            token_ids[span] = row.token_ids
            positions[span] = row.positions
            token_rows[span] = row_idx
            selects[span] = row.selects
            write_cells[span] = row.cells
            write_shifts[span] = row.shifts
            tail_mask[span, span] = _sees(count, row.parents)
            for index in row.wanted:
                output_tokens[num_outputs] = at + index
                num_outputs += 1
            blocks = _blocks(at, count, shape.block_tokens)
            _cover(items, row.context, sizes, config.num_cells, row_idx, row_idx + 1, blocks)
            row_idx += 1
            at += count
        blocks = _blocks(first_token, at - first_token, shape.block_tokens)
        _cover(items, group.context, sizes, config.num_cells, first_row, row_idx, blocks)
    # numpy arrays all of them: they go to the device with the call
    fields: dict[str, Any] = {
        "token_ids": token_ids,
        "positions": positions,
        "token_rows": token_rows,
        "selects": selects,
        "write_cells": write_cells,
        "write_shifts": write_shifts,
        "tail_mask": tail_mask,
        "output_tokens": output_tokens,
        "num_outputs": np.asarray(num_outputs, np.int32),
        "allowed_idx": np.zeros(shape.num_rows, np.int32),
    }
    work = tuple(
        _work_list(rows, cells, config.table_len) for rows, cells in zip(items, sizes, strict=True)
    )
    return Rows(work=work, **fields)


def check_context(
    context: Sequence[Stretch], extra_pages: int, shape: StepShape, config: EngineConfig
) -> None:
    """Refuse now a context that `pack` would refuse later.

    Args:
      context: what the first step reads.
      extra_pages: pages that later steps read too; each may lie apart.
      shape: of the steps.
    Raises:
      CapacityError: as from `pack`.
    """
    sizes = config.stretch_cells
    assert sizes is not None, "the executor fills in the implementation's sizes"
    items: list[list[tuple[int, ...]]] = [[] for _ in sizes]
    blocks = range(shape.num_tokens // shape.block_tokens)
    _cover(items, context, sizes, config.num_cells, 0, 1, blocks)
    extra = extra_pages * -(-config.page_size // sizes[-1]) * len(blocks)
    for rows, cells in zip(items, sizes, strict=True):
        _check_count(len(rows) + extra, cells, config.table_len)


def _sees(count: int, parents: Sequence[int] | None) -> np.ndarray:
    """[tokens, tokens] bool: causal, or each token and its ancestors."""
    if parents is None:
        return np.tril(np.ones((count, count), bool))
    sees = np.eye(count, dtype=bool)
    for index, parent in enumerate(parents):
        if parent >= 0:
            sees[index] |= sees[parent]
    return sees


def _blocks(first_token: int, count: int, block_tokens: int) -> range:
    """Blocks that hold tokens first_token … first_token + count - 1."""
    return range(first_token // block_tokens, -(-(first_token + count) // block_tokens))


def _cover(
    items: list[list[tuple[int, ...]]],
    context: Sequence[Stretch],
    sizes: tuple[int, ...],
    num_cells: int,
    row_begin: int,
    row_end: int,
    blocks: range,
) -> None:
    """Cover stretches by work items: long ones first, the rest by short ones."""
    for begin, end, base, shift in context:
        while begin < end:
            size_idx = _item_size(end - begin, sizes)
            cells = sizes[size_idx]
            start = min(begin, num_cells - cells)
            stop = min(begin + cells, end)
            for block in blocks:
                items[size_idx].append(
                    (
                        start,
                        begin - start,
                        stop - start,
                        base + start,
                        shift,
                        row_begin,
                        row_end,
                        block,
                    )
                )
            begin = stop


def _item_size(cells: int, sizes: Sequence[int]) -> int:
    """Choose the longest size that is more than half used, else the shortest."""
    for index, size in enumerate(sizes[:-1]):
        if 2 * cells > size:
            return index
    return len(sizes) - 1


def _check_count(count: int, cells: int, capacity: int) -> None:
    if count > capacity:
        raise CapacityError(
            f"a step reads {count} stretches of {cells} cells, the table holds {capacity}; "
            "raise table_capacity or forward fewer rows at once"
        )


def _work_list(rows: list[tuple[int, ...]], cells: int, capacity: int) -> WorkList:
    _check_count(len(rows), cells, capacity)
    table = np.zeros((capacity, NUM_COLUMNS), np.int32)
    if rows:
        rows.sort(key=lambda row: (row[7], row[4]))
        table[: len(rows)] = rows
    fields: dict[str, Any] = {"items": table, "count": np.asarray(len(rows), np.int32)}
    return WorkList(cells_per_item=cells, **fields)
