"""The four checks of `chex` that the step calls, for machines that have only jax, numpy and flax.

device_sources.py links this file as `chex` where the real one is not installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def assert_shape(arrays: Any, shape: Sequence[int]) -> None:
    """Raise AssertionError unless every array has this shape."""
    for array in _all(arrays):
        if tuple(array.shape) != tuple(shape):
            raise AssertionError(f"shape: expected {tuple(shape)}, got {array.shape}")


def assert_type(arrays: Any, dtype: Any) -> None:
    """Raise AssertionError unless every array has this dtype."""
    for array in _all(arrays):
        if array.dtype != dtype:
            raise AssertionError(f"dtype: expected {dtype}, got {array.dtype}")


def assert_rank(arrays: Any, rank: int) -> None:
    """Raise AssertionError unless every array has this many dimensions."""
    for array in _all(arrays):
        if array.ndim != rank:
            raise AssertionError(f"rank: expected {rank}, got {array.ndim}")


def assert_equal_shape(arrays: Sequence[Any]) -> None:
    """Raise AssertionError unless all arrays have one shape."""
    assert_shape(arrays, arrays[0].shape)


def _all(arrays: Any) -> Sequence[Any]:
    return arrays if isinstance(arrays, list | tuple) else [arrays]
