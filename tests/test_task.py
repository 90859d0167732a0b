"""The trained model's task: what is asked is true and balanced, and the model has mastered it."""

from __future__ import annotations

import importlib
import pathlib
import re
import sys

import jax
import numpy as np
import pytest

from jaxstate import models

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
batches, candles, evaluate, questions, task_model, tokenizer = (
    importlib.import_module(f"task.{name}")
    for name in ("batches", "candles", "evaluate", "questions", "task_model", "tokenizer")
)
CHECKPOINT = ROOT / "bench" / "task" / "candles-640k"
ROW = re.compile(r"\no(\d\.\d\d) c(\d\.\d\d) ([A-Z]{2}) h(\d\.\d\d) l(\d\.\d\d)")
SOURCES = ("synthetic", "real")


@pytest.fixture(scope="module")
def cases() -> list:
    return [case for source in SOURCES for case in evaluate.cases(1, 150, (8, 24), source)]


def read_answer(text: str, question: str) -> bool:
    """Answer a question from the text alone, by other code than what drew it."""
    rows = [(row[2], *(float(row[i]) for i in (1, 0, 3, 4))) for row in ROW.findall(text)]
    close_of = {name: close for name, close, *_ in rows}
    if match := re.fullmatch(r"\n(Rising|Falling) in row (..)\?", question):
        _, close, open_, *_ = next(row for row in rows if row[0] == match[2])
        return (close > open_) == (match[1] == "Rising")
    if match := re.fullmatch(r"\nIs (high|low) of last (\d+) (\w+) (\d\.\d\d)\?", question):
        recent = rows[-int(match[2]) :]
        assert len(recent) == int(match[2])
        found = (
            max(row[3] for row in recent) if match[1] == "high" else min(row[4] for row in recent)
        )
        assert found != float(match[4])
        return (found > float(match[4])) == (match[3] == "above")
    match = re.fullmatch(r"\nIs last close (\w+) (?:row (..)|first close)\?", question)
    assert match, question
    other = close_of[match[2]] if match[2] else rows[0][1]
    assert rows[-1][1] != other
    return (rows[-1][1] > other) == (match[1] == "above")


def test_answers_are_true_and_opposite_wordings_have_opposite_answers(cases):
    for case in cases:
        text = "".join(candles.context_tokens(case.context))
        for pair in case.pairs:
            said = [read_answer(text, question.text) for question in pair]
            assert said == [question.is_yes for question in pair]
            assert said[0] != said[1]


def test_both_answers_are_equally_likely_for_every_kind_and_wording(cases):
    drawn = [
        question
        for source in SOURCES
        for case in evaluate.cases(2, 500, (8, 24), source)
        for question in (pair[0] for pair in case.pairs)
    ]
    words = {"first": "above", "row": "above", "rising": "Rising", "extreme": "above"}
    for kind in questions.KINDS:
        asked = [question for question in drawn if question.kind == kind]
        assert 0.45 <= np.mean([question.is_yes for question in asked]) <= 0.55
        straight = [question.is_yes for question in asked if words[kind] in question.text]
        assert 0.42 <= np.mean(straight) <= 0.58  # half as many, so more spread


def test_candles_are_possible_ones():
    rng = np.random.default_rng(3)
    train = [candles.synthetic(rng, 300), candles.real_window(rng, 300, test=False)]
    for prices in (*train, candles.real_window(rng, 300, test=True)):
        close, open_, high, low = prices.T
        assert (high >= np.maximum(open_, close)).all() and (low <= np.minimum(open_, close)).all()
        assert prices.min() >= 0 and prices.max() < candles.PRICES


def test_real_candles_of_the_test_are_later_than_all_of_the_training():
    rng = np.random.default_rng(4)
    prices = candles.real()
    later = {tuple(row) for row in prices[candles.REAL_TRAIN_ROWS :].tolist()}
    begins = {tuple(candles.real_window(rng, 290, test=True)[0].tolist()) for _ in range(200)}
    assert begins <= later
    moves = np.abs(np.diff(prices[: candles.REAL_TRAIN_ROWS, 0]))
    for _ in range(50):  # training windows are shifted and turned, their moves stay
        window = np.abs(np.diff(candles.real_window(rng, 40, test=False)[:, 0]))
        found = np.lib.stride_tricks.sliding_window_view(moves, len(window))
        assert (found == window).all(axis=1).any()


def test_tokenizer_reads_rows_and_questions_one_digit_or_letter_at_a_time(cases):
    text_of = tokenizer.build()
    names = tokenizer.tokens()
    for case in cases:
        tokens = candles.context_tokens(case.context)
        assert len(tokens) == evaluate.num_tokens(len(case.context))
        assert text_of.encode("".join(tokens)) == [names[token] for token in tokens]
        assert text_of.decode(text_of.encode("".join(tokens))) == "".join(tokens)
        for question in (question for pair in case.pairs for question in pair):
            assert text_of.encode(question.text, continues=True) == [
                names[token] for token in question.tokens
            ]
    for name in names:
        assert len(re.findall(r"\d", name)) <= 1
    assert text_of.encode(" and no such words") == text_of.encode(" no")
    for name in range(26 * 26):
        row = "".join(candles.row_name(name))
        assert text_of.decode(text_of.encode(f" {row} h1.23")) == f" {row} h1.23"


def test_tails_of_a_training_batch_see_their_own_prefix_only():
    """Against the plain forward over prefix and question, which knows no tails."""
    mix = batches.Mix(rows=6, contexts=2, questions=5, shares=(0.1,) * 10)
    batch, labels = batches.draw(np.random.default_rng(5), mix)
    assert len(set(labels.ravel().tolist())) > 1
    params = task_model.first_params(0)
    forward = jax.jit(lambda ids: models.plain_forward.logits(params, task_model.CONFIG, ids))
    whole = jax.jit(lambda batch: task_model.all_logits(params, task_model.CONFIG, batch)[1])
    logits = np.asarray(whole(batch))
    for row in range(mix.contexts):
        for tail in range(mix.questions):
            end = int(np.flatnonzero(batch.weights[row, tail])[-1]) + 1
            seen = int(batch.seen[row, tail])
            ids = np.concatenate([batch.context_ids[row, :seen], batch.tail_ids[row, tail, :end]])
            padded = np.zeros(batch.context_ids.shape[1] + batches.TAIL_LEN, np.int32)
            padded[: len(ids)] = ids
            alone = forward(padded)
            np.testing.assert_allclose(
                logits[row, tail, :end], np.asarray(alone)[seen : seen + end], atol=2e-4
            )


@pytest.fixture(scope="module")
def trained() -> models.LoadedModel:
    return models.load(CHECKPOINT)


def test_checkpoint_is_small_and_reads_the_task(trained, cases):
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*") if path.is_file()) <= 8e6
    assert models.num_params(trained.config) <= 2e6
    assert trained.config == task_model.CONFIG
    assert trained.config.max_positions >= 4096 and trained.config.head_dim % 16 == 0
    text = "".join(candles.context_tokens(cases[0].context))
    assert trained.tokenizer.encode(text) == tokenizer.build().encode(text)


def test_trained_model_compares_first_and_last_close_in_the_engine(trained):
    """What it has learnt so far; named rows are still guessed, see bench/bench_task.py."""
    engine = evaluate.engine_of(trained, evaluate.num_tokens(22))
    for source in SOURCES:
        drawn = evaluate.cases(3, 60, (18, 22), source)
        tally = evaluate.ask(engine, trained, drawn, last_row=False)
        assert tally.count == 480 and tally.yes_share == 0.5
        assert tally.by_kind()["first"] >= 0.65
