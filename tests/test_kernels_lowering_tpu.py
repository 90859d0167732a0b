"""The TPU attention kernel lowers for TPU, without one at hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxstate.kernels_pallas import attention_tpu, rope, work
from jaxstate.kernels_pallas.selection import Selection

# Tokens, tokens per block, query heads, key/value heads, page size, pages, window.
DECODE = (64, 1, 32, 8, 64, 8192, None)
GROUP = (64, 64, 16, 4, 16, 8192, None)
PREFILL = (512, 512, 9, 3, 256, 64, 4096)
SEVEN = (24, 8, 14, 2, 128, 64, None)
SINGLE = (1, 1, 8, 8, 32, 64, 512)
ONE_HEAD = (4, 4, 4, 1, 64, 64, None)
MANY_HEADS = (8, 1, 32, 32, 64, 64, None)
SMALL = (8, 1, 4, 2, 16, 3, None)
HUGE = (1, 1, 32, 8, 256, 16384, None)
"""A pool of 2^32 elements at head_dim 128: offsets of more than 32 bits."""

NO_DEVICE = jax.sharding.AbstractMesh((), ())


def _lowered(sizes, head_dim, dtype, *, num_items=257, selected_blocks=0):
    tokens, block_tokens, heads, kv_heads, page_size, pages, window = sizes

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    def ints(*shape):
        return array(*shape, dtype=jnp.int32)

    def attend(*arrays, selection):
        return attention_tpu.attention(
            *arrays, block_tokens=block_tokens, window=window,
            precision=jax.lax.Precision.HIGHEST, selection=selection,
        )  # fmt: skip

    pool = array(kv_heads, pages, page_size, head_dim)
    table = work.WorkList(
        items=ints(num_items, work.NUM_COLUMNS), count=ints(), cells_per_item=pages * page_size
    )
    angle = array(num_items, head_dim // 2, dtype=jnp.float32)
    selection = None
    if selected_blocks:
        selection = Selection(blocks=ints(kv_heads, selected_blocks), count=ints(kv_heads))
    with jax.numpy_dtype_promotion("strict"), jax.sharding.use_abstract_mesh(NO_DEVICE):
        traced = jax.jit(attend).trace(
            array(tokens, heads, head_dim),
            array(tokens, kv_heads, head_dim),
            array(tokens, kv_heads, head_dim),
            ints(tokens),
            ints(tokens),
            array(tokens, tokens, dtype=bool),
            pool,
            pool,
            (table,),
            (rope.Angles(cos=angle, sin=angle),),
            selection=selection,
        )
        return traced.lower(lowering_platforms=("tpu",)).as_text()


selections = pytest.mark.parametrize("selected_blocks", [0, 2048], ids=["all", "selected"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sizes", [DECODE, GROUP, PREFILL], ids=["decode", "group", "prefill"])
@selections
def test_context_attention_lowers_for_tpu(sizes, head_dim, dtype, selected_blocks):
    assert attention_tpu.unsupported(head_dim, jnp.dtype(dtype), sizes[4], interpret=True) is None
    text = _lowered(sizes, head_dim, dtype, selected_blocks=selected_blocks)
    assert text.count("tpu_custom_call") == 1


@pytest.mark.parametrize(
    "sizes",
    [SEVEN, SINGLE, ONE_HEAD, SMALL, HUGE],
    ids=["seven", "single", "one-head", "small", "huge"],
)
@selections
def test_context_attention_lowers_for_tpu_with_any_heads_pages_and_pools(sizes, selected_blocks):
    text = _lowered(sizes, 128, jnp.bfloat16, selected_blocks=selected_blocks)
    assert text.count("tpu_custom_call") == 1


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128])
def test_context_attention_lowers_for_tpu_with_many_heads_at_other_head_dims(head_dim):
    assert _lowered(MANY_HEADS, head_dim, jnp.bfloat16).count("tpu_custom_call") == 1


def test_tables_that_fit_no_scalar_memory_are_refused_before_it_lowers_for_tpu():
    """What is allowed is what Mosaic's compiler has taken of its 1 MiB."""
    assert _lowered(DECODE, 128, jnp.bfloat16, num_items=14_000)
    for sizes in (dict(num_items=40_000), dict(selected_blocks=200_000)):
        with pytest.raises(NotImplementedError, match="expected at most 917504 bytes of SMEM"):
            _lowered(DECODE, 128, jnp.bfloat16, **sizes)
