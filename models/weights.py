"""From the tensors of a weight file to the parameter tree: one rule for formats and families."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.models import params as params_lib
from jaxstate.models.config import ModelConfig
from jaxstate.models.params import Params, ParamSpec

Restore = Callable[[np.ndarray, ParamSpec], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """How one file format names and stores the weights of a family.

    Attributes:
      names: last part of a parameter's path ("wq", "embed") to the tensor's name in the file,
        with `{layer}` where the layer index stands.
      restore: last part of a path to a function (stored tensor, spec) -> the tensor as Hugging
        Face stores it, [outputs, inputs]; only for tensors that the format alters.
      ignored: shell-style patterns of tensors that hold no parameter.
    """

    names: Mapping[str, str]
    restore: Mapping[str, Restore] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def tensor_name(self, path: str) -> str:
        """Return the tensor that holds the parameter at `path`, e.g. "layers.3.wq"."""
        parts = path.split(".")
        template = self.names[parts[-1]]
        return template.format(layer=parts[1]) if parts[0] == "layers" else template


def stored_shape(spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape weight files use: a matrix is [outputs, inputs], heads are flattened."""
    if spec.fan_in == 0 or spec.axes[0] == "vocab":
        return spec.shape
    return (math.prod(spec.shape) // spec.fan_in, spec.fan_in)


def to_layout(stored: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """Turn a tensor of `stored_shape(spec)` into this package's layout, inputs first."""
    if spec.fan_in == 0 or spec.axes[0] == "vocab":
        return stored
    return stored.T.reshape(spec.shape)


def assemble(
    config: ModelConfig,
    layout: WeightLayout,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    origin: str,
) -> Params:
    """Build and check the parameter tree; tensors are read one at a time.

    An output matrix stored beside a tied embedding is ignored, as Hugging Face does.

    Args:
      shapes: every tensor of the file and its shape.
      read: returns one tensor by name, any float dtype; cast to config.dtypes.param_dtype here.
      origin: what to call the file in messages.
    Returns:
      The tree of param_specs(config); its arrays share no memory with the file.
    Raises:
      ValueError: a tensor is missing, not expected, of another shape, or not finite.
    """
    names = params_lib.map_specs(lambda path, _: layout.tensor_name(path), config)
    wanted = set(jax.tree.leaves(names))
    ignored = layout.ignored
    if config.tied_embeddings:
        ignored += (layout.names["lm_head"],)
    present = {name for name in shapes if not any(fnmatch.fnmatch(name, p) for p in ignored)}
    if missing := wanted - present:
        raise ValueError(
            f"{origin}: expected tensor {_first(missing)}, got a file without it; the file is "
            f"incomplete or no {config.family} model, fetch it again"
        )
    if extra := present - wanted:
        raise ValueError(
            f"{origin}: expected only the tensors of a {config.family} model, got "
            f"{_first(extra)} as well; use a model whose features are supported"
        )

    def check(path, spec):
        name = layout.tensor_name(path)
        if tuple(shapes[name]) != stored_shape(spec):
            raise ValueError(
                f"{origin}: tensor {name}: expected shape {stored_shape(spec)}, got "
                f"{tuple(shapes[name])}; the weights do not belong to this configuration"
            )

    def load(path, spec):
        stored = read(layout.tensor_name(path))
        restore = layout.restore.get(path.rpartition(".")[2])
        if restore is not None:
            stored = restore(stored, spec)
        return jnp.array(to_layout(stored, spec), config.dtypes.param_dtype)

    params_lib.map_specs(check, config)
    params = params_lib.map_specs(load, config)
    params_lib.check_params(params, config)
    return params


def _first(names: Iterable[str]) -> str:
    """Name one tensor and count the others."""
    ordered = sorted(names)
    others = f" (and {len(ordered) - 1} more)" if len(ordered) > 1 else ""
    return ordered[0] + others
