"""The codes of GGUF's block encodings as they are, with the scales and offsets they stand under.

The gguf library unpacks the bits: a block whose scale is one and whose offset is zero dequantizes
to its codes.

Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import gguf
import numpy as np

from jaxstate.models.gguf_tables import GgufTensor
from jaxstate.models.quantized import QuantizedMatrix, pack

_Parts = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]
"""Takes [blocks, bytes] uint8 and returns scales and offsets, [blocks, groups] f32; writes ones and
zeros in their places."""

_ONE, _ZERO = np.float16(1).tobytes(), np.float16(0).tobytes()
_NUMBERS_AT_ONCE = 1 << 20


def _take_f16(blocks: np.ndarray, at: int, then: bytes) -> np.ndarray:
    """Return a number of every block, [blocks, 1] f32, and write another in its place."""
    found = blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)
    blocks[:, at : at + 2] = np.frombuffer(then, np.uint8)
    return found


def _scale(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    return _take_f16(blocks, 0, _ONE), None


def _scale_and_offset(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _take_f16(blocks, 0, _ONE), _take_f16(blocks, 2, _ZERO)


def _eight_of_six_bits(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets of six bits under a factor for each kind."""
    scale, offset = _take_f16(blocks, 0, _ONE), _take_f16(blocks, 2, _ONE)
    scales, offsets = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    blocks[:, 4:16] = [1] * 4 + [0] * 4 + [1] * 4  # ones and zeros as six bits each
    return scale * scales.astype(np.float32), -offset * offsets.astype(np.float32)


def _sixteen_of_eight_bits(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    blocks[:, 192:208] = 1
    return _take_f16(blocks, 208, _ONE) * scales, None


@dataclasses.dataclass(frozen=True)
class _Encoding:
    """How an encoding's codes are kept.

    Attributes:
      take_parts: see _Parts.
      bits: of a kept code.
      shift: added to codes, so that those of 4 bits begin at zero.
    """

    take_parts: _Parts
    bits: int = 8
    shift: int = 0


_Type = gguf.GGMLQuantizationType
_ENCODINGS = {
    _Type.Q4_0: _Encoding(_scale, bits=4, shift=8),
    _Type.Q4_1: _Encoding(_scale_and_offset, bits=4),
    _Type.Q5_0: _Encoding(_scale),
    _Type.Q5_1: _Encoding(_scale_and_offset),
    _Type.Q8_0: _Encoding(_scale),
    _Type.Q4_K: _Encoding(_eight_of_six_bits, bits=4),
    _Type.Q5_K: _Encoding(_eight_of_six_bits),
    _Type.Q6_K: _Encoding(_sixteen_of_eight_bits),
    _Type.IQ4_NL: _Encoding(_scale),
}


def matrix_of(tensor: GgufTensor) -> QuantizedMatrix | None:
    """Return a tensor as its file stores it, in numpy arrays; None if its encoding does not fit.

    Its weights are those of `gguf.dequantize`, but for the rounding of one addition.
    """
    encoding = _ENCODINGS.get(tensor.encoding)
    if encoding is None:
        return None
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[tensor.encoding]
    blocks = tensor.data.reshape(-1, block_bytes)
    step = _NUMBERS_AT_ONCE // block_len
    parts = [
        _split(blocks[begin : begin + step].copy(), tensor.encoding, encoding)
        for begin in range(0, len(blocks), step)
    ]
    lead = tensor.shape[:-1]
    codes, scales, offsets = (
        None if part[0] is None else np.concatenate(part).reshape(*lead, -1)
        for part in zip(*parts, strict=True)
    )
    return QuantizedMatrix(codes=codes, scales=scales, offsets=offsets, shape=tensor.shape)


def _split(
    blocks: np.ndarray, kind: _Type, encoding: _Encoding
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return codes, scales and offsets of [blocks, bytes], which are overwritten."""
    scales, offsets = encoding.take_parts(blocks)
    # As one row: the library takes few rows at a time.
    codes = gguf.dequantize(blocks.reshape(-1), kind) + encoding.shift
    if encoding.shift:
        offsets = -encoding.shift * scales
    if encoding.bits == 4:
        return pack(codes.astype(np.uint8)), scales, offsets
    return codes.astype(np.int8), scales, offsets
