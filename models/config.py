"""What a decoder is: sizes, rotary settings, layer kinds and dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jaxstate.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Which dtype each kind of array has; casts between them are explicit.

    Attributes:
      param_dtype: weights in memory.
      compute_dtype: activations and matrix products.
      cache_dtype: keys and values in the pool.
      accum_dtype: norms, softmax, log-sum-exp, rotary angles and logits.
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    cache_dtype: Any = jnp.float32
    accum_dtype: Any = jnp.float32

    @classmethod
    def named(cls, name: str) -> DtypePolicy:
        """Return the policy called "float32" or "bfloat16".

        Raises:
          ValueError: any other name.
        """
        if name == "float32":
            return cls()
        if name == "bfloat16":
            return cls(
                param_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16, cache_dtype=jnp.bfloat16
            )
        raise ValueError(f'dtype: expected "float32" or "bfloat16", got "{name}"')

    @property
    def precision(self) -> jax.lax.Precision:
        """Precision of matrix products: f32 means f32, also where a TPU would round to bf16."""
        if self.compute_dtype == jnp.float32:
            return jax.lax.Precision.HIGHEST
        return jax.lax.Precision.DEFAULT


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
      rope: rotary settings.
      window: a token sees itself and the `window - 1` positions before it; None = all of them.
      routed: the MLP is a mixture of experts, see ModelConfig.experts.
    """

    rope: RopeConfig
    window: int | None = None
    routed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """A mixture of experts in place of one MLP; no token is ever dropped.

    Attributes:
      count: number of experts.
      per_token: how many of them, the most probable ones, a token goes through.
      width: of each expert's gated MLP.
      normalize: the chosen experts' probabilities are scaled to sum to 1.

    Source: arXiv:2401.04088, arXiv:2505.09388.
    """

    count: int
    per_token: int
    width: int
    normalize: bool

    def __post_init__(self):
        """Check that sizes fit together."""
        if not 1 <= self.per_token <= self.count:
            raise ValueError(
                f"experts: expected 1 to {self.count} experts per token, got {self.per_token}"
            )
        if self.width < 1:
            raise ValueError(f"experts: expected a width of at least 1, got {self.width}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a matrix is kept in few bits: a weight is scale * code + offset.

    Attributes:
      bits: of a code; 8 (signed) or 4 (unsigned).
      group: inputs that share a scale and an offset, a multiple of 16 (of 32 for 4 bits); None =
        all inputs of an output.
      offsets: whether there are any; 4 bits need them.
    """

    bits: int
    group: int | None = None
    offsets: bool = False

    def __post_init__(self):
        """Check that products can be computed with it."""
        if self.bits not in (4, 8):
            raise ValueError(f"bits: expected 4 or 8, got {self.bits}")
        multiple = 32 if self.bits == 4 else 16
        if self.group is not None and (self.group < 1 or self.group % multiple):
            raise ValueError(f"group: expected a multiple of {multiple}, got {self.group}")
        if self.bits == 4 and not self.offsets:
            raise ValueError("offsets: expected True for codes of 4 bits, got False")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with pre-norm blocks, gated MLPs and rotary attention.

    Attributes:
      family: name of the family file that maps its weights, e.g. "llama".
      vocab_size: rows of the embedding.
      hidden_size: width of the residual stream.
      mlp_width: width of the gated MLP.
      num_heads: query heads.
      num_kv_heads: key/value heads; divides num_heads.
      head_dim: size of one head; even.
      rms_norm_eps: added to the mean square in every norm.
      max_positions: longest context the model was trained for, in tokens.
      layers: one LayerConfig per layer.
      tied_embeddings: the output matrix is the embedding.
      activation: of the MLP's gate.
      qkv_bias, out_bias, mlp_bias: the projections of attention and MLP add a vector.
      qk_norm: queries and keys are normalized per head before they are rotated.
      post_norms: attention and MLP are normalized behind as well as before ("sandwich").
      embed_scale: embeddings are multiplied by this.
      query_scale: queries are multiplied by this, beside 1 / sqrt(head_dim).
      experts: what layers that are `routed` consist of.
      dtypes: see DtypePolicy.
      quantized: weights that are kept in few bits, by path (see params.map_specs).
    """

    family: str
    vocab_size: int
    hidden_size: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    layers: tuple[LayerConfig, ...]
    tied_embeddings: bool
    activation: Activation = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float = 1.0
    query_scale: float = 1.0
    experts: ExpertConfig | None = None
    dtypes: DtypePolicy = dataclasses.field(default_factory=DtypePolicy)
    quantized: tuple[tuple[str, Quantization], ...] = ()

    def __post_init__(self):
        """Check that sizes fit together."""
        for name in (
            "vocab_size",
            "hidden_size",
            "mlp_width",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_positions",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads={self.num_kv_heads}, "
                f"got {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        if not self.layers:
            raise ValueError("layers: expected at least one layer, got none")
        if self.activation not in get_args(Activation):
            raise ValueError(
                f"activation: expected one of {get_args(Activation)}, got {self.activation!r}"
            )
        if self.experts is None and any(layer.routed for layer in self.layers):
            raise ValueError("experts: expected an ExpertConfig for routed layers, got None")

    @property
    def num_layers(self) -> int:
        """Number of transformer blocks."""
        return len(self.layers)

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def bytes_per_cell(self) -> int:
        """Bytes of one cell: the keys and values of one token over all layers."""
        item = jnp.dtype(self.dtypes.cache_dtype).itemsize
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * item
