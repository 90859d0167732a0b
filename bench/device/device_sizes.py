"""What the device script runs: sizes of checks, of timings and of the model, in full and tiny."""

from __future__ import annotations

import dataclasses

from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig
from jaxstate.models.rope import Llama3Scaling, RopeConfig

ROPE = RopeConfig(
    theta=500000.0,
    scaling=Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads of an attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def bytes_per_cell(self) -> int:
        """Bytes of one layer's keys and values of one token in bf16."""
        return 2 * self.num_kv_heads * self.head_dim * 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of everything.

    Attributes:
      copy_bytes, square: see device_timing.measure_floors.
      small: heads of the small checks.
      small_dtypes, real_dtypes: of the checks, none = no checks.
      real: heads of the timings, and of the checks at real sizes.
      real_context, real_tokens: cells, and tokens of a prefill, of the checks at real sizes.
      real_pages: of the pool that is written to.
      huge_pages: pages before those that a check of 64-bit offsets reads and writes; 0 = none.
      rows, contexts: the grid of decode timings.
      group_rows: rows that share one context of `context` cells.
      context: of the bars.
      pool_bytes: keys and values that a timing reads at least, if few layers hold so many.
      vocabularies: (vocab_size, hidden_size) of the gate scans.
      model: of the whole step.
      queries: contexts of the 32-token queries.
    """

    copy_bytes: int
    square: int
    small: tuple[Heads, ...]
    small_dtypes: tuple[str, ...]
    real_dtypes: tuple[str, ...]
    real: Heads
    real_context: int
    real_tokens: int
    real_pages: int
    huge_pages: int
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    group_rows: tuple[int, ...]
    context: int
    pool_bytes: int
    vocabularies: tuple[tuple[int, int], ...]
    model: ModelConfig
    queries: tuple[int, ...]


LLAMA_8B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    mlp_width=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_positions=131072,
    layers=(LayerConfig(rope=ROPE),) * 32,
    tied_embeddings=False,
    dtypes=DtypePolicy.named("bfloat16"),
)
"""The shapes of Llama-3.1-8B."""

FULL = Sizes(
    copy_bytes=2 * 2**30,
    square=8192,
    small=tuple(
        Heads(num_heads=heads, num_kv_heads=2, head_dim=head_dim)
        for heads, head_dim in ((6, 64), (8, 128), (14, 256))
    ),
    small_dtypes=("bfloat16", "float32"),
    real_dtypes=("bfloat16", "float32"),
    real=Heads(num_heads=32, num_kv_heads=8, head_dim=128),
    real_context=8192,
    real_tokens=512,
    real_pages=4096,
    huge_pages=2**15,  # of 64 cells and 8 heads of 128: 2^31 elements
    rows=(1, 8, 64),
    contexts=(1024, 8192, 65536, 131072),
    group_rows=(1, 16, 64),
    context=8192,
    pool_bytes=8 * 2**30,
    vocabularies=((128256, 4096), (262144, 2560)),
    model=LLAMA_8B,
    queries=(8192, 32768, 131072),
)  # fmt: skip

TINY = Sizes(
    copy_bytes=2**22,
    square=256,
    small=(Heads(num_heads=6, num_kv_heads=2, head_dim=16),),
    small_dtypes=("float32",),
    real_dtypes=(),
    real=Heads(num_heads=4, num_kv_heads=2, head_dim=16),
    real_context=320,
    real_tokens=32,
    real_pages=4,
    huge_pages=0,
    rows=(1, 2),
    contexts=(128,),
    group_rows=(1, 2),
    context=128,
    pool_bytes=2**15,
    vocabularies=((520, 64),),
    model=dataclasses.replace(
        LLAMA_8B, vocab_size=96, hidden_size=32, mlp_width=48, num_heads=4, num_kv_heads=2,
        head_dim=16, layers=LLAMA_8B.layers[:1],
    ),
    queries=(32, 128),
)  # fmt: skip
