"""Platforms to lower kernels for, none of them at hand."""

from __future__ import annotations

import jax

# From jax 0.11 on, Triton's lowering asks which device it is for.
_H200 = jax.sharding.AbstractDevice("NVIDIA H200", num_cores=None, platform="cuda")
MESHES = {
    "cuda": jax.sharding.AbstractMesh((), (), abstract_device=_H200),
    "tpu": jax.sharding.AbstractMesh((), ()),
}
