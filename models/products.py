"""Who multiplies rows by matrices: plain XLA, or kernels that the caller brings."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax

from jaxstate.models import quantized
from jaxstate.models.config import DtypePolicy
from jaxstate.models.quantized import QuantizedMatrix


class FewRows(Protocol):
    """A kernel for products with matrices of floats."""

    def __call__(self, x: jax.Array, matrix: jax.Array, *, outputs_first: bool) -> jax.Array | None:
        """Return [rows, outputs] f32, or None for what XLA multiplies at least as fast."""
        ...


@dataclasses.dataclass(frozen=True)
class Products:
    """Kernels for products.

    Attributes:
      quantized: multiplies by quantized matrices.
      few_rows: multiplies by others where that pays; None = XLA does it all.
    """

    quantized: quantized.Product = quantized.plain_product
    few_rows: FewRows | None = None

    def multiply(
        self,
        x: jax.Array,
        matrix: jax.Array | QuantizedMatrix,
        dtypes: DtypePolicy,
        *,
        outputs_first: bool,
    ) -> jax.Array:
        """Multiply [rows, inputs] by a matrix: [rows, outputs] in accum_dtype.

        Args:
          x: in compute_dtype.
          outputs_first: the matrix is [outputs, inputs], as quantized ones always are, and not
            [inputs, outputs].
        """
        if isinstance(matrix, QuantizedMatrix):
            return quantized.multiply(x, matrix, self.quantized).astype(dtypes.accum_dtype)
        matrix = matrix.astype(dtypes.compute_dtype)
        if self.few_rows is not None:
            result = self.few_rows(x, matrix, outputs_first=outputs_first)
            if result is not None:
                return result.astype(dtypes.accum_dtype)
        return jax.lax.dot_general(
            x,
            matrix,
            (((1,), (1 if outputs_first else 0,)), ((), ())),
            precision=dtypes.precision,
            preferred_element_type=dtypes.accum_dtype,
        )


PLAIN = Products()
