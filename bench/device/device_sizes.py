"""What the device script runs: sizes of checks, of timings and of the model, in full and tiny."""

from __future__ import annotations

import dataclasses

from jaxstate.models.config import DtypePolicy, LayerConfig, ModelConfig
from jaxstate.models.rope import Llama3Scaling, RopeConfig
from jaxstate.state import StepShape

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
class SessionSizes:
    """Sizes of the part about sessions; tokens, unless they say otherwise.

    Attributes:
      model: whose sessions are timed.
      count, context: sessions, and what each of them keeps.
      evict: what a full session drops at a time.
      questions, question_len, answer_len: registered questions, and what each asks and answers.
      append_len, appends: of an append, and how many are under way while questions are asked.
      shapes: of the steps, smallest first.
      rounds: of every timing.
      fill_s, ask_s: seconds that filling sessions, four times, and asking may take.
      small, small_context, small_shapes: of the check, in f32.
    """

    model: ModelConfig
    count: int
    context: int
    evict: int
    questions: int
    question_len: int
    answer_len: int
    append_len: int
    appends: int
    shapes: tuple[StepShape, ...]
    rounds: int
    fill_s: float
    ask_s: float
    small: ModelConfig
    small_context: int
    small_shapes: tuple[StepShape, ...]


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
      sessions: of the other part.
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
    sessions: SessionSizes


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


def _shapes(rows: int, *sizes: tuple[int, int]) -> tuple[StepShape, ...]:
    return tuple(
        StepShape(num_tokens=tokens, block_tokens=block, num_rows=rows) for tokens, block in sizes
    )


_SMALL = dataclasses.replace(
    LLAMA_8B, vocab_size=512, hidden_size=256, mlp_width=512, num_heads=8, num_kv_heads=2,
    layers=LLAMA_8B.layers[:2], dtypes=DtypePolicy.named("float32"),
)  # fmt: skip

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
    sessions=SessionSizes(
        model=LLAMA_8B, count=64, context=8192, evict=1024, questions=16, question_len=24,
        answer_len=4, append_len=32, appends=8, rounds=10, fill_s=30, ask_s=20,
        shapes=_shapes(16, (16, 16), (32, 32), (512, 32), (512, 512)),
        small=_SMALL, small_context=600, small_shapes=_shapes(8, (8, 8), (128, 32), (128, 128)),
    ),
)  # fmt: skip

_TINY_MODEL = dataclasses.replace(
    LLAMA_8B, vocab_size=96, hidden_size=32, mlp_width=48, num_heads=4, num_kv_heads=2,
    head_dim=16, layers=LLAMA_8B.layers[:1],
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
    model=_TINY_MODEL,
    queries=(32, 128),
    sessions=SessionSizes(
        model=_TINY_MODEL, count=4, context=192, evict=64, questions=4, question_len=8,
        answer_len=2, append_len=8, appends=2, rounds=3, fill_s=10, ask_s=1,
        shapes=_shapes(4, (8, 8), (32, 8), (32, 32)),
        small=dataclasses.replace(_TINY_MODEL, dtypes=DtypePolicy.named("float32")),
        small_context=60, small_shapes=_shapes(4, (8, 8), (32, 32)),
    ),
)  # fmt: skip
