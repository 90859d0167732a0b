"""Attention kernels lower for the accelerators they claim, without one at hand."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from platforms import MESHES

from jaxstate.kernels_pallas import attention_gpu, dispatch, rope, work
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection

# Tokens, tokens per block, query heads, key/value heads, page size, pages, window.
DECODE = (64, 1, 32, 8, 64, 8192, None)
GROUP = (64, 64, 32, 8, 16, 8192, None)
PREFILL = (512, 512, 9, 3, 256, 64, 4096)
SEVEN = (24, 8, 14, 2, 128, 64, None)
SINGLE = (1, 1, 8, 8, 32, 64, 512)
HUGE = (1, 1, 32, 8, 256, 16384, None)
"""A pool of 2^32 elements at head_dim 128: offsets of more than 32 bits."""


def _lowered(sizes, head_dim: int, dtype, *, selects: bool = False) -> str:
    tokens, block_tokens, heads, kv_heads, page_size, pages, window = sizes
    ints, table = jnp.int32, 257

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def attend(selection, *arrays):
        return dispatch.attend(
            "pallas_gpu", *arrays, selection=selection,
            block_tokens=block_tokens, window=window, precision=jax.lax.Precision.HIGHEST,
        )  # fmt: skip

    lists = array(kv_heads, pages * page_size // BLOCK_CELLS, dtype=ints)
    selection = Selection(blocks=lists, count=array(kv_heads, dtype=ints)) if selects else None

    pool = array(kv_heads, pages, page_size, head_dim)
    items = work.WorkList(
        items=array(table, work.NUM_COLUMNS, dtype=ints),
        count=array(dtype=ints),
        cells_per_item=pages * page_size,
    )
    angle = array(table, head_dim // 2, dtype=jnp.float32)
    with jax.numpy_dtype_promotion("strict"), jax.sharding.use_abstract_mesh(MESHES["cuda"]):
        traced = jax.jit(attend).trace(
            selection,
            array(tokens, heads, head_dim),
            array(tokens, kv_heads, head_dim),
            array(tokens, kv_heads, head_dim),
            array(tokens, dtype=ints),
            array(tokens, dtype=ints),
            array(tokens, tokens, dtype=bool),
            pool,
            pool,
            (items,),
            (rope.Angles(cos=angle, sin=angle),),
        )
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("sizes", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_context_attention_lowers_for_cuda(sizes, head_dim, dtype):
    assert attention_gpu.unsupported(head_dim, jnp.dtype(dtype), interpret=True) is None
    assert _lowered(sizes, head_dim, dtype).count("gpu.triton") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sizes", [DECODE, PREFILL, HUGE], ids=["decode", "prefill", "huge"])
def test_attention_to_selected_blocks_lowers_for_cuda(sizes, head_dim, dtype):
    assert _lowered(sizes, head_dim, dtype, selects=True).count("gpu.triton") == 1


@pytest.mark.parametrize(
    "sizes", [GROUP, SEVEN, SINGLE, HUGE], ids=["group", "seven", "single", "huge"]
)
def test_context_attention_lowers_for_cuda_with_any_heads_pages_and_pools(sizes):
    assert _lowered(sizes, 128, jnp.bfloat16).count("gpu.triton") == 1


def test_blocks_of_query_rows_lower_for_cuda_without_reading_past_their_array():
    """Four rows per head are padded to the sixteen that a block reads."""
    [call] = [
        line for line in _lowered(DECODE, 128, jnp.bfloat16).splitlines() if "gpu.triton" in line
    ]
    operands = re.search(r": \((.*)\) -> ", call).group(1)
    assert operands.count("tensor<64x8x16x128xbf16>") == 2
