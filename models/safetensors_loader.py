"""Load a model from a Hugging Face directory: config.json and safetensors files."""

from __future__ import annotations

import json
import pathlib

import ml_dtypes
import numpy as np
import safetensors
from jax.sharding import Mesh

from jaxstate.models import fields as fields_lib
from jaxstate.models import host_memory, quantized, registry
from jaxstate.models.config import DtypePolicy, ModelConfig, Quantization
from jaxstate.models.families.base import HuggingFace
from jaxstate.models.fields import Fields
from jaxstate.models.params import Params
from jaxstate.models.quantized import Weights
from jaxstate.models.weights import assemble

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def load_safetensors(
    directory: str | pathlib.Path,
    *,
    dtypes: DtypePolicy | None = None,
    weights: Weights | Quantization = "float",
    mesh: Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Read configuration and weights of a Hugging Face directory, sharded or not.

    Args:
      directory: holds config.json, and model.safetensors or its index and shards.
      dtypes: f32 throughout if None; weights are cast to its param_dtype.
      weights: what to make of matrices; "stored" is of GGUF files only.
      mesh: devices that weights go to as they are read; None = the default one.
    Returns:
      The configuration, and the tree of param_specs(config).
    Raises:
      ValueError: a file is missing or damaged, the family is unknown, a feature is not supported,
        or the tensors do not fit the configuration.
    """
    directory = pathlib.Path(directory)
    if weights == "stored":
        raise ValueError(
            f'{directory}: weights: expected "float" or a form to quantize to, got "stored", which '
            "only GGUF files have"
        )
    fields, form = _format(directory)
    config = form.config(fields, dtypes or DtypePolicy())
    tensors = _Tensors()
    for path in weight_files(directory):
        tensors.add(path)
    tensors.check_index(directory)
    return assemble(
        config, form.layout, shapes=tensors.shapes, read=tensors.read, origin=str(directory),
        form=quantized.form_of(weights), mesh=mesh,
    )  # fmt: skip


def read_config(directory: pathlib.Path, dtypes: DtypePolicy) -> ModelConfig:
    """Read the configuration alone; see load_safetensors for errors."""
    fields, form = _format(directory)
    return form.config(fields, dtypes)


def _format(directory: pathlib.Path) -> tuple[Fields, HuggingFace]:
    path = directory / "config.json"
    fields = Fields(fields_lib.read_json(path), str(path))
    return fields, registry.hf_format(_architectures(fields))


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
    """The tensors of several safetensors files, mapped into memory."""

    def __init__(self):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._shards: dict[str, _Shard] = {}
        self._last: _Shard | None = None

    def add(self, path: pathlib.Path) -> None:
        """Map a file and list its tensors."""
        shard = _Shard(path)
        for name, shape in shard.shapes.items():
            if name in self._shards:
                raise ValueError(
                    f"{path}: tensor {name}: expected it in one shard, got it again after "
                    f"{self._shards[name].path.name}; fetch the model again"
                )
            self.shapes[name] = shape
            self._shards[name] = shard

    def check_index(self, directory: pathlib.Path) -> None:
        """Check that every tensor of the index, if there is one, is in the shard it names."""
        index = directory / INDEX_FILE
        if (directory / SINGLE_FILE).is_file():
            return
        for name, file_name in _weight_map(index).items():
            if name not in self._shards or self._shards[name].path.name != file_name:
                raise ValueError(
                    f"{index}: tensor {name}: expected it in {file_name}, got a shard without it; "
                    "fetch the model again"
                )

    def read(self, name: str) -> np.ndarray:
        """Return one tensor as stored, a view of the file; it is done with at the next call."""
        if self._last is not None:
            host_memory.release(self._last.content)
        self._last = self._shards[name]
        return self._last.view(name)


class _Shard:
    """One safetensors file, mapped.

    Attributes:
      path: of the file.
      shapes: by tensor name.
      content: all bytes of the file.
    """

    def __init__(self, path: pathlib.Path):
        """Open a file that the library finds whole: it checks the table against the file's size."""
        self.path = path
        try:
            with safetensors.safe_open(path, framework="np"):
                pass
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{path}: expected a complete safetensors file, got one that cannot be read "
                f"({error}); it is truncated or damaged, fetch it again"
            ) from error
        self.content = np.memmap(path, np.uint8, "r")
        self._begin = 8 + int.from_bytes(self.content[:8].tobytes(), "little")
        self._table = json.loads(self.content[8 : self._begin].tobytes())
        self._table.pop("__metadata__", None)
        self.shapes = {name: tuple(entry["shape"]) for name, entry in self._table.items()}

    def view(self, name: str) -> np.ndarray:
        """Return a tensor where it lies."""
        entry = self._table[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(
                f"{self.path}: tensor {name}: expected {', '.join(_DTYPES)}, got "
                f"{entry['dtype']}; use an unquantized copy of the model"
            )
        begin, end = (self._begin + offset for offset in entry["data_offsets"])
        return self.content[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


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
