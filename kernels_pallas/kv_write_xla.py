"""Writing new keys and values into pool pages, in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_write(pages: jax.Array, new: jax.Array, cells: jax.Array) -> jax.Array:
    """Return pages with one token's heads written to each named cell.

    In place when `pages` is donated and written before it is read in the same program.

    Args:
      pages: [num_kv_heads, num_pages, page_size, head_dim].
      new: [tokens, num_kv_heads, head_dim]; cast to the pages' dtype.
      cells: [tokens] int32, page * page_size + cell; num_pages * page_size or more = write nothing.
    """
    kv_heads, num_pages, page_size, head_dim = pages.shape
    flat = pages.reshape(kv_heads, num_pages * page_size, head_dim)
    if new.shape[0] == 1:
        # XLA rewrites a one-index scatter into a select over copies of the whole pool; with a
        # second, dropped index it stays a scatter in place.
        new = jnp.concatenate([new, new])
        cells = jnp.concatenate([cells, jnp.full_like(cells, num_pages * page_size)])
    flat = flat.at[:, cells].set(
        new.astype(pages.dtype).swapaxes(0, 1), mode="drop", unique_indices=False
    )
    return flat.reshape(pages.shape)
