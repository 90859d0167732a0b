"""Batches of contexts with many questions each, as token ids."""

from __future__ import annotations

import dataclasses

import numpy as np
from task import candles, questions, tokenizer
from task.candles import Context
from task.questions import Question
from task.task_model import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
    """How batches of a stage of training look.

    Attributes:
      rows: of each context.
      contexts: in a batch.
      questions: about each context, each about its own prefix.
      shares: of the kinds of questions, in the order of KINDS.
      moves: of synthetic candles, see candles.synthetic.
      real_share: share of contexts with real candles.
    """

    rows: int
    contexts: int
    questions: int
    shares: tuple[float, ...] = (0.15, 0.5, 0.35)
    moves: tuple[float, float] = candles.MOVES
    real_share: float = 0.3


def context(rng: np.random.Generator, mix: Mix) -> Context:
    """Draw a context for training."""
    if rng.random() < mix.real_share:
        prices = candles.real_window(rng, mix.rows, test=False)
    else:
        prices = candles.synthetic(rng, mix.rows, moves=mix.moves)
    draw_names = candles.names_in_order if rng.random() < 0.5 else candles.names_at_random
    return Context(prices=prices, names=draw_names(rng, mix.rows))


def draw(rng: np.random.Generator, mix: Mix) -> tuple[Batch, np.ndarray]:
    """Draw a batch.

    Returns:
      the batch, and of each question the index of its kind in KINDS: [contexts, questions] int.
    """
    ids = tokenizer.tokens()
    shape = (mix.contexts, mix.questions)
    batch = Batch(
        context_ids=np.zeros((mix.contexts, 1 + candles.ROW_TOKENS * mix.rows), np.int32),
        tail_ids=np.zeros((*shape, questions.NUM_TOKENS), np.int32),
        seen=np.zeros(shape, np.int32),
        answers=np.zeros(shape, np.int32),
        prices=np.zeros(shape, np.int32),
    )
    kinds = rng.choice(len(questions.KINDS), size=shape, p=mix.shares)
    for row in range(mix.contexts):
        whole = context(rng, mix)
        batch.context_ids[row] = [ids[token] for token in candles.context_tokens(whole)]
        for tail in range(mix.questions):
            seen = int(rng.integers(questions.MIN_ROWS, mix.rows + 1))
            asked = _question(rng, whole.first(seen), questions.KINDS[kinds[row, tail]])
            batch.seen[row, tail] = 1 + candles.ROW_TOKENS * seen
            batch.tail_ids[row, tail] = [ids[token] for token in asked.tokens]
            batch.answers[row, tail] = ids[questions.YES if asked.is_yes else questions.NO]
            batch.prices[row, tail] = asked.price
    return batch, kinds


def _question(rng: np.random.Generator, seen: Context, kind: str) -> Question:
    found = None
    while found is None:
        found = questions.draw(rng, seen, kind)
    return found
