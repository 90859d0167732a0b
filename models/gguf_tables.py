"""The tables at the front of a GGUF file: metadata by key, and where each tensor lies.

The gguf library's reader keeps arrays for every string of a vocabulary: 2.9 s and 300 MB for one of
262,144 tokens. Decoding at once takes a tenth of both.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import gguf
import numpy as np

DEFAULT_ALIGNMENT = 32

_NUMBERS = {
    gguf.GGUFValueType.UINT8: "<u1",
    gguf.GGUFValueType.INT8: "<i1",
    gguf.GGUFValueType.UINT16: "<u2",
    gguf.GGUFValueType.INT16: "<i2",
    gguf.GGUFValueType.UINT32: "<u4",
    gguf.GGUFValueType.INT32: "<i4",
    gguf.GGUFValueType.FLOAT32: "<f4",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "<u8",
    gguf.GGUFValueType.INT64: "<i8",
    gguf.GGUFValueType.FLOAT64: "<f8",
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GgufTensor:
    """A tensor as it lies in a file.

    Attributes:
      shape: outermost dimension first.
      encoding: how its numbers are stored.
      data: [..., bytes of a row] uint8, a view of the mapped file.
    """

    shape: tuple[int, ...]
    encoding: gguf.GGMLQuantizationType
    data: np.ndarray


def parse(content: np.ndarray) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read the tables.

    Args:
      content: [size] uint8, the whole file.
    Returns:
      Metadata as Python numbers, strings, booleans and lists; and the tensors by name.
    Raises:
      ValueError: truncated or damaged; the message says what was found.
    """
    cursor = _Cursor(content)
    cursor.skip(8)  # magic and version, checked by the caller
    num_tensors, num_values = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text("a key")
        if key in metadata:
            raise ValueError(f"the key {key} twice")
        metadata[key] = cursor.value(key)
    places = [_place(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"an alignment of {alignment!r}, no power of 2")
    begin = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, encoding, offset in places:
        if name in tensors:
            raise ValueError(f"the tensor {name} twice")
        tensors[name] = _tensor(content, name, shape, encoding, begin + offset)
    return metadata, tensors


class _Cursor:
    """Reads one item after the other, never past the end."""

    def __init__(self, content: np.ndarray):
        self._content = content
        self._bytes = memoryview(content)
        self.offset = 0

    def skip(self, num_bytes: int) -> int:
        """Step over bytes that must be there; return where they begin."""
        begin = self.offset
        self.offset += num_bytes
        if self.offset > len(self._bytes):
            raise ValueError(f"needs {self.offset} bytes, has {len(self._bytes)}")
        return begin

    def u32(self) -> int:
        return _U32.unpack_from(self._bytes, self.skip(4))[0]

    def u64(self) -> int:
        return _U64.unpack_from(self._bytes, self.skip(8))[0]

    def text(self, what: str) -> str:
        size = self.u64()
        begin = self.skip(size)
        try:
            return str(self._bytes[begin : begin + size], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what}: expected UTF-8 text, got other bytes") from error

    def value(self, key: str) -> Any:
        kind = gguf.GGUFValueType(self.u32())
        if kind == gguf.GGUFValueType.ARRAY:
            kind = gguf.GGUFValueType(self.u32())
            return self._array(key, kind, self.u64())
        return self._array(key, kind, 1)[0]

    def _array(self, key: str, kind: gguf.GGUFValueType, count: int) -> list[Any]:
        if kind == gguf.GGUFValueType.STRING:
            return [self.text(key) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"{key}: an array of {kind.name}")
        dtype = np.dtype(_NUMBERS[kind])
        begin = self.skip(count * dtype.itemsize)
        return self._content[begin : self.offset].view(dtype).tolist()


def _place(cursor: _Cursor) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    """Read name, shape, encoding and offset of a tensor."""
    name = cursor.text("a tensor's name")
    num_dims = cursor.u32()
    lengths = [cursor.u64() for _ in range(num_dims)]
    encoding = gguf.GGMLQuantizationType(cursor.u32())
    return name, tuple(reversed(lengths)), encoding, cursor.u64()


def _tensor(
    content: np.ndarray,
    name: str,
    shape: tuple[int, ...],
    encoding: gguf.GGMLQuantizationType,
    begin: int,
) -> GgufTensor:
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[encoding]
    if not shape or 0 in shape or shape[-1] % block_len:
        raise ValueError(f"tensor {name}: shape {shape} in blocks of {block_len}")
    row_bytes = shape[-1] // block_len * block_bytes
    end = begin + math.prod(shape[:-1]) * row_bytes
    if end > content.size:
        raise ValueError(f"tensor {name}: needs {end} bytes, has {content.size}")
    data = np.asarray(content[begin:end]).reshape(*shape[:-1], row_bytes)
    return GgufTensor(shape=shape, encoding=encoding, data=data)
