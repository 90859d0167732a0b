"""Rotation of heads by tabulated angles: the form every attention implementation shares."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Angles:
    """Cosines and sines of rotary angles, f32, [..., head_dim / 2]."""

    cos: jax.Array
    sin: jax.Array

    def __getitem__(self, index) -> Angles:
        """Index both tables alike."""
        return Angles(cos=self.cos[index], sin=self.sin[index])

    @property
    def reversed(self) -> Angles:
        """The angles of the opposite rotation."""
        return Angles(cos=self.cos, sin=-self.sin)


def angles_at(positions: jax.Array, inverse_frequencies: jax.Array) -> Angles:
    """Tabulate angles at positions [...] int32 (any sign): [..., head_dim / 2]."""
    radians = positions.astype(jnp.float32)[..., None] * inverse_frequencies
    return Angles(cos=jnp.cos(radians), sin=jnp.sin(radians))


def turn(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotate x [..., head_dim] by angles that broadcast against [..., head_dim / 2], in f32.

    Element i is paired with element i + head_dim / 2.  Source: RoFormer (arXiv:2104.09864).
    """
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate(
        [
            left * angles.cos - right * angles.sin,
            right * angles.cos + left * angles.sin,
        ],
        axis=-1,
    )
    return turned.astype(x.dtype)
