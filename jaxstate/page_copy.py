"""Pages out of the pool and back, a fixed number at a time."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxstate.state import Pool

PAGES_AT_ONCE = 8


def take(pool: Pool, pages: jax.Array) -> list[jax.Array]:
    """Copy pages out: for every array of the pool [heads, PAGES_AT_ONCE, …].

    Args:
      pages: [PAGES_AT_ONCE] int32.
    """
    num_pages = pool[0].k_pages.shape[1]
    return [_by_page(leaf, num_pages)[:, pages] for leaf in jax.tree.leaves(pool)]


def put(pool: Pool, pages: jax.Array, parts: list[jax.Array]) -> Pool:
    """Write pages that `take` copied; the same page may come several times with the same content.

    Page by page, since that updates a donated pool in place where a scatter would copy it.
    """
    num_pages = pool[0].k_pages.shape[1]
    leaves, tree = jax.tree.flatten(pool)
    written = []
    for leaf, part in zip(leaves, parts, strict=True):
        paged = _by_page(leaf, num_pages)
        for index in range(PAGES_AT_ONCE):
            begin = (0, pages[index], *(0,) * (paged.ndim - 2))
            paged = jax.lax.dynamic_update_slice(paged, part[:, index : index + 1], begin)
        written.append(paged.reshape(leaf.shape))
    return jax.tree.unflatten(tree, written)


def _by_page(leaf: jax.Array, num_pages: int) -> jax.Array:
    """View pages, or the bounds of their blocks, by page: [heads, num_pages, …]."""
    if leaf.shape[1] == num_pages:
        return leaf
    return leaf.reshape(leaf.shape[0], num_pages, -1, *leaf.shape[2:])


def padded(pages: Sequence[int]) -> list[np.ndarray]:
    """Cut page numbers into arrays of PAGES_AT_ONCE, the last one repeated to fill the last."""
    whole = np.asarray(pages, np.int32)
    whole = np.pad(whole, (0, -len(whole) % PAGES_AT_ONCE), mode="edge")
    return list(whole.reshape(-1, PAGES_AT_ONCE))
