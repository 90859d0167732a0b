"""Which blocks of a context attention reads: a list per key/value head, taken out of the table."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

BLOCK_CELLS = 16
"""Cells of a block; block b holds cells 16 * b … 16 * b + 15 of the flat pool."""

_BEHIND_ALL = 2**31 - 1


@flax.struct.dataclass
class Selection:
    """Blocks of the pool that a layer's key/value heads may read; what no list names is not seen.

    A cell is visible when a work item shows it and its head's list names its block. All blocks
    give what no selection gives, bitwise. The step's own tokens are always seen.

    Attributes:
      blocks: [num_kv_heads, capacity] int32, ascending, none twice; those past the count may be
        anything.
      count: [num_kv_heads] int32.

    Source: block-sparse decoding as in Quest (arXiv:2406.10774), block by block and head by head.
    """

    blocks: jax.Array
    count: jax.Array

    @property
    def sorted_blocks(self) -> jax.Array:
        """The lists, those past the count behind all blocks: ascending as a whole."""
        index = jnp.arange(self.blocks.shape[1], dtype=jnp.int32)
        return jnp.where(index < self.count[:, None], self.blocks, _BEHIND_ALL)

    def mask(self, num_blocks: int) -> jax.Array:
        """[num_kv_heads, num_blocks] bool: which blocks the lists name."""
        heads = jnp.arange(self.blocks.shape[0], dtype=jnp.int32)[:, None]
        none = jnp.zeros((self.blocks.shape[0], num_blocks), bool)
        return none.at[heads, self.sorted_blocks].set(True, mode="drop")


def num_blocks(num_cells: int) -> int:
    """Blocks of a pool, the last one perhaps in part."""
    return -(-num_cells // BLOCK_CELLS)
