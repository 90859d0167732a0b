"""A GGUF model, memory-mapped: its metadata and its tensors by name."""

from __future__ import annotations

import functools
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np

from jaxstate.models import gguf_codes, gguf_tables, host_memory
from jaxstate.models.fields import Fields
from jaxstate.models.gguf_tables import GgufTensor
from jaxstate.models.quantized import QuantizedMatrix

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_BLOCK_NUMBERS = 1 << 18  # dequantized at a time


class GgufFile:
    """Metadata and tensors of one GGUF file, or of a model split into several.

    Opening parses the tables at the front; tensors are read when asked for.

    Attributes:
      path: the file, the first one of several.
      paths: all files of the model.
      metadata: value by key, as Python numbers, strings, booleans and lists.
      tensors: by name; their data are views of the mapped files.
    """

    def __init__(self, path: str | pathlib.Path):
        """Open and parse the file, with those that `…-00001-of-00003.gguf` stands for.

        Raises:
          OSError: nothing is there, or it cannot be opened.
          ValueError: no GGUF file, of a version other than 2 and 3, big-endian, truncated or
            damaged, or other parts of the model are missing.
        """
        self.path = pathlib.Path(path)
        self._contents: list[np.memmap] = []
        self.metadata: Mapping[str, Any]
        self.metadata, self.tensors = self._open(self.path)
        self.paths = self._parts()
        for part in self.paths[1:]:
            metadata, tensors = self._open(part)
            if metadata.get("split.no") != len(self._contents) - 1 or tensors.keys() & self.tensors:
                raise ValueError(
                    f"{part}: expected part {len(self._contents)} of {self.path.name}, got another "
                    "file; fetch all parts again"
                )
            self.tensors |= tensors
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise ValueError(
                f"{self.path}: split.tensors.count: expected {expected} tensors in all parts, got "
                f"{len(self.tensors)}; fetch all parts again"
            )

    @functools.cached_property
    def fields(self) -> Fields:
        """The metadata with checked access."""
        return Fields(self.metadata, str(self.path))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by tensor name, outermost dimension first (GGUF lists it last)."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str, dtype: Any = np.float32) -> np.ndarray:
        """Return a tensor, dequantized; one that is stored in f32 as a view of the mapped file.

        Args:
          dtype: of the others.
        Raises:
          ValueError: the tensor has an encoding that cannot be dequantized.
        """
        self._release()  # the tensors before, which their reader is done with
        tensor = self.tensors[name]
        if tensor.encoding == gguf.GGMLQuantizationType.F32:
            return tensor.data.view(np.float32)
        out = np.empty(tensor.shape, dtype)
        rows = out.reshape(-1, out.shape[-1])
        data = tensor.data.reshape(rows.shape[0], -1)
        step = max(_BLOCK_NUMBERS // out.shape[-1], 1)
        try:
            # Piece by piece: the library would take twice the whole tensor's memory in f32. Each
            # piece as one long row: it would go through 16 rows at a time, at a third of the speed.
            for begin in range(0, rows.shape[0], step):
                piece = slice(begin, begin + step)
                numbers = gguf.dequantize(data[piece].reshape(1, -1), tensor.encoding)
                rows[piece] = numbers.reshape(-1, rows.shape[1])
                self._release()
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name}: expected an encoding that can be dequantized, got "
                f"{tensor.encoding.name}; use another quantization of the model"
            ) from error
        return out

    def read_codes(self, name: str) -> QuantizedMatrix | None:
        """Return a tensor in its few bits, None if they have no such form; see gguf_codes."""
        self._release()
        return gguf_codes.matrix_of(self.tensors[name])

    def _release(self) -> None:
        for content in self._contents:
            host_memory.release(content)

    def _open(self, path: pathlib.Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        _check_header(path)
        content = np.memmap(path, np.uint8, "r")
        self._contents.append(content)
        try:
            return gguf_tables.parse(content)
        except ValueError as error:
            raise ValueError(
                f"{path}: expected a complete GGUF file, got one that cannot be parsed "
                f"({error}); it is truncated or damaged, fetch it again"
            ) from error

    def _parts(self) -> tuple[pathlib.Path, ...]:
        """Return the files of the model, which the metadata count and the name spells out."""
        count, number = self.metadata.get("split.count", 0), self.metadata.get("split.no", 0)
        if count in (0, 1):
            return (self.path,)
        name = _SPLIT_NAME.fullmatch(self.path.name)
        if number != 0 or not name or int(name[2]) != 1 or int(name[3]) != count:
            raise ValueError(
                f"{self.path}: split.no: expected 0 in a file called …-00001-of-<count>.gguf, got "
                f"{number} of {count} parts; give the first part by the name it was published with"
            )
        parts = [
            self.path.with_name(f"{name[1]}-{part:05}-of-{name[3]}.gguf")
            for part in range(1, int(name[3]) + 1)
        ]
        for part in parts:
            if not part.is_file():
                raise ValueError(
                    f"{self.path}: expected {part.name} beside it, got no such file; fetch all "
                    f"{count} parts"
                )
        return tuple(parts)


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
