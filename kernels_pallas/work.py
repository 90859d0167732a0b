"""The work list: which stretches of the pool a step's query tokens read."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

START, FIRST, FILL, BASE, SHIFT, ROW_BEGIN, ROW_END, BLOCK = range(8)
NUM_COLUMNS = 8

PADDING_ROW = 2**30
"""Row of a padding token: no work item names it, and implementations may skip such tokens."""


@flax.struct.dataclass
class WorkList:
    """Table entries as one step reads them, each a stretch of `cells_per_item` pool cells.

    An item is eight int32: cells `start + first … start + fill - 1` of the flat pool are visible;
    cell `start + i` stands at position `base + i` (base may be negative) and its key was rotated
    at `base + i - shift`; only tokens of rows `row_begin … row_end - 1` see it; `block` is the
    block of query tokens that visits it. `start + cells_per_item` never passes the pool's end.

    Attributes:
      items: [capacity, 8] int32; rows past `count` are not read.
      count: [] int32, items in use.
      cells_per_item: length of every stretch, in cells.
    """

    items: jax.Array
    count: jax.Array
    cells_per_item: int = flax.struct.field(pytree_node=False)


def used_items(work: WorkList) -> jax.Array:
    """Return the items, those past the count made empty, so that lists can follow one another."""
    index = jnp.arange(work.items.shape[0], dtype=jnp.int32)
    return jnp.where(index[:, None] < work.count, work.items, 0)
