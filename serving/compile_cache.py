"""JAX's persistent compilation cache: the second start of the same engine compiles nothing."""

from __future__ import annotations

import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache


def enable(directory: pathlib.Path) -> None:
    """Keep every executable that this process compiles from now on in `directory`.

    JAX by itself keeps only what took long to compile; an engine needs all of its programs.
    """
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # one that is in use already keeps its directory otherwise
