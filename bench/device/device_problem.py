"""One layer's attention as a step calls it: tokens, their contexts in a pool, and the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_sizes import ROPE, Heads
from device_timing import noise

from jaxstate import rows as rows_module
from jaxstate.config import EngineConfig
from jaxstate.kernels_pallas import attention_xla, dispatch
from jaxstate.kernels_pallas import work as work_columns
from jaxstate.kernels_pallas.rope import angles_at
from jaxstate.kernels_pallas.selection import Selection
from jaxstate.models.config import DtypePolicy
from jaxstate.pages import Stretch
from jaxstate.rows import Group, RowInput
from jaxstate.state import Rows, StepShape

Pools = Sequence[tuple[jax.Array, jax.Array]]
"""k_pages and v_pages of each layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Static sizes of an attention.

    Attributes:
      dtype: "float32" or "bfloat16".
      table_len: work items of one length at most; None = what an engine takes.
    """

    heads: Heads
    dtype: str
    num_pages: int
    page_size: int
    shape: StepShape
    window: int | None = None
    table_len: int | None = None

    @property
    def pages_shape(self) -> tuple[int, ...]:
        """Shape of the pages of keys, and of values."""
        return (self.heads.num_kv_heads, self.num_pages, self.page_size, self.heads.head_dim)

    def pack(self, groups: Sequence[Group], name: str) -> Rows:
        """Lay groups out as an engine does for this implementation, on the device."""
        num_cells = self.num_pages * self.page_size
        config = EngineConfig(
            num_pages=self.num_pages, page_size=self.page_size, context_len=num_cells,
            evict_quantum=1, step_shapes=(self.shape,), table_capacity=self.table_len,
            stretch_cells=dispatch.stretch_cells(name, num_cells),
        )  # fmt: skip
        return jax.device_put(rows_module.pack(groups, self.shape, config))

    def tokens(self, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Draw queries, keys and values of the step's own tokens: [tokens, heads, head_dim]."""
        heads = (self.heads.num_heads, self.heads.num_kv_heads, self.heads.num_kv_heads)
        q, k, v = (
            noise(
                np.uint32(seed + index), np.float32(1),
                shape=(self.shape.num_tokens, count, self.heads.head_dim), dtype=self.dtype,
            )
            for index, count in enumerate(heads)
        )  # fmt: skip
        return q, k, v

    def pages(self, seed: int) -> jax.Array:
        """Draw keys or values of the pool."""
        return noise(np.uint32(seed), np.float32(1), shape=self.pages_shape, dtype=self.dtype)


def attention(
    name: str,
    layout: Layout,
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    pools: Pools,
    rows: Rows,
    selection: Selection | None = None,
) -> jax.Array:
    """Attend through the layers one after another: [tokens, num_heads, head_dim] f32.

    What a layer gives are the next one's queries, so that none is computed beside another.
    """
    q, k, v = tokens
    frequencies = jnp.asarray(ROPE.inverse_frequencies(layout.heads.head_dim))
    tail = attention_xla.tail_visible(rows.positions, rows.tail_mask, layout.window)
    shifts = [angles_at(one.items[:, work_columns.SHIFT], frequencies) for one in rows.work]
    out = q
    for k_pages, v_pages in pools:
        out = dispatch.attend(
            name, out.astype(q.dtype), k, v, rows.positions, rows.token_rows, tail,
            k_pages, v_pages, rows.work, shifts, block_tokens=layout.shape.block_tokens,
            window=layout.window, precision=DtypePolicy.named(layout.dtype).precision,
            selection=selection,
        )  # fmt: skip
    return out


def row(context_len: int, tokens: int = 1, context: Sequence[Stretch] = ()) -> RowInput:
    """Return new tokens behind a context; attention asks for neither ids, cells nor outputs."""
    none = np.zeros(tokens, np.int32)
    positions = context_len + np.arange(tokens, dtype=np.int32)
    return RowInput(token_ids=none, positions=positions, cells=none, shifts=none, context=context)


def apart(num_rows: int, context_len: int) -> list[Group]:
    """Rows of one token, each with a stretch of its own; they follow one another in the pool."""
    return [
        Group(rows=[row(context_len, context=[stretch(index * context_len, context_len)])])
        for index in range(num_rows)
    ]


def together(num_rows: int, context_len: int) -> list[Group]:
    """Rows of one token that share one stretch, which is read once for all of them."""
    return [Group(rows=[row(context_len)] * num_rows, context=[stretch(0, context_len)])]


def stretch(begin: int, length: int) -> Stretch:
    """Return cells that stand at positions 0 and following."""
    return Stretch(begin=begin, end=begin + length, base=-begin, shift=0)


def all_stretches(groups: Iterable[Group]) -> list[Stretch]:
    """Return every stretch that some row sees."""
    return [
        one
        for group in groups
        for context in (group.context, *(row.context for row in group.rows))
        for one in context
    ]


def lower(function: Any, *args: Any, **options: Any) -> Any:
    """Trace a function for its arguments."""
    return jax.jit(function, **options).lower(*args)
