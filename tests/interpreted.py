"""Compiling interpreted kernels fast: their programs are long and run for milliseconds."""

from __future__ import annotations

import jax

OPTIONS = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # unknown from then on
    OPTIONS["xla_cpu_use_fusion_emitters"] = False


def options_for(implementation: str) -> dict | None:
    """Return compiler options for jax.jit by an implementation's name; None = as usual."""
    return OPTIONS if "interpret" in implementation else None
