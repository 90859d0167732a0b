"""From the tensors of a weight file to the parameter tree: one rule for formats and families."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jaxstate.models import host_memory, quantized
from jaxstate.models import params as params_lib
from jaxstate.models.config import ModelConfig, Quantization
from jaxstate.models.params import Params, ParamSpec
from jaxstate.models.quantized import QuantizedMatrix
from jaxstate.models.sharding import Sharding

Restore = Callable[[np.ndarray, ParamSpec, ModelConfig], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """How one file format names and stores the weights of a family.

    Attributes:
      names: last part of a parameter's path ("wq", "embed") to the tensor's name in the file,
        with `{layer}` where the layer index stands, and `{expert}` if every expert has a tensor
        of its own. Parameters of one tensor lie in it one after the other, in this order.
      restore: last part of a path to a function (stored tensor, spec, config) -> the tensor as
        Hugging Face stores it, [outputs, inputs]; only for tensors that differ.
      ignored: shell-style patterns of tensors that hold no parameter.
    """

    names: Mapping[str, str]
    restore: Mapping[str, Restore] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def tensor_name(self, path: str, expert: int = 0) -> str:
        """Return the tensor that holds the parameter at `path`, e.g. "layers.3.wq"."""
        parts = path.split(".")
        template = self.names[parts[-1]]
        if parts[0] != "layers":
            return template
        return template.format(layer=parts[1], expert=expert)

    def is_per_expert(self, path: str) -> bool:
        """Return whether every expert has a tensor of its own."""
        return "{expert}" in self.names[path.rpartition(".")[2]]


def to_layout(stored: np.ndarray, spec: ParamSpec) -> np.ndarray:
    """Turn a tensor of `spec.stored_shape` into this package's layout, inputs first."""
    if spec.kind == "matrix" and spec.axes[0] != "vocab":
        stored = stored.swapaxes(-1, -2)
    return stored.reshape(spec.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a parameter lies in a file.

    Attributes:
      tensors: one, or one per expert.
      shape: that each of them must have.
      begin, end: rows of the tensor that are this parameter's, along the axis of outputs.
    """

    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    begin: int
    end: int


def _places(config: ModelConfig, layout: WeightLayout) -> dict[str, _Place]:
    """Return the place of every parameter by path, parameters that share a tensor side by side."""
    specs: dict[str, ParamSpec] = {}
    params_lib.map_specs(specs.__setitem__, config)
    order = {name: index for index, name in enumerate(layout.names)}
    sharing: dict[str, list[str]] = {}
    for path in sorted(specs, key=lambda path: order[path.rpartition(".")[2]]):
        sharing.setdefault(layout.tensor_name(path), []).append(path)
    places = {}
    for paths in sharing.values():
        shapes = [specs[path].stored_shape for path in paths]
        per_expert = layout.is_per_expert(paths[0])
        if per_expert:
            shapes = [shape[1:] for shape in shapes]
        axis = max(len(shapes[0]) - 2, 0)
        rows = sum(shape[axis] for shape in shapes)
        begin = 0
        for path, shape in zip(paths, shapes, strict=True):
            count = specs[path].shape[0] if per_expert else 1
            places[path] = _Place(
                tensors=tuple(layout.tensor_name(path, expert) for expert in range(count)),
                shape=(*shape[:axis], rows, *shape[axis + 1 :]),
                begin=begin,
                end=begin + shape[axis],
            )
            begin += shape[axis]
    return places


def assemble(
    config: ModelConfig,
    layout: WeightLayout,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray | QuantizedMatrix],
    origin: str,
    form: Quantization | None = None,
    mesh: Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Build and check the parameter tree; tensors are read one at a time.

    An output matrix stored beside a tied embedding is ignored, as Hugging Face does.

    Args:
      shapes: every tensor of the file and its shape.
      read: returns one tensor by name, of any float dtype, cast here; or in few bits, as it is.
      origin: what to call the file in messages.
      form: of matrices that are read as floats, with int8 instead of 4 bits for those of the
        vocabulary; None = floats.
      mesh: each tensor goes to its devices as it is read, see Sharding; None = the default one.
    Returns:
      The configuration, which says what is quantized, and the tree of param_specs(config); its
      arrays share no memory with the file.
    Raises:
      ValueError: a tensor is missing, not expected, of another shape, or not finite.
    """
    places = _places(config, layout)
    wanted = {name for place in places.values() for name in place.tensors}
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

    for place in places.values():
        for name in place.tensors:
            if tuple(shapes[name]) != place.shape:
                raise ValueError(
                    f"{origin}: tensor {name}: expected shape {place.shape}, got "
                    f"{tuple(shapes[name])}; the weights do not belong to this configuration"
                )

    def part(name: str, place: _Place) -> np.ndarray | QuantizedMatrix:
        stored = read(name)
        axis = max(len(place.shape) - 2, 0)
        if place.end - place.begin == place.shape[axis]:
            return stored
        index = (slice(None),) * axis + (slice(place.begin, place.end),)
        return jax.tree.map(lambda array: array[index], stored)

    sharding = None if mesh is None else Sharding.of(config, mesh)
    forms: list[tuple[str, Quantization]] = []

    def load(path: str, spec: ParamSpec):
        place = places[path]
        parts = [part(name, place) for name in place.tensors]
        stored = parts[0]
        if layout.is_per_expert(path):
            stored = jax.tree.map(lambda *arrays: np.stack(arrays), *parts)
        restore = layout.restore.get(path.rpartition(".")[2])
        if restore is not None:  # rows only, which codes and scales have alike
            stored = jax.tree.map(lambda array: restore(array, spec, config), stored)
        if form is not None and spec.may_be_quantized and isinstance(stored, np.ndarray):
            # Four bits of the vocabulary's matrices cost more than those of all others.
            wide = form.bits == 4 and spec.axes[0] == "vocab"
            stored = quantized.quantize(stored, quantized.FORMS["int8"] if wide else form)
        if isinstance(stored, np.ndarray):
            dtype = spec.dtype(config.dtypes)
            where = None if sharding is None else sharding.of_param(spec)
            return host_memory.place(to_layout(stored, spec), dtype, name=path, sharding=where)
        forms.append((path, quantized.describe(stored)))
        placed = jax.tree.map(
            lambda array: host_memory.place(array, array.dtype, name=path), stored
        )
        return placed.replace(shape=spec.shape)

    params = params_lib.map_specs(load, config)
    return dataclasses.replace(config, quantized=tuple(forms)), params


def _first(names: Iterable[str]) -> str:
    """Name one tensor and count the others."""
    ordered = sorted(names)
    others = f" (and {len(ordered) - 1} more)" if len(ordered) > 1 else ""
    return ordered[0] + others
