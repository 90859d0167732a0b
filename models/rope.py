"""Rotary position embedding of one kind of layer, with the scalings checkpoints use."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (arXiv:2306.15595)."""

    factor: float

    def rescale(self, frequencies: np.ndarray) -> np.ndarray:
        """Return the scaled angles per position; [pairs] f64, as for every scaling here."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths divided, short ones kept, a smooth passage between (Llama 3.1).

    Attributes:
      factor: divisor of the long wavelengths.
      low_freq_factor, high_freq_factor: wavelengths above original_max_positions / low and below
        original_max_positions / high are the long and the short ones.
      original_max_positions: context length before the extension, in tokens.

    Source: arXiv:2407.21783.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def rescale(self, frequencies: np.ndarray) -> np.ndarray:
        """See LinearScaling.rescale."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """Interpolation of pairs that turn slowly, none of those that turn fast (YaRN).

    Attributes:
      factor: divisor of the interpolated frequencies.
      beta_fast, beta_slow: turns over the original context above which a pair is kept, and below
        which it is divided.
      original_max_positions: context length before the extension, in tokens.
      attention_factor: what turns of queries and keys is multiplied by this.
      truncate: whether the edges of the passage are rounded to whole pairs.

    Source: arXiv:2309.00071.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def rescale(self, frequencies: np.ndarray) -> np.ndarray:
        """See LinearScaling.rescale."""
        # The (fractional) pair that makes a number of turns; frequencies are a geometric series.
        pairs = len(frequencies)
        step = math.log(frequencies[0] / frequencies[1]) if pairs > 1 else 1.0

        def pair_of(turns):
            wanted = 2 * math.pi * turns / self.original_max_positions
            return math.log(frequencies[0] / wanted) / step

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        if low == high:
            high += 0.001  # as in the reference: no division by zero
        divided = np.clip((np.arange(pairs) - low) / (high - low), 0.0, 1.0)
        return frequencies * (1 - divided) + frequencies / self.factor * divided

    @staticmethod
    def usual_attention_factor(factor: float) -> float:
        """Return the paper's recommendation, 0.1 ln(factor) + 1."""
        return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class FactorScaling:
    """A divisor per pair, as a table: LongRoPE, and `rope_freqs.weight` of GGUF files.

    Attributes:
      factors: [pairs] divisors.
      attention_factor: what turns of queries and keys is multiplied by this.

    Source: arXiv:2402.13753.
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def rescale(self, frequencies: np.ndarray) -> np.ndarray:
        """See LinearScaling.rescale."""
        return frequencies / np.asarray(self.factors, np.float64)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FactorScaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary settings of one kind of layer (half-split pairing, as in Hugging Face).

    Attributes:
      theta: base of the geometric series of wavelengths.
      rotary_dim: how many elements of a head turn; None = all, 0 = none (NoPE). Pairs are
        (i, i + head_dim / 2) also where only the first ones turn: weights are loaded so.
      scaling: see RopeScaling; None = as trained.

    Source: RoFormer (arXiv:2104.09864).
    """

    theta: float
    rotary_dim: int | None = None
    scaling: RopeScaling | None = None

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Return the angle per position of each pair, [head_dim / 2] f32, in radians."""
        rotary_dim = head_dim if self.rotary_dim is None else self.rotary_dim
        exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / max(rotary_dim, 1)
        frequencies = np.float64(self.theta) ** -exponents
        if self.scaling is not None and rotary_dim:
            frequencies = self.scaling.rescale(frequencies)
        still = np.zeros((head_dim - rotary_dim) // 2)
        return np.concatenate([frequencies, still]).astype(np.float32)

    def query_factors(self, head_dim: int) -> np.ndarray | None:
        """Return what queries are multiplied by, [head_dim] f32, or None for nothing.

        Some scalings multiply what turns of queries and keys by a factor. Kept keys are rotated
        but never scaled here, so queries take both.
        """
        factor = getattr(self.scaling, "attention_factor", 1.0)
        rotary_dim = head_dim if self.rotary_dim is None else self.rotary_dim
        if factor == 1.0 or not rotary_dim:
            return None
        half = np.ones(head_dim // 2)
        half[: rotary_dim // 2] = factor**2
        return np.tile(half, 2).astype(np.float32)
