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
from jaxstate.serving import candle_rows

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))
batches, candles, evaluate, questions, task_model, tokenizer = (
    importlib.import_module(f"task.{name}")
    for name in ("batches", "candles", "evaluate", "questions", "task_model", "tokenizer")
)
CHECKPOINT = candle_rows.MODEL
ROW = re.compile(r"c(\d\d) ([A-Za-z]\d) h(\d\d) l(\d\d) o(\d\d)\n")
SOURCES = ("synthetic", "real")


@pytest.fixture(scope="module")
def cases() -> list:
    return [case for source in SOURCES for case in evaluate.cases(1, 150, (8, 24), source)]


def read_answer(text: str, question: str) -> bool:
    """Answer a question from the text alone, by other code than what drew it."""
    rows = [(row[1], int(row[0]), int(row[2]), int(row[3])) for row in ROW.findall(text)]
    match = re.fullmatch(r"(close|high|low) (first|last \d|..) (above|below) (\d\d)\?", question)
    assert match, question
    field, which, wording, level = match[1], match[2], match[3], int(match[4])
    if which.startswith("last "):
        recent = rows[-int(which[-1]) :]
        assert len(recent) == int(which[-1])
        price = max(row[2] for row in recent) if field == "high" else min(row[3] for row in recent)
    else:
        assert field == "close"
        price = next(close for name, close, *_ in rows if which in (name, "first"))
    assert price != level
    return (price > level) == (wording == "above")


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
    for kind in questions.KINDS:
        asked = [question for question in drawn if question.kind == kind]
        assert 0.45 <= np.mean([question.is_yes for question in asked]) <= 0.55
        straight = [
            question.is_yes for question in asked if question.wording == questions.WORDINGS[0]
        ]
        assert 0.42 <= np.mean(straight) <= 0.58  # half as many, so more spread


def test_candles_are_possible_ones():
    rng = np.random.default_rng(3)
    train = [candles.synthetic(rng, 300), candles.real_window(rng, 300, test=False)]
    for prices in (*train, candles.real_window(rng, 300, test=True)):
        close, high, low, open_ = prices.T
        assert (high >= np.maximum(open_, close)).all() and (low <= np.minimum(open_, close)).all()
        assert prices.min() >= 0 and prices.max() < candles.PRICES


def test_real_candles_of_the_test_are_later_than_all_of_the_training(monkeypatch):
    """By what is drawn where only one side of the split moves."""
    prices = np.full((1500, 4), 700)
    prices[candles.REAL_TRAIN_ROWS :: 2] += 40
    monkeypatch.setattr(candles, "real", lambda: prices)
    rng = np.random.default_rng(4)
    for _ in range(50):
        assert np.ptp(candles.real_window(rng, 900, test=False)) == 0
        assert np.ptp(candles.real_window(rng, 2, test=True)) == 40


def test_real_candles_keep_their_shape_on_the_scale_that_fits():
    rng = np.random.default_rng(5)
    pips = candles.real()[candles.REAL_TRAIN_ROWS :]
    for rows, ticks in ((12, (1, 2, 3, 5)), (450, (2, 3, 5, 8, 12))):
        window = candles.real_window(rng, rows, test=True)
        moves = window - window.min()
        begins = range(len(pips) - rows + 1)
        stretches = (
            pips[begin : begin + rows] - pips[begin : begin + rows].min() for begin in begins
        )
        assert any(
            np.array_equal(stretch // tick, moves) for stretch in stretches for tick in ticks
        )


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
    for name in candles.NAMES:
        assert text_of.decode(text_of.encode(f"c12{name} h34")) == f"c12{name} h34"


def test_questions_of_a_training_batch_see_their_own_prefix_only():
    """Against the plain forward over prefix and question, which knows no tails."""
    mix = batches.Mix(rows=12, contexts=2, questions=5)
    batch, kinds = batches.draw(np.random.default_rng(5), mix)
    assert len(set(kinds.ravel().tolist())) > 1
    params = task_model.first_params(0)
    forward = jax.jit(lambda ids: models.plain_forward.logits(params, task_model.CONFIG, ids))
    whole = jax.jit(lambda batch: task_model.answer_logits(params, task_model.CONFIG, batch))
    logits = np.asarray(whole(batch))
    for row in range(mix.contexts):
        for tail in range(mix.questions):
            seen = int(batch.seen[row, tail])
            ids = np.concatenate([batch.context_ids[row, :seen], batch.tail_ids[row, tail]])
            padded = np.zeros(batch.context_ids.shape[1] + questions.NUM_TOKENS, np.int32)
            padded[: len(ids)] = ids
            alone = np.asarray(forward(padded))[len(ids) - 1]
            np.testing.assert_allclose(logits[row, tail], alone, atol=5e-4, rtol=1e-4)


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


@pytest.mark.long
def test_trained_model_has_mastered_the_task_in_the_engine(trained):
    """A sample of what bench/bench_task.py measures, on contexts of 262 to 505 tokens."""
    engine = evaluate.engine_of(trained, evaluate.num_tokens(56))
    for source in SOURCES:
        drawn = list(evaluate.cases(3, 60, (29, 56), source))
        whole = evaluate.ask(engine, trained, iter(drawn), last_row=False)
        assert whole.count == 360 and whole.yes_share == 0.5
        assert min(whole.by_kind().values()) >= 0.9 and whole.balanced >= 0.95
        assert whole.opposed >= 0.95
        rule = evaluate.guess_from_last_row(iter(drawn))
        last = evaluate.ask(engine, trained, iter(drawn), last_row=True)
        assert max(rule.balanced, last.balanced) <= whole.balanced - 0.2


def test_trained_model_tells_rows_with_swapped_closes_apart(trained):
    """The answer about a row hangs on that row alone, wherever it stands."""
    engine = evaluate.engine_of(trained, evaluate.num_tokens(48))
    choices = [trained.tokenizer.encode(text, continues=True) for text in (" yes", " no")]
    rng = np.random.default_rng(6)
    right = []
    for asked, other in (rng.permutation(40)[:2] for _ in range(20)):
        prices = candles.synthetic(rng, 40)
        prices[asked], prices[other] = [30, 32, 28, 30], [60, 62, 58, 60]
        name = candles.NAMES[asked]
        for swapped in (False, True):
            if swapped:
                prices[[asked, other]] = prices[[other, asked]]
            context = candles.Context(prices=prices, names=np.arange(40))
            text = "".join(candles.context_tokens(context))
            session = engine.create(trained.tokenizer.encode(text))
            ids = trained.tokenizer.encode(f"close{name} above 45?", continues=True)
            right.append((engine.choose(session, ids, choices).choice == 0) == swapped)
            engine.close(session)
    assert np.mean(right) >= 0.95
