"""Batches of contexts with many questions each, as token ids."""

from __future__ import annotations

import dataclasses

import numpy as np
from task import candles, questions, tokenizer
from task.candles import Context
from task.questions import Question
from task.task_model import Batch

TAIL_LEN = 11  # a question about a named row with a price behind it
_ASKED = (*questions.KINDS, *questions.VALUES)
LABELS = (*_ASKED, "evidence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mix:
    """How batches of a stage of training look.

    Attributes:
      rows: of each context.
      contexts: in a batch.
      questions: about each context, each about its own prefix.
      shares: of the kinds of questions, in the order of KINDS and VALUES.
      moves: of synthetic candles, see candles.synthetic.
      real_share: share of contexts with real candles.
      opposites: share of questions in the second wording.
      evidence: share of questions about a named row that are followed by that row's price in place
        of the answer, so that looking the row up is learnt where it is needed.
    """

    rows: int
    contexts: int
    questions: int
    shares: tuple[float, ...]
    moves: tuple[float, float] = candles.MOVES
    real_share: float = 0.3
    opposites: float = 0.5
    evidence: float = 0.0


def context(rng: np.random.Generator, mix: Mix) -> Context:
    """Draw a context for training."""
    rows = mix.rows
    if rng.random() < mix.real_share:
        prices = candles.real_window(rng, rows, test=False)
    else:
        prices = candles.synthetic(rng, rows, moves=mix.moves)
    draw_names = candles.names_in_order if rng.random() < 0.5 else candles.names_at_random
    return Context(prices=prices, names=draw_names(rng, rows))


def draw(rng: np.random.Generator, mix: Mix) -> tuple[Batch, np.ndarray]:
    """Draw a batch.

    Returns:
      the batch, and for each tail the index of its kind among LABELS: [contexts, questions] int.
    """
    ids = tokenizer.tokens()
    shape = (mix.contexts, mix.questions)
    batch = Batch(
        context_ids=np.zeros((mix.contexts, 1 + candles.ROW_TOKENS * mix.rows), np.int32),
        tail_ids=np.zeros((*shape, TAIL_LEN), np.int32),
        seen=np.zeros(shape, np.int32),
        targets=np.zeros((*shape, TAIL_LEN), np.int32),
        weights=np.zeros((*shape, TAIL_LEN), np.float32),
    )
    labels = np.zeros(shape, np.int64)
    for row in range(mix.contexts):
        whole = context(rng, mix)
        batch.context_ids[row] = [ids[token] for token in candles.context_tokens(whole)]
        for tail in range(mix.questions):
            seen = int(rng.integers(questions.MIN_ROWS, mix.rows + 1))
            asked = _question(
                rng, Context(prices=whole.prices[:seen], names=whole.names[:seen]), mix
            )
            labels[row, tail] = LABELS.index(asked.kind)
            batch.seen[row, tail] = 1 + candles.ROW_TOKENS * seen
            tokens = [ids[token] for token in (*asked.tokens, *asked.answer)]
            end, begin = len(tokens) - 1, len(asked.tokens) - 1
            batch.tail_ids[row, tail, :end] = tokens[:-1]
            batch.targets[row, tail, begin:end] = tokens[begin + 1 :]
            batch.weights[row, tail, begin:end] = 1.0 / len(asked.answer)
    return batch, labels


def _question(rng: np.random.Generator, seen: Context, mix: Mix) -> Question:
    found = None
    while found is None:
        kind = str(rng.choice(_ASKED, p=mix.shares))
        if kind in questions.VALUES:
            found = questions.value(rng, seen, kind)
        else:
            found = questions.draw(rng, seen, kind, opposites=mix.opposites)
            if found and found.evidence and rng.random() < mix.evidence:
                found = dataclasses.replace(found, kind="evidence", answer=found.evidence)
    return found


def accuracy_by_kind(right: np.ndarray, labels: np.ndarray, batch: Batch) -> dict[str, float]:
    """Return the share of tails whose whole answer is likeliest, token by token, by kind."""
    whole = (right | (batch.weights == 0)).all(axis=-1)
    return {
        label: float(whole[labels == index].mean())
        for index, label in enumerate(LABELS)
        if (labels == index).any()
    }
