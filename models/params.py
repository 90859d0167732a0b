"""Parameters declared once: name, shape, init and sharding axes of every weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.models import quantized
from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig

Params = dict[str, Any]


Kind = Literal["matrix", "norm", "bias"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One weight as every user of it needs to know it.

    Attributes:
      shape: its shape in this package's layout.
      axes: a logical axis name per dimension ("vocab", "hidden", "heads", "kv_heads",
        "head_dim", "mlp", "experts"); sharding maps these names to mesh axes.
      kind: a matrix, a norm's scale (starts at one) or a bias (starts at zero).
      fan_in: of a matrix, inputs that are summed into one output.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: Kind = "matrix"
    fan_in: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in weight files: a matrix is [outputs, inputs], heads are flattened.

        Matrices of experts have the expert in front.
        """
        if self.kind != "matrix":
            return (math.prod(self.shape),)
        if self.axes[0] == "vocab":
            return self.shape
        lead = self.shape[:1] if self.axes[0] == "experts" else ()
        return (*lead, math.prod(self.shape[len(lead) :]) // self.fan_in, self.fan_in)

    @property
    def may_be_quantized(self) -> bool:
        """Whether codes are worth it: few weights choose experts, and much hangs on them."""
        return self.kind == "matrix" and self.axes[-1] != "experts"

    def dtype(self, dtypes: DtypePolicy) -> Any:
        """Return its dtype in memory: norms are few and multiply everything, so they stay wide."""
        return dtypes.accum_dtype if self.kind == "norm" else dtypes.param_dtype


def param_specs(config: ModelConfig) -> Params:
    """Return the tree of ParamSpec; every parameter tree of this package has its structure."""
    embedding = ParamSpec(
        shape=(config.vocab_size, config.hidden_size),
        axes=("vocab", "hidden"),
        fan_in=config.hidden_size,
    )
    specs: Params = {
        "embed": embedding,
        "layers": tuple(_layer_specs(config, layer) for layer in config.layers),
        "final_norm": _norm(config.hidden_size, "hidden"),
    }
    if not config.tied_embeddings:
        specs["lm_head"] = embedding
    return specs


def _layer_specs(config: ModelConfig, layer: LayerConfig) -> Params:
    hidden, head_dim = config.hidden_size, config.head_dim
    q, kv = (config.num_heads, head_dim), (config.num_kv_heads, head_dim)
    q_axes, kv_axes = ("heads", "head_dim"), ("kv_heads", "head_dim")
    specs = {
        "attn_norm": _norm(hidden, "hidden"),
        "wq": _matrix((hidden,), q, ("hidden",), q_axes),
        "wk": _matrix((hidden,), kv, ("hidden",), kv_axes),
        "wv": _matrix((hidden,), kv, ("hidden",), kv_axes),
        "wo": _matrix(q, (hidden,), q_axes, ("hidden",)),
        "mlp_norm": _norm(hidden, "hidden"),
    }
    if config.qkv_bias:
        specs |= {"bq": _bias(q, q_axes), "bk": _bias(kv, kv_axes), "bv": _bias(kv, kv_axes)}
    if config.out_bias:
        specs["bo"] = _bias((hidden,), ("hidden",))
    if config.qk_norm:
        specs |= {"q_norm": _norm(head_dim, "head_dim"), "k_norm": _norm(head_dim, "head_dim")}
    if config.post_norms:
        specs |= {
            "post_attn_norm": _norm(hidden, "hidden"),
            "post_mlp_norm": _norm(hidden, "hidden"),
        }
    return specs | (_expert_specs(config) if layer.routed else _mlp_specs(config))


def _mlp_specs(config: ModelConfig) -> Params:
    inner, outer = (config.mlp_width,), (config.hidden_size,)
    specs = {
        "w_gate": _matrix(outer, inner, ("hidden",), ("mlp",)),
        "w_up": _matrix(outer, inner, ("hidden",), ("mlp",)),
        "w_down": _matrix(inner, outer, ("mlp",), ("hidden",)),
    }
    if config.mlp_bias:
        specs |= {
            "b_gate": _bias(inner, ("mlp",)),
            "b_up": _bias(inner, ("mlp",)),
            "b_down": _bias(outer, ("hidden",)),
        }
    return specs


def _expert_specs(config: ModelConfig) -> Params:
    experts = config.experts
    assert experts is not None  # ModelConfig has checked it

    def each(spec: ParamSpec) -> ParamSpec:
        return dataclasses.replace(
            spec, shape=(experts.count, *spec.shape), axes=("experts", *spec.axes)
        )

    inner, outer = (experts.width,), (config.hidden_size,)
    return {
        "router": _matrix(outer, (experts.count,), ("hidden",), ("experts",)),
        "experts_gate": each(_matrix(outer, inner, ("hidden",), ("mlp",))),
        "experts_up": each(_matrix(outer, inner, ("hidden",), ("mlp",))),
        "experts_down": each(_matrix(inner, outer, ("mlp",), ("hidden",))),
    }


def _matrix(inputs, outputs, input_axes, output_axes) -> ParamSpec:
    return ParamSpec(
        shape=(*inputs, *outputs), axes=(*input_axes, *output_axes), fan_in=math.prod(inputs)
    )


def _norm(size: int, axis: str) -> ParamSpec:
    return ParamSpec(shape=(size,), axes=(axis,), kind="norm")


def _bias(shape: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec:
    return ParamSpec(shape=shape, axes=axes, kind="bias")


def num_params(config: ModelConfig) -> int:
    """Count parameters, a tied output matrix once."""
    specs = jax.tree.leaves(param_specs(config), is_leaf=_is_spec)
    return sum(math.prod(spec.shape) for spec in specs)


def _is_spec(node) -> bool:
    return isinstance(node, ParamSpec)


def map_specs(function: Callable[[str, ParamSpec], Any], config: ModelConfig) -> Params:
    """Build a parameter tree by calling `function(path, spec)`; path is like "layers.3.wq"."""

    def call(path, spec):
        return function(".".join(str(getattr(p, "key", getattr(p, "idx", p))) for p in path), spec)

    return jax.tree_util.tree_map_with_path(call, param_specs(config), is_leaf=_is_spec)


def abstract_params(config: ModelConfig) -> Params:
    """Return the tree of jax.ShapeDtypeStruct, for lowering and restoring without weights."""
    forms = dict(config.quantized)

    def abstract(path: str, spec: ParamSpec):
        if path in forms:
            return quantized.abstract(forms[path], spec.stored_shape, spec.shape)
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype(config.dtypes))

    return map_specs(abstract, config)


def init_params(config: ModelConfig, seed: int) -> Params:
    """Draw random weights: normal with variance 1 / fan_in, norms at one, biases at zero."""
    rng = np.random.default_rng(seed)

    def draw(_, spec):
        if spec.kind == "matrix":
            value = rng.standard_normal(spec.shape, np.float32) / math.sqrt(spec.fan_in)
        else:
            value = np.full(spec.shape, spec.kind == "norm", np.float32)
        return jnp.asarray(value, spec.dtype(config.dtypes))

    return map_specs(draw, config)


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
