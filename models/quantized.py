"""Matrices in few bits: what they mean, how they are made, and the plain product with them.

A weight is scale * code + offset, with one scale and one offset per group of inputs. That form
holds the usual block encodings of GGUF exactly, see gguf_codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxstate.models.config import Quantization

Weights = Literal["float", "stored", "int8", "int8-channel", "int4"]
"""What a loader makes of matrices.

Floats; what a GGUF file stores; int8 with a scale per 32 inputs, or per output, which is smaller
and coarser; int4 with a scale and an offset per 32 inputs, but int8 for the vocabulary's matrices.
"""

FORMS = {
    "int8": Quantization(bits=8, group=32),
    "int8-channel": Quantization(bits=8),
    "int4": Quantization(bits=4, group=32, offsets=True),
}

Product = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""product(x, codes, scales, offsets) -> [rows, outputs] f32; x is [rows, inputs of the codes]."""

_BLOCK = 32  # inputs that 16 bytes of nibbles hold; codes are padded to a multiple
_HALF = 16
_NUMBERS_AT_ONCE = 1 << 20


@flax.struct.dataclass
class QuantizedMatrix:
    """A matrix, outputs first as weight files have it; of experts, the expert in front.

    Attributes:
      codes: [..., outputs, inputs] int8; or [..., outputs, inputs / 2] uint8, of every 32 inputs
        the first 16 in the low nibbles and the others in the high ones. Inputs are padded to whole
        groups and to a multiple of 32.
      scales, offsets: [..., outputs, groups] f32; offsets may be None.
      shape: of the parameter that it stands for, see ParamSpec.
    """

    codes: Any
    scales: Any
    offsets: Any
    shape: tuple[int, ...] = flax.struct.field(pytree_node=False)


def form_of(weights: Weights | Quantization) -> Quantization | None:
    """Return how to quantize; None where floats, or what is stored, are to stay as they are.

    Raises:
      ValueError: an unknown name.
    """
    if isinstance(weights, Quantization):
        return weights
    if weights not in get_args(Weights):
        raise ValueError(f"weights: expected one of {get_args(Weights)}, got {weights!r}")
    return FORMS.get(weights)


def describe(matrix: QuantizedMatrix) -> Quantization:
    """Return the form of a matrix."""
    bits = 4 if matrix.codes.dtype == np.uint8 else 8
    groups = matrix.scales.shape[-1]
    group = None if groups == 1 else matrix.codes.shape[-1] * 8 // bits // groups
    return Quantization(bits=bits, group=group, offsets=matrix.offsets is not None)


def abstract(
    form: Quantization, stored_shape: tuple[int, ...], shape: tuple[int, ...]
) -> QuantizedMatrix:
    """Return a matrix of jax.ShapeDtypeStruct; stored_shape is [..., outputs, inputs]."""
    *lead, inputs = stored_shape
    padded = _padded(inputs, form)
    groups = jax.ShapeDtypeStruct((*lead, padded // (form.group or padded)), jnp.float32)
    nibbles = form.bits == 4
    codes = (*lead, padded // 2 if nibbles else padded)
    return QuantizedMatrix(
        codes=jax.ShapeDtypeStruct(codes, jnp.uint8 if nibbles else jnp.int8),
        scales=groups,
        offsets=groups if form.offsets else None,
        shape=shape,
    )


def _padded(inputs: int, form: Quantization) -> int:
    multiple = math.lcm(form.group or _BLOCK, _BLOCK)
    return -(-inputs // multiple) * multiple


def quantize(values: np.ndarray, form: Quantization) -> QuantizedMatrix:
    """Round a matrix [..., outputs, inputs] to codes, in numpy arrays.

    With offsets, the codes of a group span from its least to its largest weight; without, they are
    symmetric around zero. A group of equal weights is kept exactly, and what is not finite gives a
    scale that is not.
    """
    *lead, inputs = values.shape
    rows = values.reshape(-1, inputs)
    step = max(_NUMBERS_AT_ONCE // inputs, 1)
    parts = [_quantize(rows[at : at + step], form) for at in range(0, len(rows), step)]
    codes, scales, offsets = (
        None if part[0] is None else np.concatenate(part).reshape(*lead, -1)
        for part in zip(*parts, strict=True)
    )
    return QuantizedMatrix(codes=codes, scales=scales, offsets=offsets, shape=values.shape)


def _quantize(
    rows: np.ndarray, form: Quantization
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return codes, scales and offsets of [outputs, inputs]."""
    outputs, inputs = rows.shape
    wide = np.zeros((outputs, _padded(inputs, form)), np.float32)
    wide[:, :inputs] = rows
    groups = wide.reshape(outputs, -1, form.group or wide.shape[1])
    offsets = None
    with np.errstate(invalid="ignore"):  # of what is not finite
        if form.offsets:
            low, high = groups.min(axis=-1), groups.max(axis=-1)
            scales = (high - low) / np.float32(2**form.bits - 1)
            offsets = low - scales * np.float32(0 if form.bits == 4 else -128)
            groups = groups - offsets[..., None]
        else:
            scales = np.abs(groups).max(axis=-1) / np.float32(127)
        codes = np.rint(groups / np.where(scales > 0, scales, np.float32(1))[..., None])
        codes = codes.reshape(wide.shape).astype(np.uint8 if form.bits == 4 else np.int8)
    return pack(codes) if form.bits == 4 else codes, scales, offsets


def pack(codes: np.ndarray) -> np.ndarray:
    """Put codes [..., inputs] uint8 below 16 into nibbles: [..., inputs / 2] uint8."""
    low, high = np.moveaxis(codes.reshape(*codes.shape[:-1], -1, 2, _HALF), -2, 0)
    return (low | high << 4).reshape(*codes.shape[:-1], -1)


def dequantize(codes: jax.Array, scales: jax.Array, offsets: jax.Array | None) -> jax.Array:
    """Return the weights of a matrix, or of rows of one: [..., inputs] f32, padding included."""
    if codes.dtype == jnp.uint8:
        halves = codes.reshape(*codes.shape[:-1], -1, 1, _HALF)
        codes = jnp.concatenate([halves & 15, halves >> 4], axis=-2)
    lead = scales.shape[:-1]
    groups = codes.reshape(*scales.shape, -1).astype(jnp.float32) * scales[..., None]
    if offsets is not None:
        groups = groups + offsets[..., None]
    return groups.reshape(*lead, -1)


def look_up(matrix: QuantizedMatrix, row_ids: jax.Array) -> jax.Array:
    """Return rows of a [rows, inputs] parameter: [..., inputs] f32."""
    taken = jax.tree.map(lambda array: array[row_ids], matrix)
    return dequantize(taken.codes, taken.scales, taken.offsets)[..., : matrix.shape[-1]]


def experts(matrix: QuantizedMatrix) -> jax.Array:
    """Return the matrices of all experts, inputs first as parameters have them, in f32."""
    stored = dequantize(matrix.codes, matrix.scales, matrix.offsets)
    return stored.swapaxes(-1, -2)[:, : matrix.shape[1]]


def multiply(x: jax.Array, matrix: QuantizedMatrix, product: Product) -> jax.Array:
    """Multiply [rows, inputs] by a matrix, of inputs that may be padded: [rows, outputs] f32."""
    codes = matrix.codes
    inputs = codes.shape[-1] * (2 if codes.dtype == jnp.uint8 else 1)
    padded = jnp.pad(x, ((0, 0), (0, inputs - x.shape[-1])))
    return product(padded, codes, matrix.scales, matrix.offsets)


def plain_product(
    x: jax.Array, codes: jax.Array, scales: jax.Array, offsets: jax.Array | None
) -> jax.Array:
    """Dequantize, cast to x's dtype and multiply; see Product."""
    wide = x.dtype == jnp.float32
    return jnp.einsum(
        "RI,OI->RO",
        x,
        dequantize(codes, scales, offsets).astype(x.dtype),
        precision=jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
