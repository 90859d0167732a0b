"""The gate scan and the cache write become kernels for the platforms they claim, without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from platforms import MESHES

from jaxstate.kernels_pallas import gate_scan_gpu, gate_scan_tpu, kv_write_gpu, kv_write_tpu

VOCAB = 262_144 + 7  # no multiple of any tile
CALLS = {"cuda": "xla.gpu.triton", "tpu": "tpu_custom_call"}
SCANS = {"cuda": gate_scan_gpu, "tpu": gate_scan_tpu}
WRITES = {"cuda": kv_write_gpu.kv_write, "tpu": kv_write_tpu.kv_write}
platforms = pytest.mark.parametrize("platform", ["cuda", "tpu"])
dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])


def _lower(function, *operands, platform):
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    with jax.sharding.use_abstract_mesh(MESHES[platform]):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def _sets(rows):
    return ((2, -(-VOCAB // 32)), jnp.uint32), ((rows,), jnp.int32)


@platforms
@dtypes
@pytest.mark.parametrize("hidden_size", [64, 576, 640, 896, 4096])
@pytest.mark.parametrize("rows", [1, 70])
def test_scan_of_hidden_states_lowers_for_its_platform(platform, dtype, hidden_size, rows):
    text = _lower(
        lambda *operands: SCANS[platform].gate_scan_hidden(*operands, scale=0.5, softcap=30.0),
        ((rows, hidden_size), dtype), ((VOCAB, hidden_size), dtype), *_sets(rows),
        platform=platform,
    )  # fmt: skip
    assert CALLS[platform] in text
    # The logits exist nowhere outside the kernel.
    assert f"tensor<{rows}x{VOCAB}x" not in text


@platforms
@dtypes
@pytest.mark.parametrize("rows", [1, 70])
def test_scan_of_logits_lowers_for_its_platform(platform, dtype, rows):
    scan = SCANS[platform].gate_scan
    text = _lower(scan, ((rows, VOCAB), dtype), *_sets(rows), platform=platform)
    assert CALLS[platform] in text


@platforms
@dtypes
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 256])
def test_write_lowers_for_its_platform_in_place(platform, dtype, head_dim, page_size):
    pages, new = (3, 20, page_size, head_dim), (5, 3, head_dim)
    text = _lower(
        WRITES[platform], (pages, dtype), (pages, dtype), (new, jnp.float32), (new, jnp.float32),
        ((5,), jnp.int32), platform=platform,
    )  # fmt: skip
    assert CALLS[platform] in text
    assert text.count("output_operand_alias<") == 2


def test_hidden_sizes_that_no_product_takes_are_refused():
    operands = ((1, 24), jnp.float32), ((VOCAB, 24), jnp.float32), *_sets(1)
    with pytest.raises(NotImplementedError, match="hidden_size: expected a multiple of 16, got 24"):
        _lower(gate_scan_gpu.gate_scan_hidden, *operands, platform="cuda")


def test_matrices_too_wide_for_vmem_are_refused():
    operands = ((1, 8192), jnp.float32), ((VOCAB, 8192), jnp.float32), *_sets(1)
    with pytest.raises(NotImplementedError, match="hidden_size: expected at most 4096 in float32"):
        _lower(gate_scan_tpu.gate_scan_hidden, *operands, platform="tpu")


def test_heads_that_are_no_power_of_two_are_refused():
    pages, new = ((2, 5, 16, 80), jnp.float32), ((1, 2, 80), jnp.float32)
    with pytest.raises(NotImplementedError, match="head_dim: expected a power of two, got 80"):
        _lower(kv_write_gpu.kv_write, pages, pages, new, new, ((1,), jnp.int32), platform="cuda")


def test_pages_that_cut_a_tile_are_refused():
    pages, new = (2, 5, 12, 64), (1, 2, 64)
    operands = (pages, jnp.bfloat16), (pages, jnp.bfloat16), (new, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="page_size: expected a multiple of 16"):
        _lower(kv_write_tpu.kv_write, *operands, operands[2], ((1,), jnp.int32), platform="tpu")
