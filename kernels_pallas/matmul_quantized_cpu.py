"""Products with quantized matrices on CPUs by our own compiled kernel: building and calling it."""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp

from jaxstate.kernels_pallas import cpu_library

SOURCE = pathlib.Path(__file__).with_name("matmul_quantized_cpu.cc")
TARGET = "jaxstate_matmul_quantized_cpu"


def build(cache_dir: pathlib.Path) -> None:
    """Compile the kernel once per machine and source, and register it with JAX.

    Raises:
      RuntimeError: the compiler failed; carries its message.
    """
    cpu_library.build(SOURCE, "JaxstateMatmulQuantized", TARGET, cache_dir)


def product(
    x: jax.Array, codes: jax.Array, scales: jax.Array, offsets: jax.Array | None
) -> jax.Array:
    """Multiply rows by the matrix scales * codes + offsets: [rows, outputs] f32.

    Args:
      x: [rows, inputs] f32.
      codes: [outputs, inputs] int8; or [outputs, inputs / 2] uint8, of every 32 inputs the first
        16 in the low nibbles and the others in the high ones.
      scales, offsets: [outputs, inputs / group] f32; nibbles need offsets. A group is a multiple
        of 16 inputs, of 32 for nibbles.
    """
    shape = jax.ShapeDtypeStruct((x.shape[0], codes.shape[0]), jnp.float32)
    if offsets is None:
        offsets = jnp.zeros(0, jnp.float32)
    return jax.ffi.ffi_call(TARGET, shape)(x, codes, scales, offsets)
