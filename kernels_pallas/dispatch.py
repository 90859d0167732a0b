"""From an implementation's name to functions, or one sentence why not."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args

import jax

from jaxstate.kernels_pallas import (
    attention_cpu,
    attention_gpu,
    attention_tpu,
    attention_xla,
    gate_scan_gpu,
    gate_scan_tpu,
    gate_scan_xla,
    kv_write_gpu,
    kv_write_tpu,
    kv_write_xla,
    matmul_few_rows_cpu,
    matmul_quantized_cpu,
    page_copy_cpu,
)
from jaxstate.kernels_pallas.gate_scan_xla import GateSummary
from jaxstate.kernels_pallas.rope import Angles
from jaxstate.kernels_pallas.selection import BLOCK_CELLS, Selection
from jaxstate.kernels_pallas.work import WorkList

logger = logging.getLogger(__name__)

Implementation = Literal[
    "auto",
    "xla",
    "cpu",
    "pallas_gpu",
    "pallas_gpu_interpret",
    "pallas_tpu",
    "pallas_tpu_interpret",
]
"""Names of implementations; those in "_interpret" run kernels anywhere, slowly, for tests."""

_READS_ALL = "the kernel for CPUs cannot select blocks"


@dataclasses.dataclass(frozen=True)
class _Pallas:
    """Modules of one platform's kernels, and what their `interpret` is to be."""

    attention: Any
    kv_write: Any
    gate_scan: Any
    interpret: Any


_PALLAS = {
    "pallas_gpu": _Pallas(attention_gpu, kv_write_gpu, gate_scan_gpu, False),
    "pallas_gpu_interpret": _Pallas(attention_gpu, kv_write_gpu, gate_scan_gpu, True),
    "pallas_tpu": _Pallas(attention_tpu, kv_write_tpu, gate_scan_tpu, False),
    "pallas_tpu_interpret": _Pallas(attention_tpu, kv_write_tpu, gate_scan_tpu, True),
}


def choose(
    implementation: Implementation,
    head_dim: int,
    dtype,
    cache_dir: pathlib.Path,
    *,
    page_size: int | None = None,
    selects: bool = False,
) -> str:
    """Return a name but "auto", built and ready.

    "auto" takes the fastest that runs here of those that have been tried: "pallas_gpu" and
    "pallas_tpu" must be named, until a device has shown that they are right.

    Args:
      dtype: of keys and values in the pool.
      cache_dir: where compiled kernels are kept.
      page_size: of the pool, in cells; None where there is none.
      selects: whether it is to read selected blocks only.
    Raises:
      ValueError: unknown name.
      NotImplementedError: the named implementation cannot run here; says why.
      RuntimeError: building the named kernel failed; "auto" warns and takes "xla".
    """
    names = get_args(Implementation)
    if implementation not in names:
        expected = ", ".join(f'"{name}"' for name in names)
        raise ValueError(f'implementation: expected one of {expected}, got "{implementation}"')
    if implementation == "xla":
        return "xla"
    reasons = {
        "pallas_gpu": attention_gpu.unsupported(head_dim, dtype),
        "pallas_gpu_interpret": attention_gpu.unsupported(head_dim, dtype, interpret=True),
        "pallas_tpu": attention_tpu.unsupported(head_dim, dtype, page_size or BLOCK_CELLS),
        "pallas_tpu_interpret": attention_tpu.unsupported(
            head_dim, dtype, page_size or BLOCK_CELLS, interpret=True
        ),
        "cpu": attention_cpu.unsupported(head_dim, dtype) or (_READS_ALL if selects else None),
    }
    if implementation != "auto":
        if reason := reasons[implementation]:
            raise NotImplementedError(
                f'implementation "{implementation}" cannot run here: {reason}; use "xla"'
            )
        if implementation == "cpu":
            _build_for_cpu(cache_dir)
        return implementation
    if reasons["cpu"] is None:
        try:
            _build_for_cpu(cache_dir)
        except RuntimeError as error:
            logger.warning('%s; "auto" takes plain XLA, which is slower', error)
            return "xla"
        return _took("cpu")
    untried = "no device has tried it yet, name it to do so"
    why = [f"{name}: {reasons[name] or untried}" for name in ("pallas_gpu", "pallas_tpu")]
    return _took("xla", f" ({'; '.join(why)}; cpu: {reasons['cpu']})")


def _build_for_cpu(cache_dir: pathlib.Path) -> None:
    """Build every kernel of "cpu"."""
    attention_cpu.build(cache_dir)
    matmul_quantized_cpu.build(cache_dir)
    matmul_few_rows_cpu.build(cache_dir)
    page_copy_cpu.build(cache_dir)


def stretch_cells(implementation: str, num_cells: int) -> tuple[int, ...]:
    """Lengths of the pool stretches an implementation reads best, longest first.

    Plain XLA pays per stretch and per cell of it, used or not: 1,024 cells for most, 128 for
    what is left. Our own kernels read stretches of any length where they lie.
    """
    if implementation != "xla":
        return (num_cells,)
    return tuple(sorted({min(1024, num_cells), min(128, num_cells)}, reverse=True))


def attend(
    implementation: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: jax.Array,
    token_rows: jax.Array,
    tail: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    work: Sequence[WorkList],
    shifts: Sequence[Angles],
    *,
    block_tokens: int,
    window: int | None,
    precision: jax.lax.Precision,
    selection: Selection | None = None,
) -> jax.Array:
    """Attend a step's tokens to each other and to their context: [tokens, num_heads, D] f32.

    Arguments as in attention_xla; `tail` is from `attention_xla.tail_visible`.

    Raises:
      NotImplementedError: a selection, which the kernel for CPUs does not take.
    """
    if implementation == "cpu":
        if selection is not None:
            raise NotImplementedError(f'selection: {_READS_ALL}; use implementation "xla"')
        return attention_cpu.attention(
            q, k, v, positions, token_rows, tail, k_pages, v_pages, work, shifts,
            block_tokens=block_tokens, window=window,
        )  # fmt: skip
    if pallas := _PALLAS.get(implementation):
        return pallas.attention.attention(
            q, k, v, positions, token_rows, tail, k_pages, v_pages, work, shifts,
            block_tokens=block_tokens, window=window, precision=precision, selection=selection,
            interpret=pallas.interpret,
        )  # fmt: skip
    partial = attention_xla.tail_attention(
        q, k, v, tail, block_tokens=block_tokens, precision=precision
    )
    for one, angles in zip(work, shifts, strict=True):
        partial = attention_xla.context_attention(
            partial, q, positions, token_rows, k_pages, v_pages, one, angles,
            block_tokens=block_tokens, window=window, precision=precision, selection=selection,
        )  # fmt: skip
    return attention_xla.normalize(partial, block_tokens)


def kv_write(
    implementation: str,
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cells: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Write one token's heads to each named cell of both pools, in place; see kv_write_xla."""
    if pallas := _PALLAS.get(implementation):
        return pallas.kv_write.kv_write(k_pages, v_pages, k, v, cells, interpret=pallas.interpret)
    return kv_write_xla.kv_write(k_pages, k, cells), kv_write_xla.kv_write(v_pages, v, cells)


def scans_hidden(implementation: str) -> bool:
    """Say whether a summary needs no logits: the scan multiplies by the output matrix itself."""
    return implementation in _PALLAS


def gate_scan_hidden(
    implementation: str,
    hidden: jax.Array,
    matrix: jax.Array,
    allowed_bits: jax.Array,
    allowed_idx: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> GateSummary:
    """Summarize the logits of final hidden states; see gate_scan_xla.gate_scan_hidden."""
    operands = hidden, matrix, allowed_bits, allowed_idx
    if pallas := _PALLAS.get(implementation):
        return pallas.gate_scan.gate_scan_hidden(
            *operands, scale=scale, softcap=softcap, interpret=pallas.interpret
        )
    return gate_scan_xla.gate_scan_hidden(*operands, scale=scale, softcap=softcap)


def gate_scan(
    implementation: str,
    logits: jax.Array,
    allowed_bits: jax.Array,
    allowed_idx: jax.Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> GateSummary:
    """Summarize logits that are at hand; see gate_scan_xla.gate_scan."""
    operands = logits, allowed_bits, allowed_idx
    if pallas := _PALLAS.get(implementation):
        return pallas.gate_scan.gate_scan(
            *operands, scale=scale, softcap=softcap, interpret=pallas.interpret
        )
    return gate_scan_xla.gate_scan(*operands, scale=scale, softcap=softcap)


Product = Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], jax.Array]
"""product(x, codes, scales, offsets) -> [rows, outputs] f32, see matmul_quantized_cpu."""


def product(implementation: str) -> Product | None:
    """Return a kernel for products with quantized matrices, None where plain XLA is to do them."""
    return matmul_quantized_cpu.product if implementation == "cpu" else None


def few_rows(implementation: str) -> Callable[..., jax.Array | None] | None:
    """Return a kernel for products of few rows, None where plain XLA is to do all of them.

    few_rows(x, matrix, outputs_first=...) -> [rows, outputs] f32 or None, see matmul_few_rows_cpu.
    """
    return matmul_few_rows_cpu.product if implementation == "cpu" else None


class PageCopy(Protocol):
    """Copies pages of arrays of the pool, see page_copy_cpu."""

    def take(self, arrays: Sequence[jax.Array], pages: jax.Array) -> list[jax.Array]:
        """Copy pages out."""
        ...

    def put(
        self, arrays: Sequence[jax.Array], pages: jax.Array, parts: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Copy pages in."""
        ...


def page_copy(implementation: str) -> PageCopy | None:
    """Return kernels that copy pages out and in, None where plain XLA is to do it."""
    return page_copy_cpu if implementation == "cpu" else None


@functools.cache
def _took(chosen: str, why: str = "") -> str:
    """Say once what "auto" took, and why nothing faster; returns it."""
    logger.info("attention: %s%s", chosen, why)
    return chosen
