"""Attention on CPUs by our own compiled kernel, called from XLA: building it and calling it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.kernels_pallas.rope import Angles
from jaxstate.kernels_pallas.work import WorkList

logger = logging.getLogger(__name__)

SOURCE = pathlib.Path(__file__).with_name("attention_cpu.cc")
TARGET = "jaxstate_attention_cpu"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-w")
HEAD_DIM_MULTIPLE = 16
MAX_HEAD_DIM = 256


def unsupported(head_dim: int, dtype) -> str | None:
    """Say why this kernel cannot run here, None if it can."""
    if jax.default_backend() != "cpu":
        return f"it runs on the CPU backend, this is {jax.default_backend()}"
    if dtype != jnp.float32:
        return f"it computes in float32, keys and values are {jnp.dtype(dtype).name}"
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        return f"head_dim must be a multiple of 16 up to 256, got {head_dim}"
    if compiler() is None:
        return "no C++ compiler was found (c++, g++ or clang++ on PATH)"
    return None


def compiler() -> str | None:
    """Path of the C++ compiler, None if there is none."""
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next((path for path in found if path), None)


@functools.cache
def build(cache_dir: pathlib.Path) -> None:
    """Compile the kernel once per machine and source, and register it with JAX.

    Raises:
      RuntimeError: the compiler failed; carries its message.
    """
    path = compiler()
    if path is None:
        raise RuntimeError("attention_cpu needs a C++ compiler; install g++ or choose xla")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    parts = (SOURCE.read_text(), " ".join(FLAGS), version.stdout, jax.__version__, _cpu_flags())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_dir / f"attention_cpu-{key}.so"
    if not library.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(suffix=".so", dir=cache_dir)
        os.close(descriptor)
        command = [path, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pathlib.Path(name).unlink()
            raise RuntimeError(f"compiling {SOURCE.name} failed: {done.stderr.strip()[-2000:]}")
        pathlib.Path(name).replace(library)
        logger.info("compiled %s into %s", SOURCE.name, library)
    symbol = ctypes.CDLL(str(library)).JaxstateAttention
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(symbol), platform="cpu")


def _cpu_flags() -> str:
    """What the processor can do: -march=native must not travel to a lesser one."""
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return ""
    lines = info.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def tail_bias(visible: jax.Array, shared: int) -> jax.Array:
    """Lay a [tokens, tokens] bool mask (row = query token) out as the kernel reads it.

    [tokens, tokens * shared + 16] f32, row = token seen, column = query row; 0 or -inf. The
    columns at the end let the kernel read whole vectors.
    """
    bias = jnp.where(visible.T, jnp.float32(0), jnp.float32(-np.inf))
    return jnp.pad(jnp.repeat(bias, shared, axis=1), ((0, 0), (0, 16)))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    token_rows: jax.Array,
    bias: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    work: Sequence[WorkList],
    shifts: Sequence[Angles],
    *,
    block_tokens: int,
    window: int | None,
) -> jax.Array:
    """Attend the step's tokens to each other and to the work list's cells.

    Arguments as in `attention_xla.tail_attention` and `context_attention`, all f32; stretches
    may be of any length, and all lists are read in one pass.

    Args:
      bias: from `tail_bias`, position rule and window included.
    Returns:
      [tokens, num_heads, head_dim] f32; 0 where nothing is visible.
    """
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    items = jnp.concatenate([_used(one) for one in work])
    cos = jnp.concatenate([angles.cos for angles in shifts])
    sin = jnp.concatenate([angles.sin for angles in shifts])
    count = jnp.full(1, items.shape[0], jnp.int32) if len(work) > 1 else work[0].count.reshape(1)
    return call(
        q, k, v, positions, token_rows, bias, k_pages, v_pages, items, count, cos, sin,
        block_tokens=np.int32(block_tokens), window=np.int32(window or 0),
    )  # fmt: skip


def _used(work: WorkList) -> jax.Array:
    """Items with those past the count made empty, so that lists can follow one another."""
    index = jnp.arange(work.items.shape[0], dtype=jnp.int32)
    return jnp.where(index[:, None] < work.count, work.items, 0)
