"""Pages out of the pool and back, a fixed number at a time."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxstate.kernels_pallas.dispatch import PageCopy
from jaxstate.state import Pool

PAGES_AT_ONCE = 16

Part = Sequence[np.ndarray] | Sequence[jax.Array]
"""A copy of PAGES_AT_ONCE pages in host memory: of each array of the pool; see take."""


def take(pool: Pool, pages: jax.Array, kernel: PageCopy | None = None) -> list[jax.Array]:
    """Copy pages out: for every array of the pool [heads, PAGES_AT_ONCE, …].

    Args:
      pages: [PAGES_AT_ONCE] int32.
      kernel: what copies, None = plain XLA.
    """
    num_pages = pool[0].k_pages.shape[1]
    leaves = [_by_page(leaf, num_pages) for leaf in jax.tree.leaves(pool)]
    if kernel is not None:
        return kernel.take(leaves, pages)
    return [leaf[:, pages] for leaf in leaves]


def put(
    pool: Pool, pages: jax.Array, parts: list[jax.Array], kernel: PageCopy | None = None
) -> Pool:
    """Write pages that `take` copied; the same page may come several times with the same content.

    A donated pool is updated in place.

    Args:
      kernel: as for take.
    """
    num_pages = pool[0].k_pages.shape[1]
    leaves, tree = jax.tree.flatten(pool)
    paged = [_by_page(leaf, num_pages) for leaf in leaves]
    if kernel is not None:
        written = kernel.put(paged, pages, parts)
    else:
        written = [_put(one, pages, part) for one, part in zip(paged, parts, strict=True)]
    whole = [one.reshape(leaf.shape) for one, leaf in zip(written, leaves, strict=True)]
    return jax.tree.unflatten(tree, whole)


def _put(paged: jax.Array, pages: jax.Array, part: jax.Array) -> jax.Array:
    """Page by page, since that updates in place where a scatter would copy all."""
    for index in range(PAGES_AT_ONCE):
        begin = (0, pages[index], *(0,) * (paged.ndim - 2))
        paged = jax.lax.dynamic_update_slice(paged, part[:, index : index + 1], begin)
    return paged


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
