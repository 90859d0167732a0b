"""Load a model from a Hugging Face directory: config.json and safetensors files."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import numpy as np
import safetensors

from jaxstate.models import fields as fields_lib
from jaxstate.models import registry, weights
from jaxstate.models.config import DtypePolicy, ModelConfig
from jaxstate.models.fields import Fields
from jaxstate.models.params import Params

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


def load_safetensors(
    directory: str | pathlib.Path, *, dtypes: DtypePolicy | None = None
) -> tuple[ModelConfig, Params]:
    """Read configuration and weights of a Hugging Face directory, sharded or not.

    Args:
      directory: holds config.json, and model.safetensors or its index and shards.
      dtypes: f32 throughout if None; weights are cast to its param_dtype.
    Returns:
      The configuration, and the tree of param_specs(config).
    Raises:
      ValueError: a file is missing or damaged, the family is unknown, a feature is not supported,
        or the tensors do not fit the configuration.
    """
    directory = pathlib.Path(directory)
    fields = Fields(fields_lib.read_json(directory / "config.json"), str(directory / "config.json"))
    form = registry.hf_format(_architectures(fields))
    config = form.config(fields, dtypes or DtypePolicy())
    with contextlib.ExitStack() as stack:
        tensors = _Tensors()
        for path in weight_files(directory):
            tensors.add(path, stack)
        tensors.check_index(directory)
        params = weights.assemble(
            config, form.layout, shapes=tensors.shapes, read=tensors.read, origin=str(directory)
        )
    return config, params


def weight_files(directory: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Return the safetensors files of a directory, shards in order of their names.

    Raises:
      ValueError: there are none, a shard is missing, or the index is damaged.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.is_file():
        return (single,)
    if not index.is_file():
        raise ValueError(
            f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}, got neither; save the model "
            "as safetensors"
        )
    shards = sorted(set(_weight_map(index).values()))
    for shard in shards:
        if pathlib.PurePath(shard).name != shard or not (directory / shard).is_file():
            raise ValueError(
                f"{index}: expected the shard {shard} beside it, got no such file; fetch the "
                "model again"
            )
    return tuple(directory / shard for shard in shards)


class _Tensors:
    """The tensors of several open safetensors files."""

    def __init__(self):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        self._paths: dict[str, pathlib.Path] = {}

    def add(self, path: pathlib.Path, stack: contextlib.ExitStack) -> None:
        """Open a file until `stack` closes, and list its tensors."""
        try:
            file = stack.enter_context(safetensors.safe_open(path, framework="np"))
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path}: expected a complete safetensors file, got one that cannot be read "
                f"({error}); it is truncated or damaged, fetch it again"
            ) from error
        for name in file.keys():
            if name in self._files:
                raise ValueError(
                    f"{path}: tensor {name}: expected it in one shard, got it again after "
                    f"{self._paths[name].name}; fetch the model again"
                )
            self.shapes[name] = tuple(file.get_slice(name).get_shape())
            self._files[name] = file
            self._paths[name] = path

    def check_index(self, directory: pathlib.Path) -> None:
        """Check that every tensor of the index, if there is one, is in the shard it names."""
        index = directory / INDEX_FILE
        if (directory / SINGLE_FILE).is_file():
            return
        for name, shard in _weight_map(index).items():
            if name not in self._paths or self._paths[name].name != shard:
                raise ValueError(
                    f"{index}: tensor {name}: expected it in {shard}, got a shard without it; "
                    "fetch the model again"
                )

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as stored."""
        dtype = self._files[name].get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ValueError(
                f"{self._paths[name]}: tensor {name}: expected {', '.join(_DTYPES)}, got {dtype}; "
                "use an unquantized copy of the model"
            )
        return self._files[name].get_tensor(name)


def _weight_map(index: pathlib.Path) -> dict[str, str]:
    weight_map = fields_lib.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index}: weight_map: expected a shard per tensor, got {weight_map!r}; fetch the "
            "file again"
        )
    return {str(name): str(shard) for name, shard in weight_map.items()}


def _architectures(fields: Fields) -> list[str]:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"{fields.origin}: architectures: expected a list of names, got {names!r}; fetch the "
            "file again"
        )
    return names
