"""The smallest and largest key elements of each block: what a selector knows of a block."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas.selection import BLOCK_CELLS


@flax.struct.dataclass
class KeyBounds:
    """Elementwise bounds of the stored keys of each block of a pool; of empty blocks, nothing.

    Attributes:
      low, high: [num_kv_heads, num_blocks, head_dim], in the pages' dtype.

    Source: page metadata of Quest (arXiv:2406.10774).
    """

    low: jax.Array
    high: jax.Array


def write(bounds: KeyBounds, k_pages: jax.Array, cells: jax.Array) -> KeyBounds:
    """Bring the bounds of blocks up to date with cells that were just written.

    A page is written from its beginning on, and nobody sees what lies behind the last cell written
    to it: the bounds of a block are those of its cells up to that one, whatever it held before.

    Args:
      k_pages: [num_kv_heads, num_pages, page_size, head_dim], new keys included; page_size is a
        multiple of BLOCK_CELLS.
      cells: [tokens] int32 as in kv_write.
    """
    kv_heads, num_pages, page_size, head_dim = k_pages.shape
    num_cells = num_pages * page_size
    blocks = jnp.where(cells < num_cells, cells // BLOCK_CELLS, num_cells // BLOCK_CELLS)
    same = blocks[:, None] == blocks[None, :]
    last = jnp.where(same, cells % BLOCK_CELLS, 0).max(axis=1)  # [tokens]
    keys = k_pages.reshape(kv_heads, -1, BLOCK_CELLS, head_dim)
    keys = keys.at[:, blocks].get(mode="clip")  # [kv_heads, tokens, BLOCK_CELLS, head_dim]
    behind = (jnp.arange(BLOCK_CELLS, dtype=jnp.int32) > last[:, None])[..., None]
    low = jnp.where(behind, jnp.inf, keys).min(axis=2).astype(keys.dtype)
    high = jnp.where(behind, -jnp.inf, keys).max(axis=2).astype(keys.dtype)
    return KeyBounds(
        low=bounds.low.at[:, blocks].set(low, mode="drop"),
        high=bounds.high.at[:, blocks].set(high, mode="drop"),
    )
