"""Writing new keys and values into pool pages on GPU, through Triton: one call for both.

Floor: the new keys and values read once and written once, 2 * 2 * tokens * num_kv_heads * head_dim
elements; at a step's sizes (128 KiB for 64 tokens of 8 heads of 128 in bf16) that is less than a
launch takes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

_MAX_TOKENS_BLOCK = 16


def kv_write(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cells: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return both pages with one token's heads written to each named cell, in place if donated.

    Offsets are 64-bit where pages pass 2**32 bytes.

    Args:
      k_pages, v_pages: [num_kv_heads, num_pages, page_size, head_dim].
      k, v: [tokens, num_kv_heads, head_dim]; cast to the pages' dtype.
      cells: [tokens] int32, page * page_size + cell; num_pages * page_size or more = write
        nothing. No cell is named twice.
      interpret: run on any device, operation by operation.
    Raises:
      NotImplementedError: head_dim is no power of two.
    """
    kv_heads, num_pages, page_size, head_dim = k_pages.shape
    if head_dim & (head_dim - 1):
        raise NotImplementedError(
            f"head_dim: expected a power of two, got {head_dim}; use kv_write_xla.kv_write"
        )
    num_cells = num_pages * page_size
    flat = (kv_heads * num_cells, head_dim)
    tokens = cells.shape[0]
    block = min(pl.next_power_of_2(tokens), _MAX_TOKENS_BLOCK)
    outs = pl.pallas_call(
        _kernel(block, num_cells),
        grid=(pl.cdiv(tokens, block), kv_heads),
        out_shape=tuple(jax.ShapeDtypeStruct(flat, pages.dtype) for pages in (k_pages, v_pages)),
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="kv_write",
    )(k_pages.reshape(flat), v_pages.reshape(flat), k, v, cells)
    return outs[0].reshape(k_pages.shape), outs[1].reshape(v_pages.shape)


def _kernel(block: int, num_cells: int):
    def write(_, __, k_ref, v_ref, cells_ref, k_pages_ref, v_pages_ref):
        tokens, _, head_dim = k_ref.shape
        head = pl.program_id(1)
        token = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
        real = token < tokens
        cell = plgpu.load(cells_ref.at[token], mask=real, other=num_cells)
        lane, token, cell, real = jnp.broadcast_arrays(
            jnp.arange(head_dim, dtype=jnp.int32)[None, :],
            *(x[:, None] for x in (token, cell, real)),
        )
        heads = jnp.full_like(lane, head)
        for new_ref, pages_ref in ((k_ref, k_pages_ref), (v_ref, v_pages_ref)):
            new = plgpu.load(new_ref.at[token, heads, lane], mask=real, other=0)
            plgpu.store(
                pages_ref.at[heads * num_cells + cell, lane],
                new.astype(pages_ref.dtype),
                mask=real & (cell < num_cells),
            )

    return write
