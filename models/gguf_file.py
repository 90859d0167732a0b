"""A GGUF file, memory-mapped: its metadata and its tensors by name."""

from __future__ import annotations

import functools
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import numpy as np

from jaxstate.models.fields import Fields

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)


class GgufFile:
    """Metadata and tensors of one GGUF file.

    Opening parses the tables at the front; tensors are read when asked for.

    Attributes:
      path: the file.
      metadata: value by key, as Python numbers, strings, booleans and lists.
      tensors: gguf.ReaderTensor by name; their data are views of the mapped file.
    """

    def __init__(self, path: str | pathlib.Path):
        """Open and parse the file.

        Raises:
          FileNotFoundError: nothing is there.
          ValueError: no GGUF file, of a version other than 2 and 3, big-endian, truncated or
            damaged.
        """
        self.path = pathlib.Path(path)
        _check_header(self.path)
        try:
            with np.errstate(over="raise"):
                reader = _BoundedReader(self.path)
        except (ValueError, IndexError, KeyError, ArithmeticError) as error:
            raise ValueError(
                f"{self.path}: expected a complete GGUF file, got one that cannot be parsed "
                f"({error}); it is truncated or damaged, fetch it again"
            ) from error
        self.metadata: Mapping[str, Any] = _Metadata(self.path, reader.fields)
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    @functools.cached_property
    def fields(self) -> Fields:
        """The metadata with checked access."""
        return Fields(self.metadata, str(self.path))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by tensor name, outermost dimension first (GGUF lists it last)."""
        return {
            name: tuple(int(length) for length in reversed(tensor.shape))
            for name, tensor in self.tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        """Return a tensor in f32, dequantized; it may be a view of the mapped file.

        Raises:
          ValueError: the tensor has an encoding that cannot be dequantized.
        """
        tensor = self.tensors[name]
        try:
            return gguf.dequantize(np.asarray(tensor.data), tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name}: expected an encoding that can be dequantized, got "
                f"{tensor.tensor_type.name}; use another quantization of the model"
            ) from error


class _BoundedReader(gguf.GGUFReader):
    """The library's reader, made to stop at the end of the file.

    The library slices past the end without notice, and a damaged length of an array would keep
    it appending empty values for ever. Slicing a plain view of the map also parses a vocabulary
    in a third of the time that slicing the memmap takes.
    """

    _bytes: np.ndarray | None = None

    def _get(self, offset, dtype, count=1, override_order=None):
        if self._bytes is None:
            self._bytes = np.asarray(self.data)
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self._bytes.size:
            raise ValueError(f"needs {end} bytes, has {self._bytes.size}")
        values = self._bytes[int(offset) : end].view(dtype)
        return values.view(values.dtype.newbyteorder(override_order or self.byte_order))


class _Metadata(Mapping[str, Any]):
    """Values decoded on access: vocabularies are long, and most readers want a few numbers."""

    def __init__(self, path: pathlib.Path, fields: Mapping[str, gguf.ReaderField]):
        self._path = path
        self._fields = fields

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._path}: {key}: expected UTF-8 text, got other bytes; the file is "
                "damaged, fetch it again"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


def _check_header(path: pathlib.Path) -> None:
    with path.open("rb") as file:
        header = file.read(8)
    if header[:4] != _MAGIC or len(header) < 8:
        raise ValueError(
            f"{path}: expected a GGUF file, got one that starts with {header!r}; give a .gguf file "
            "or a Hugging Face directory"
        )
    (version,) = struct.unpack("<I", header[4:])
    if version & 0xFFFF == 0:
        raise ValueError(
            f"{path}: expected a little-endian GGUF file, got a big-endian one; convert it with "
            "gguf-convert-endian"
        )
    if version not in _VERSIONS:
        raise ValueError(
            f"{path}: expected GGUF version 2 or 3, got version {version}; convert the model again "
            "with a current llama.cpp"
        )
