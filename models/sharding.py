"""How a model lies over the devices of a mesh: tensor parallelism from the declared axes."""

from __future__ import annotations

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxstate.models import params as params_lib
from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params, ParamSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharding:
    """Which axes of weights and pages are split over one axis of a mesh; the others are copied.

    Key/value heads are split where they divide evenly; else keys and values are on every device
    and query heads are split, where every device's share reads whole or single key/value heads;
    else attention is computed on every device. The MLP and the vocabulary are split where they
    divide, and the weights of attention like its heads.

    Attributes:
      mesh: the devices.
      axis: of the mesh.
      split: logical axes (see ParamSpec) that are split.
      heads, kv_heads: of the whole model.

    Source: Megatron-LM (arXiv:1909.08053); grouped heads as in arXiv:2211.05102.
    """

    mesh: Mesh
    axis: str
    split: frozenset[str]
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, model: ModelConfig, mesh: Mesh, axis: str = "model") -> Sharding:
        """Return the sharding of a model over `axis` of a mesh.

        Raises:
          ValueError: the mesh has no such axis, or the weights are quantized.
        """
        if model.quantized:
            raise ValueError(
                "sharding: expected float weights, got quantized ones, which stay on one device; "
                'load the model with weights="float"'
            )
        if axis not in mesh.shape:
            raise ValueError(
                f"mesh: expected an axis {axis!r}, got {tuple(mesh.shape)}; name one of these"
            )
        count = mesh.shape[axis]
        split = {"mlp"} if _divides(count, _mlp_widths(model)) else set()
        if model.vocab_size % count == 0:
            split.add("vocab")
        if model.num_kv_heads % count == 0:
            split |= {"heads", "kv_heads"}
        elif model.num_heads % count == 0:
            share, shared = model.num_heads // count, model.heads_per_kv_head
            if share % shared == 0 or shared % share == 0:
                split.add("heads")
        return cls(
            mesh=mesh,
            axis=axis,
            split=frozenset(split),
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
        )

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Return the partition of an array whose dimensions have these logical axes."""
        return PartitionSpec(*(self.axis if axis in self.split else None for axis in axes))

    def named(self, *axes: str | None) -> NamedSharding:
        """Return the placement of such an array; without axes, a copy on every device."""
        return NamedSharding(self.mesh, self.spec(*axes))

    def of_param(self, spec: ParamSpec) -> NamedSharding:
        """Return the placement of a weight."""
        return self.named(*spec.axes)

    @property
    def local_kv_heads(self) -> int:
        """Key/value heads that one device's query heads read."""
        share = self._local_heads
        if "kv_heads" in self.split:
            return self.kv_heads // self.mesh.shape[self.axis]
        return max(share * self.kv_heads // self.heads, 1)

    def own_kv_heads(self, x: jax.Array, dimension: int) -> jax.Array:
        """Take what this device's query heads read out of all key/value heads, inside shard_map.

        A copy where heads are split and keys and values are not; else x itself.
        """
        if "kv_heads" in self.split or "heads" not in self.split:
            return x
        first = jax.lax.axis_index(self.axis) * self._local_heads * self.kv_heads // self.heads
        return jax.lax.dynamic_slice_in_dim(x, first, self.local_kv_heads, dimension)

    @property
    def _local_heads(self) -> int:
        return self.heads // (self.mesh.shape[self.axis] if "heads" in self.split else 1)


def place(params: Params, model: ModelConfig, sharding: Sharding) -> Params:
    """Move weights to where they belong.

    Raises:
      ValueError: some of them are quantized.
    """
    if model.quantized:
        raise ValueError(
            f"params: expected floats on several devices, got {model.quantized[0][0]} in "
            f"{model.quantized[0][1].bits} bits; quantized weights stay on one device"
        )
    placements = params_lib.map_specs(lambda _, spec: sharding.of_param(spec), model)
    return jax.tree.map(jax.device_put, params, placements)


def _mlp_widths(model: ModelConfig) -> list[int]:
    widths = [model.mlp_width] if any(not layer.routed for layer in model.layers) else []
    return widths + ([model.experts.width] if model.experts else [])


def _divides(count: int, sizes: list[int]) -> bool:
    return all(size % count == 0 for size in sizes)
