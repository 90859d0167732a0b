"""Parameters declared once: name, shape, init and sharding axes of every weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.models.config import ModelConfig

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One weight as every user of it needs to know it.

    Attributes:
      shape: its shape in this package's layout.
      axes: a logical axis name per dimension ("vocab", "hidden", "heads", "kv_heads",
        "head_dim", "mlp"); sharding maps these names to mesh axes.
      fan_in: inputs that are summed into one output; 0 for a norm, which starts at one.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    fan_in: int


def param_specs(config: ModelConfig) -> Params:
    """Return the tree of ParamSpec; every parameter tree of this package has its structure."""
    hidden, mlp = config.hidden_size, config.mlp_width
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim

    def norm():
        return ParamSpec(shape=(hidden,), axes=("hidden",), fan_in=0)

    def layer():
        kv = ParamSpec(
            shape=(hidden, kv_heads, head_dim),
            axes=("hidden", "kv_heads", "head_dim"),
            fan_in=hidden,
        )
        up = ParamSpec(shape=(hidden, mlp), axes=("hidden", "mlp"), fan_in=hidden)
        return {
            "attn_norm": norm(),
            "wq": ParamSpec(
                shape=(hidden, heads, head_dim),
                axes=("hidden", "heads", "head_dim"),
                fan_in=hidden,
            ),
            "wk": kv,
            "wv": kv,
            "wo": ParamSpec(
                shape=(heads, head_dim, hidden),
                axes=("heads", "head_dim", "hidden"),
                fan_in=heads * head_dim,
            ),
            "mlp_norm": norm(),
            "w_gate": up,
            "w_up": up,
            "w_down": ParamSpec(shape=(mlp, hidden), axes=("mlp", "hidden"), fan_in=mlp),
        }

    embedding = ParamSpec(
        shape=(config.vocab_size, hidden), axes=("vocab", "hidden"), fan_in=hidden
    )
    specs: Params = {
        "embed": embedding,
        "layers": tuple(layer() for _ in range(config.num_layers)),
        "final_norm": norm(),
    }
    if not config.tied_embeddings:
        specs["lm_head"] = embedding
    return specs


def _is_spec(node) -> bool:
    return isinstance(node, ParamSpec)


def map_specs(function: Callable[[str, ParamSpec], Any], config: ModelConfig) -> Params:
    """Build a parameter tree by calling `function(path, spec)`; path is like "layers.3.wq"."""

    def call(path, spec):
        return function(".".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path), spec)

    return jax.tree_util.tree_map_with_path(call, param_specs(config), is_leaf=_is_spec)


def abstract_params(config: ModelConfig) -> Params:
    """Return the tree of jax.ShapeDtypeStruct, for lowering and restoring without weights."""
    dtype = config.dtypes.param_dtype
    return map_specs(lambda _, spec: jax.ShapeDtypeStruct(spec.shape, dtype), config)


def init_params(config: ModelConfig, seed: int) -> Params:
    """Draw random weights: normal with variance 1 / fan_in, norms at one."""
    rng = np.random.default_rng(seed)

    def draw(_, spec):
        if spec.fan_in == 0:
            value = np.ones(spec.shape, np.float32)
        else:
            value = rng.standard_normal(spec.shape, np.float32) / math.sqrt(spec.fan_in)
        return jnp.asarray(value, config.dtypes.param_dtype)

    return map_specs(draw, config)


def partition_specs(config: ModelConfig, rules: dict[str, str | None]) -> Params:
    """Map each weight's logical axes to mesh axes.

    Args:
      rules: logical axis name to mesh axis name; None or absent = replicated.
    """
    return map_specs(
        lambda _, spec: jax.sharding.PartitionSpec(*(rules.get(axis) for axis in spec.axes)),
        config,
    )


def check_params(params: Params, config: ModelConfig) -> None:
    """Check structure, shapes, dtypes and finiteness of loaded weights.

    Raises:
      ValueError: names the first weight that is wrong, with what was expected.
    """
    expected, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    if jax.tree_util.tree_structure(params) != tree:
        raise ValueError(
            "params: expected the tree of param_specs(config), got another structure; "
            "build parameters with init_params or a loader of jaxstate.models"
        )
    finite = jax.device_get([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)])
    for (path, spec), leaf, is_finite in zip(
        expected, jax.tree.leaves(params), finite, strict=True
    ):
        name = jax.tree_util.keystr(path)
        if leaf.shape != spec.shape or leaf.dtype != spec.dtype:
            raise ValueError(
                f"{name}: expected {spec.shape} {spec.dtype}, got {leaf.shape} {leaf.dtype}; "
                "the weight file does not belong to this configuration"
            )
        if not is_finite:
            raise ValueError(
                f"{name}: expected finite numbers, got NaN or infinity; "
                "the weight file is damaged, fetch it again"
            )
