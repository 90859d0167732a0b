"""What a decoder is: sizes, rotary settings, layer kinds and dtypes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
class RopeConfig:
    """Rotary position embedding of one kind of layer (half-split pairing, as in Hugging Face).

    Attributes:
      theta: base of the geometric series of wavelengths.
      linear_factor: positions are divided by this (1.0 = no scaling).

    Source: RoFormer (arXiv:2104.09864); linear scaling (arXiv:2306.15595).
    """

    theta: float
    linear_factor: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angle per position of each pair, [head_dim / 2] f32, in radians."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        return (self.theta**-exponents / self.linear_factor).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
      rope: rotary settings.
      window: a token sees itself and the `window - 1` positions before it; None = all of them.
    """

    rope: RopeConfig
    window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer with pre-norm blocks, gated MLP and rotary attention.

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
      dtypes: see DtypePolicy.
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
    dtypes: DtypePolicy = dataclasses.field(default_factory=DtypePolicy)

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

    @functools.cached_property
    def num_params(self) -> int:
        """Number of parameters, a tied output matrix counted once."""
        block = (
            2 * self.hidden_size
            + 2 * self.hidden_size * self.num_heads * self.head_dim
            + 2 * self.hidden_size * self.num_kv_heads * self.head_dim
            + 3 * self.hidden_size * self.mlp_width
        )
        outputs = 1 if self.tied_embeddings else 2
        return (
            outputs * self.vocab_size * self.hidden_size
            + self.num_layers * block
            + self.hidden_size
        )
