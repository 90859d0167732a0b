"""The market workload: fixed to the letter, and its true answers."""

from __future__ import annotations

import csv
import hashlib
import importlib.resources

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxstate.models.tokenizer import Tokenizer
from jaxstate.serving import market
from jaxstate.serving.market import Candle


def _prices() -> np.ndarray:
    """Open, high, low, close of the workload's rows, as printed."""
    text = importlib.resources.files("jaxstate.serving").joinpath("data/eurusd_1h.csv").read_text()
    table = list(csv.reader(text.splitlines()))[1:181]
    return np.array([[round(float(value), 4) for value in row[1:5]] for row in table])


def test_texts_are_fixed_to_the_letter():
    lines = market.rows()
    assert (market.START, market.ROWS, market.ROUNDS) == (40, 14, 10)
    assert len(lines) == 180
    assert lines[0] == ".2017 22:00 1.0524 1.0525 1.0522 1.0523\n"
    joined = market.SYSTEM + "".join(lines) + "".join(market.QUESTIONS)
    assert hashlib.sha256(joined.encode()).hexdigest().startswith("fe3e12121fa5bdbf")


def test_token_counts_of_the_real_tokenizer(smollm2_path):
    workload = market.tokenize(Tokenizer.from_gguf(smollm2_path))
    assert len(workload.start) == 1622
    assert [len(new) for new in workload.rounds] == [560] * 10
    assert [len(question) for question in workload.questions] == [19, 14, 12]
    assert len(workload.context(1)) == 2182
    assert len(workload.context(10)) == 7222
    assert workload.context(10) == [*workload.start, *(t for new in workload.rounds for t in new)]
    assert workload.choices == (((9805,), (787,)), ((614,), (1187,)), ((904,), (1642,)))


def test_questions_take_turns():
    assert [market.question_idx(idx) for idx in range(5)] == [0, 1, 2, 0, 1]


def test_truths_equal_brute_force_over_the_file():
    prices, candles = _prices(), market.candles()
    for seen in range(1, 181):
        high, low, close = prices[:seen, 1], prices[:seen, 2], prices[:seen, 3]
        widths = high - low
        recent, overall = widths[-14:].mean(), widths.mean()
        trend = close[-1] - close[-28:].mean()
        truth = [close[-1] > close[0], trend > 0, recent > overall]
        certain = [True, abs(trend) > 1e-9, abs(recent - overall) > 1e-9]
        found = market.true_choices(candles[:seen])
        for expected, choice, sure in zip(truth, found, certain, strict=True):
            assert not sure or choice == (0 if expected else 1)


def _candle(high: float, low: float, close: float) -> Candle:
    return Candle(text="", high=high, low=low, close=close)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_truths_equal_brute_force_on_any_candles(closes):
    # Small integers: sums are exact, so ties are ties.
    seen = [_candle(close + close % 3, close, close) for close in closes]
    recent = closes[-28:]
    widths = [close % 3 for close in closes]
    last = widths[-14:]
    assert market.is_last_above_first(seen) == (closes[-1] > closes[0])
    assert market.is_trend_up(seen) == (closes[-1] * len(recent) > sum(recent))
    assert market.is_volatility_high(seen) == (
        np.float64(sum(last)) / len(last) > np.float64(sum(widths)) / len(widths)
    )


@pytest.mark.parametrize("truth", market.TRUTHS)
def test_a_tie_is_the_second_choice(truth):
    assert not truth([_candle(2.0, 1.0, 1.5)] * 50)


def test_sentences_of_the_choices_match_the_truths():
    rising = [_candle(1 + t / 8, 1 + t / 16, 1 + t / 8) for t in range(50)]
    assert market.true_choices(rising) == [0, 0, 0]
    assert [choices[0] for choices in market.CHOICES] == [" yes", " up", " high"]
