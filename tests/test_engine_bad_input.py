"""Wrong requests: a typed error that says what to do, and every session bitwise as before."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tiny_engine

from jaxstate.answer import Source
from jaxstate.errors import CapacityError, InputError, SessionError
from jaxstate.sampling import Sampling

VOCAB = tiny_engine.MODEL.vocab_size
LIMIT = tiny_engine.MODEL.max_positions
CONTEXT_LEN, NUM_PAGES, PAGE_SIZE = 64, 16, 8


@pytest.fixture(scope="module")
def shared_engine():
    return tiny_engine.build(
        num_pages=NUM_PAGES, page_size=PAGE_SIZE, context_len=CONTEXT_LEN, implementation="xla"
    )


@pytest.fixture
def engine(shared_engine):
    """The shared engine; what a test leaves open is closed, and then every cell must be free."""
    yield shared_engine
    for name in list(shared_engine.session_ids):
        shared_engine.close(name)
    assert shared_engine.cells_held == 0


@pytest.fixture
def session(engine):
    """A sliding session that has evicted, with a fork and a paid tail."""
    name = engine.create(tiny_engine.random_ids(1, 5), session_id="a", when_full="slide")
    engine.append(name, tiny_engine.random_ids(2, 50))
    engine.append(name, tiny_engine.random_ids(3, 13))
    engine.fork(name, new_id="b")
    engine.append(name, tiny_engine.random_ids(4, 3))
    engine.advance(name, [7, 8, 9])
    return name


@contextlib.contextmanager
def _refused(engine, error, message):
    before = tiny_engine.state_of(engine)
    with pytest.raises(error, match=message):
        yield
    assert tiny_engine.state_of(engine) == before


def _finish(stream):
    with pytest.raises(StopIteration) as end:
        while True:
            next(stream)
    return end.value.value


# Token ids

TAKERS = {
    "append": lambda engine, ids: engine.append("a", ids),
    "update": lambda engine, ids: engine.update("a", ids),
    "entry": lambda engine, ids: engine.advance("a", ids),
    "question": lambda engine, ids: engine.query("a", ids, max_new_tokens=1),
    "prompt": lambda engine, ids: engine.generate(ids, max_new_tokens=1),
    "choices": lambda engine, ids: engine.choose("a", [1], [[2], ids]),
    "frozen": lambda engine, ids: engine.create(ids),
}
BAD_IDS = {
    "negative": ([3, -1], f"expected token ids in 0 … {VOCAB - 1}, got -1; encode the text"),
    "too large": ([3, VOCAB], f"expected token ids in 0 … {VOCAB - 1}, got {VOCAB}; encode"),
    "fractions": ([1.0, 2.0], r"expected a flat list of integer .*, got shape \(2,\) of float64"),
    "truth values": (np.ones(2, bool), r"expected a flat list .* got shape \(2,\) of bool"),
    "two dimensions": ([[1, 2]], r"expected a flat list of integer .* got shape \(1, 2\) of int"),
    "letters": (["a"], "expected a flat list of integer token ids"),
    "huge": ([2**70], "expected a flat list of integer token ids, .* of object"),
}


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("verb", TAKERS)
def test_wrong_token_ids_are_refused(engine, session, verb, bad):
    ids, message = BAD_IDS[bad]
    with _refused(engine, InputError, f"{verb}: {message}"):
        TAKERS[verb](engine, ids)


@pytest.mark.parametrize("verb", [verb for verb in TAKERS if verb != "frozen"])
def test_no_token_ids_are_refused(engine, session, verb):
    with _refused(engine, InputError, f"{verb}: expected at least one token id, got none"):
        TAKERS[verb](engine, [])


def test_ragged_token_ids_are_refused(engine, session):
    with _refused(engine, InputError, "append: expected a flat list"):
        engine.append(session, [[1, 2], [3]])


def test_no_frozen_tokens_are_fine(engine):
    assert engine.session(engine.create([])).context_len == 0


# Sizes


def test_append_beyond_the_context_is_refused_without_sliding(engine):
    name = engine.create([1], session_id="a")
    engine.append(name, [2] * 60)
    with _refused(engine, CapacityError, "session a: 61 of 64 tokens are held and 4 more do not f"):
        engine.append(name, [3] * 4)
    assert engine.append(name, [3] * 3) == 2


def test_append_longer_than_the_window_is_refused_even_when_sliding(engine, session):
    message = "session a: an append of 60 tokens is longer than the stream's window of 59; split"
    with _refused(engine, CapacityError, message):
        engine.append(session, [2] * 60)


def test_update_longer_than_the_window_is_refused(engine, session):
    stream = engine.session(session).token_ids[5:]
    message = "update of 60 tokens is longer than the stream's window of 59; shorten it"
    with _refused(engine, CapacityError, message):
        engine.update(session, (stream + [1] * 60)[:60])


def test_frozen_prefix_must_leave_room(engine):
    with _refused(
        engine, CapacityError, "frozen: expected less than context_len=64 tokens, got 64"
    ):
        engine.create([1] * CONTEXT_LEN)


@pytest.mark.parametrize("count, new", [(LIMIT, 1), (1, LIMIT), (40, 40)])
def test_question_and_answer_must_fit_the_positions(engine, session, count, new):
    held = engine.session(session).context_len
    message = (
        f"{held} context tokens, {count} more and {new} new ones exceed the model's {LIMIT} "
        f"positions; at most {LIMIT - held} are free: shorten the question"
    )
    with _refused(engine, CapacityError, message):
        engine.query(session, [1] * count, max_new_tokens=new)
    with _refused(engine, CapacityError, message):
        engine.advance(session, [1] * count, max_new_tokens=new)


def test_choices_must_fit_the_positions(engine, session):
    with _refused(engine, CapacityError, "exceed the model's 128 positions"):
        engine.choose(session, [1], [[2], [3] * LIMIT])


def test_prompt_must_fit_the_positions(engine):
    with _refused(engine, CapacityError, "0 context tokens, 128 more and 1 new ones exceed"):
        engine.generate([1] * LIMIT, max_new_tokens=1)


def test_turn_that_could_not_be_kept_is_refused_before_it_runs(engine):
    name = engine.create(session_id="a")
    engine.append(name, [2] * 60)
    with _refused(engine, CapacityError, "session a: 60 of 64 tokens are held and 5 more do not"):
        engine.query(name, [1], max_new_tokens=4, commit=True)
    assert engine.query(name, [1], max_new_tokens=3, commit=True).version == 1
    assert engine.session(name).context_len == 64


# The pool


def _exhausted(engine, *, by_paid_tail=False):
    """Sessions of 56 and 64 cells; one page of 16 is left, which a third or a paid tail takes."""
    engine.create([1] * 56, session_id="a")
    engine.create([2] * 63, session_id="big")
    engine.append("big", [3])
    if by_paid_tail:
        engine.advance("a", [5] * 8)
    else:
        engine.create([4], session_id="small")
    assert engine.pages.num_free == 0


EXHAUSTING = {
    "create": lambda engine: engine.create([1]),
    "query": lambda engine: engine.query("big", [1], max_new_tokens=1),
    "commit": lambda engine: engine.query("a", [1], max_new_tokens=1, commit=True),
    "advance": lambda engine: engine.advance("big", [1]),
    "choose": lambda engine: engine.choose("big", [1], [[1], [2]]),
    "generate": lambda engine: engine.generate([1], max_new_tokens=1),
}


@pytest.mark.parametrize("verb", EXHAUSTING)
def test_full_pool_refuses(engine, verb):
    _exhausted(engine)
    with _refused(engine, CapacityError, "needs 1 pages of 8 cells, 0 of 16 can be had; close a"):
        EXHAUSTING[verb](engine)


@pytest.mark.parametrize("verb", EXHAUSTING)
def test_paid_tails_give_way_in_a_full_pool(engine, verb):
    _exhausted(engine, by_paid_tail=True)
    EXHAUSTING[verb](engine)
    assert engine.session("a").paid == []


# Five pages are left, of which the paid tail takes two or three. It stays where it leaves enough;
# else the question goes on behind what it needs of it, or starts anew where that saves a page.
@pytest.mark.parametrize(
    "entry_len, common, new, source, stays",
    [
        (9, 9, 16, Source.RESUMED, True),
        (17, 8, 17, Source.RESUMED, False),
        (9, 9, 25, Source.COMPUTED, False),
    ],
)
def test_own_paid_tail_of_a_question_is_not_in_its_way(
    engine, entry_len, common, new, source, stays
):
    context = tiny_engine.random_ids(3, 56)
    engine.create(context, session_id="a")
    engine.create([2] * 32, session_id="b")
    entry = tiny_engine.random_ids(1, entry_len)
    engine.advance("a", entry)
    question = [*entry[:common], 5]
    answer = engine.query("a", question, max_new_tokens=new)
    assert answer.token_ids == tuple(tiny_engine.greedy(context + question, new))
    assert (answer.source, len(engine.session("a").paid)) == (source, stays)


def test_what_is_refused_takes_no_paid_tail(engine):
    _exhausted(engine, by_paid_tail=True)
    with _refused(engine, CapacityError, "needs 2 pages of 8 cells, 1 of 16 can be had"):
        engine.query("big", [1] * 9, max_new_tokens=1)
    assert len(engine.session("a").paid) == 1


def test_full_pool_refuses_an_append_that_frees_too_little(engine):
    _exhausted(engine)
    child = engine.fork("a")
    with _refused(engine, CapacityError, "needs 1 pages of 8 cells, 0 of 16 can be had; close"):
        engine.append(child, [1])


def test_append_takes_the_pages_of_its_own_paid_tail(engine):
    _exhausted(engine, by_paid_tail=True)
    assert engine.append("a", [1] * 8) == 1
    assert engine.pages.num_free == 0


def test_fork_needs_no_page(engine):
    _exhausted(engine)
    child = engine.fork("a")
    assert engine.session(child).entries == engine.session("a").entries


@pytest.mark.parametrize("stream", [[3] * 60, [3] * 64], ids=["shorter", "the same"])
def test_update_that_needs_no_page_succeeds_in_a_full_pool(engine, stream):
    engine.create(session_id="a")
    engine.append("a", [3] * 64)
    engine.create([2] * 63, session_id="big")
    engine.append("big", [3])
    assert engine.pages.num_free == 0
    engine.update("a", stream)


def test_update_that_does_not_fit_the_pool_is_refused(engine):
    _exhausted(engine)
    child = engine.fork("big")
    with _refused(engine, CapacityError, "needs .* pages of 8 cells, 0 of 16 can be had"):
        engine.update(child, [4] * 1)


# Sessions


UNKNOWN = {
    "append": lambda engine: engine.append("x", [1]),
    "update": lambda engine: engine.update("x", [1]),
    "rollback": lambda engine: engine.rollback("x", 1),
    "advance": lambda engine: engine.advance("x", [1]),
    "query": lambda engine: engine.query("x", [1], max_new_tokens=1),
    "stream": lambda engine: engine.stream("x", [1], max_new_tokens=1),
    "choose": lambda engine: engine.choose("x", [1], [[1]]),
    "fork": lambda engine: engine.fork("x"),
    "close": lambda engine: engine.close("x"),
    "session": lambda engine: engine.session("x"),
}


@pytest.mark.parametrize("verb", UNKNOWN)
def test_unknown_session_is_refused_and_the_open_ones_are_named(engine, session, verb):
    with _refused(engine, SessionError, "session x is unknown or closed; open: a, b"):
        UNKNOWN[verb](engine)


def test_closing_twice_is_refused(engine, session):
    engine.close("b")
    with _refused(engine, SessionError, "session b is unknown or closed; open: a"):
        engine.close("b")


def test_taken_ids_are_refused(engine, session):
    with _refused(engine, SessionError, "session b exists already; choose another id or close it"):
        engine.create(session_id="b")
    with _refused(engine, SessionError, "session b exists already; choose another id or close it"):
        engine.fork(session, new_id="b")


def test_unknown_policy_is_refused(engine, session):
    with _refused(engine, InputError, 'when_full: expected "error" or "slide", got "drop"'):
        engine.create(when_full="drop")


@pytest.mark.parametrize("count", [0, -3])
def test_rollback_of_nothing_is_refused(engine, session, count):
    with _refused(engine, InputError, f"rollback: expected at least 1, got {count}"):
        engine.rollback(session, count)


def test_rollback_past_an_eviction_is_refused(engine, session):
    message = "session a: rolling back 17 tokens would pass the last eviction, which 16 tokens ago"
    with _refused(engine, SessionError, message):
        engine.rollback(session, 17)
    engine.rollback(session, 16)


def test_rollback_of_more_than_the_stream_is_refused(engine, session):
    kept = engine.session(session).context_len - 5
    message = f"cannot roll back {kept + 1} tokens, the stream holds {kept}; the frozen prefix st"
    with _refused(engine, SessionError, message):
        engine.rollback(session, kept + 1)


def test_update_past_an_eviction_is_refused(engine, session):
    with _refused(engine, SessionError, "would pass the last eviction"):
        engine.update(session, [0, 0])


def test_rollback_by_a_fraction_is_refused(engine):
    engine.create(session_id="a")
    engine.append("a", [1, 2, 3])
    with _refused(engine, InputError, "rollback"):
        engine.rollback("a", 1.5)


# Settings


def _ask(**options):
    return lambda engine: engine.query("a", [1], **({"max_new_tokens": 2} | options))


SETTINGS = {
    "no new tokens": (_ask(max_new_tokens=0), "max_new_tokens: expected at least 1, got 0"),
    "many logprobs": (_ask(top_logprobs=21), "top_logprobs: expected 0 to 20, got 21"),
    "minus logprobs": (_ask(top_logprobs=-1), "top_logprobs: expected 0 to 20, got -1"),
    "eos": (_ask(eos_ids=[VOCAB]), f"eos_ids: expected ids in 0 … {VOCAB - 1}, got {VOCAB}"),
    "bias": (
        _ask(sampling=Sampling(logit_bias={-1: 2.0})),
        f"logit_bias and eos_ids: expected ids in 0 … {VOCAB - 1}, got -1",
    ),
    "stop": (_ask(stop=["x"]), "stop: needs text, and this engine has no tokenizer; pass eos_ids"),
    "no choice": (lambda e: e.choose("a", [1], []), "choices: expected at least one, got none"),
    "same choices": (
        lambda e: e.choose("a", [1], [[2, 3], [2, 3]]),
        r"choices\[1\]: expected different continuations, got the same token ids as choices\[0\]",
    ),
    "long choice": (
        lambda e: e.choose("a", [1], [[2] * 17, [3]]),
        "choices: expected at most 15 tokens each, got 17",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_wrong_settings_are_refused(engine, session, name):
    ask, message = SETTINGS[name]
    with _refused(engine, InputError, message):
        ask(engine)


@pytest.mark.parametrize("count", [-1, 0.5])
def test_advance_by_a_wrong_number_is_refused(engine, session, count):
    with _refused(engine, InputError, "max_new_tokens"):
        engine.advance(session, [1, 2, 3], max_new_tokens=count)


def test_query_for_a_fraction_of_a_token_is_refused(engine, session):
    with _refused(engine, InputError, "max_new_tokens"):
        engine.query(session, [1, 2, 3], max_new_tokens=1.5)


def test_advance_until_an_impossible_token_is_refused(engine, session):
    with _refused(engine, InputError, "eos_ids"):
        engine.advance(session, [1], max_new_tokens=1, eos_ids=[VOCAB])


# Refusals half-way


def test_stream_that_cannot_start_takes_nothing(engine):
    engine.create([1] * 56, session_id="a")
    engine.create([2] * 60, session_id="big")
    stream = engine.stream("a", [5] * 8, max_new_tokens=8)
    with _refused(engine, CapacityError, "needs 2 pages of 8 cells, 1 of 16 can be had"):
        next(stream)


def test_turn_is_not_committed_to_a_session_that_changed_meanwhile(engine, session):
    stream = engine.stream(session, [5], max_new_tokens=3, commit=True)
    next(stream)
    engine.append(session, [6])
    before = tiny_engine.state_of(engine)
    held = before.pop("cells_held")
    with pytest.raises(SessionError, match="session a changed while a turn to be committed was"):
        _finish(stream)
    after = tiny_engine.state_of(engine)
    assert after.pop("cells_held") < held
    assert after["sessions"] == before["sessions"]


def test_turn_is_not_committed_to_a_closed_session_whose_name_is_used_again(engine):
    engine.create([1, 2, 3], session_id="x")
    stream = engine.stream("x", [5] * 9, max_new_tokens=3, commit=True)
    next(stream)
    engine.close("x")
    engine.create(session_id="x")
    with pytest.raises(SessionError, match="session x"):
        _finish(stream)
    assert engine.session("x").token_ids == []
    assert engine.cells_held == 0


def test_stream_of_a_session_closed_before_it_starts_is_refused(engine):
    engine.create([1] * 40, session_id="a")
    with contextlib.closing(engine.stream("a", [5], max_new_tokens=3)) as stream:
        engine.close("a")
        engine.create([2] * 40, session_id="other")
        with _refused(engine, SessionError, "session a"):
            next(stream)


def _in_three_pieces(engine):
    """Each fork takes the page behind its parent's, so that the parent goes on elsewhere."""
    name = engine.create(session_id="a", when_full="slide")
    engine.append(name, [1] * 8)
    for token_id in (2, 3):
        child = engine.fork(name)
        engine.append(child, [4] * 8)
        engine.append(name, [token_id] * 8)
    return name


def test_append_whose_step_is_refused_evicts_nothing():
    engine = tiny_engine.build(
        table_capacity=2,
        context_len=24,
        evict_quantum=4,
        step_shapes=tiny_engine.SHAPES[-1:],
        implementation="xla",
    )
    name = _in_three_pieces(engine)
    with _refused(engine, CapacityError, "a step reads 3 stretches of 16 cells, the table holds 2"):
        engine.append(name, [4] * 4)


def test_update_whose_step_is_refused_rolls_nothing_back():
    engine = tiny_engine.build(
        table_capacity=2, step_shapes=tiny_engine.SHAPES[-1:], implementation="xla"
    )
    name = _in_three_pieces(engine)
    stream = engine.session(name).token_ids
    with _refused(engine, CapacityError, "a step reads 3 stretches of 16 cells, the table holds 2"):
        engine.update(name, [*stream[:-4], 90, 91])
