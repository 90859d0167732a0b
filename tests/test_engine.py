"""Many sessions over one pool: what verbs share, give back, count and answer."""

from __future__ import annotations

import contextlib

import jax
import jax.monitoring
import numpy as np
import pytest
import tiny_engine

from jaxstate.answer import FinishReason, Source
from jaxstate.errors import CapacityError, InputError
from jaxstate.sampling import Sampling

VOCAB = tiny_engine.MODEL.vocab_size
QUESTION = tiny_engine.random_ids(9, 6)


@pytest.fixture(scope="module")
def shared_engine():
    return tiny_engine.build(tokenizer=tiny_engine.LetterTokenizer(), stretch_cells=None)


@pytest.fixture
def engine(shared_engine):
    """The shared engine; what a test leaves open is closed, and then every cell must be free."""
    yield shared_engine
    for name in list(shared_engine.session_ids):
        shared_engine.close(name)
    assert shared_engine.cells_held == 0


@pytest.fixture
def context():
    return tiny_engine.random_ids(7, 45)


@pytest.fixture
def session(engine, context):
    name = engine.create(context[:11])
    engine.append(name, context[11:])
    return name


def _finish(stream):
    """Tokens and answer of a stream."""
    tokens = []
    while True:
        try:
            tokens.append(next(stream))
        except StopIteration as end:
            return tokens, end.value


def _tempered(seed=0, **options):
    return Sampling(temperature=1.3, seed=seed, **options)


# Answers


def test_greedy_answer_is_that_of_the_dense_forward(engine, session, context):
    answer = engine.query(session, QUESTION, max_new_tokens=6)
    assert list(answer.token_ids) == tiny_engine.greedy(context + QUESTION, 6)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.source is Source.COMPUTED
    assert answer.context_len == 45
    ranked = np.sort(tiny_engine.dense_logits(context + QUESTION)[-1])
    assert answer.gap == pytest.approx(ranked[-1] - ranked[-2], abs=1e-4)


def test_any_chunking_of_a_context_gives_the_same_answer(engine, context):
    wanted = tiny_engine.greedy(context + QUESTION, 4)
    for sizes in ([45], [1] * 45, [17, 3, 16, 9]):
        name, at = engine.create(), 0
        for size in sizes:
            engine.append(name, context[at : at + size])
            at += size
        assert list(engine.query(name, QUESTION, max_new_tokens=4).token_ids) == wanted
        assert engine.session(name).version == len(sizes)


def test_generate_needs_no_session(engine, context):
    answer = engine.generate(context + QUESTION, max_new_tokens=4)
    assert list(answer.token_ids) == tiny_engine.greedy(context + QUESTION, 4)
    assert engine.session_ids == []


def test_choices_are_scored_as_by_the_dense_forward(engine, session, context):
    choices = [[1], [1, 2], [3, 4], [3, 4, 5], [3], [90, 91, 92, 93]]

    def score(choice):
        total = 0.0
        for index, token in enumerate(choice):
            prefix = context + QUESTION + choice[:index]
            total += tiny_engine.dense_logprobs(prefix)[-1][token]
        size = len(choice)
        longer = {c[size] for c in choices if len(c) > size and c[:size] == choice}
        after = np.exp(tiny_engine.dense_logprobs(context + QUESTION + choice)[-1])
        return total + np.log1p(-sum(after[token] for token in longer))

    wanted = np.asarray([score(choice) for choice in choices])
    wanted -= np.log(np.exp(wanted).sum())
    answer = engine.choose(session, QUESTION, choices)
    np.testing.assert_allclose(answer.choice_logprobs, wanted, atol=1e-4)
    assert answer.choice == int(wanted.argmax())
    assert list(answer.token_ids) == choices[answer.choice]
    assert answer.finish_reason is FinishReason.CHOICE


def test_more_branches_than_a_step_has_outputs_are_scored_alike(engine, session, context):
    choices = [[first, second] for first in range(7) for second in (30, 31)]
    answer = engine.choose(session, QUESTION, choices)
    before = tiny_engine.dense_logprobs(context + QUESTION)[-1]
    wanted = []
    for first, second in choices:
        after = tiny_engine.dense_logprobs(context + QUESTION + [first])[-1]
        wanted.append(before[first] + after[second])
    wanted -= np.log(np.exp(wanted).sum())
    np.testing.assert_allclose(answer.choice_logprobs, wanted, atol=1e-4)


def test_logprobs_are_the_models_own(engine, session, context):
    answer = engine.query(
        session, QUESTION, max_new_tokens=5, top_logprobs=3, sampling=_tempered(top_k=40)
    )
    ids = context + QUESTION
    for token in answer.tokens:
        wanted = tiny_engine.dense_logprobs(ids)[-1]
        assert token.logprob == pytest.approx(wanted[token.token_id], abs=1e-4)
        best = np.argsort(-wanted)[:3]
        assert list(token.top_logprobs) == best.tolist()
        np.testing.assert_allclose(list(token.top_logprobs.values()), wanted[best], atol=1e-4)
        ids = ids + [token.token_id]


def test_logprobs_are_absent_unless_asked_and_may_be_without_a_top(engine, session):
    (plain,) = engine.query(session, QUESTION, max_new_tokens=1).tokens
    assert (plain.logprob, plain.top_logprobs) == (None, None)
    (asked,) = engine.query(session, QUESTION, max_new_tokens=1, top_logprobs=0).tokens
    assert asked.logprob is not None
    assert asked.top_logprobs == {}


def test_sampled_answers_repeat_with_their_seed(engine, session):
    def ask(seed, **options):
        answer = engine.query(
            session, QUESTION, max_new_tokens=12, sampling=_tempered(seed, **options)
        )
        return answer.token_ids

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(5)}) == 5


def test_draws_are_keyed_by_the_tokens_place_in_the_context(engine, session, context):
    settings = _tempered(2, top_k=30, top_p=0.95, min_p=0.01, logit_bias={3: 1.0})
    answer = engine.query(session, QUESTION, max_new_tokens=8, sampling=settings)
    ids = context + QUESTION
    for token_id in answer.token_ids:
        logits = jax.numpy.asarray(tiny_engine.dense_logits(ids)[-1])
        assert engine.executor.draw(logits, settings, len(ids)) == token_id
        ids = ids + [token_id]


def test_draws_depend_on_the_place_in_the_context_not_on_the_query(engine, session):
    """A query whose question holds the first drawn tokens goes on as the first one did."""
    whole = engine.query(session, QUESTION, max_new_tokens=8, sampling=_tempered(3)).token_ids
    longer = [*QUESTION, *whole[:3]]
    rest = engine.query(session, longer, max_new_tokens=5, sampling=_tempered(3)).token_ids
    assert rest == whole[3:]


def test_biased_tokens_are_drawn_or_never_drawn(engine, session):
    only = engine.query(
        session, QUESTION, max_new_tokens=3, sampling=Sampling(logit_bias={17: 100.0})
    )
    assert only.token_ids == (17, 17, 17)
    banned = {token: -np.inf for token in range(VOCAB) if token != 5}
    answer = engine.query(
        session, QUESTION, max_new_tokens=3, sampling=_tempered(logit_bias=banned)
    )
    assert answer.token_ids == (5, 5, 5)


# Streams


def test_stream_yields_the_answers_tokens_one_by_one(engine, session):
    options = dict(max_new_tokens=6, sampling=_tempered(4))
    tokens, answer = _finish(engine.stream(session, QUESTION, **options))
    assert tuple(tokens) == answer.tokens
    assert "".join(token.text for token in tokens) == answer.text
    assert answer == engine.query(session, QUESTION, **options)


def test_stream_forwards_only_what_is_asked_for(engine, session):
    before = engine.executor.tokens_forwarded
    with contextlib.closing(engine.stream(session, QUESTION, max_new_tokens=20)) as stream:
        assert engine.executor.tokens_forwarded == before
        for count in range(3):
            next(stream)
            assert engine.executor.tokens_forwarded == before + len(QUESTION) + count


@pytest.mark.parametrize("which", [0, 2, 5])
def test_any_of_several_end_tokens_ends_the_answer(engine, session, which):
    sampling = _tempered(6)
    free = engine.query(session, QUESTION, max_new_tokens=8, sampling=sampling)
    end = free.token_ids[which]
    at = free.token_ids.index(end)
    unused = next(idx for idx in range(VOCAB) if idx not in free.token_ids)
    answer = engine.query(
        session, QUESTION, max_new_tokens=8, sampling=sampling, eos_ids=[unused, end]
    )
    assert answer.token_ids == free.token_ids[: at + 1]
    assert answer.finish_reason is FinishReason.EOS
    tokenizer = tiny_engine.LetterTokenizer()
    assert answer.text == tokenizer.decode(free.token_ids[:at], skip_special=True)


def test_stop_string_ends_the_answer_and_is_not_shown(engine, session):
    sampling = _tempered(8)
    free = engine.query(session, QUESTION, max_new_tokens=12, sampling=sampling)
    assert len(free.text) == 12
    stop = free.text[5:8]
    at = free.text.index(stop)
    tokens, answer = _finish(
        engine.stream(session, QUESTION, max_new_tokens=12, sampling=sampling, stop=["never", stop])
    )
    assert answer.text == "".join(token.text for token in tokens) == free.text[:at]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids == free.token_ids[: at + len(stop)]


def test_partial_stop_string_is_shown_when_the_answer_ends(engine, session):
    sampling = _tempered(8)
    free = engine.query(session, QUESTION, max_new_tokens=6, sampling=sampling)
    stop = free.text[4:] + "Z"
    tokens, answer = _finish(
        engine.stream(session, QUESTION, max_new_tokens=6, sampling=sampling, stop=[stop])
    )
    assert answer.text == free.text
    assert answer.finish_reason is FinishReason.LENGTH
    assert tokens[4].text == ""
    assert tokens[5].text == free.text[4:]


def test_bare_string_is_no_list_of_stop_strings(engine, session):
    with pytest.raises(InputError, match="stop"):
        engine.query(session, QUESTION, max_new_tokens=1, stop="END")


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_abandoned_stream_gives_its_cells_back(engine, session, taken):
    before = tiny_engine.state_of(engine)
    stream = engine.stream(session, QUESTION, max_new_tokens=20)
    for _ in range(taken):
        next(stream)
    assert (engine.cells_held > before["cells_held"]) is (taken > 0)
    stream.close()
    assert tiny_engine.state_of(engine) == before


def test_interleaved_streams_answer_as_if_alone(engine, session):
    other = engine.fork(session)
    engine.append(other, [1, 2, 3])
    asks = [(session, QUESTION), (other, QUESTION[:3]), (session, [5])]
    alone = [engine.query(name, ids, max_new_tokens=6).token_ids for name, ids in asks]
    streams = [engine.stream(name, ids, max_new_tokens=6) for name, ids in asks]
    for stream in streams:
        next(stream)
    assert [_finish(stream)[1].token_ids for stream in reversed(streams)] == alone[::-1]


def test_interleaved_streams_count_their_own_tokens(engine, session):
    first = engine.stream(session, QUESTION, max_new_tokens=4)
    second = engine.stream(session, [5], max_new_tokens=4)
    next(first)
    next(second)
    assert _finish(second)[1].tokens_forwarded == 1 + 3
    assert _finish(first)[1].tokens_forwarded == len(QUESTION) + 3


def test_stream_that_no_longer_fits_when_it_starts_is_refused(engine):
    name = engine.create([1])
    with contextlib.closing(engine.stream(name, [2] * 20, max_new_tokens=40)) as stream:
        engine.append(name, [3] * 80)
        with pytest.raises(CapacityError, match="exceed the model's 128 positions"):
            next(stream)


def test_running_stream_keeps_the_version_it_saw(engine, session):
    wanted = engine.query(session, QUESTION, max_new_tokens=6)
    stream = engine.stream(session, QUESTION, max_new_tokens=6)
    next(stream)
    engine.append(session, [1, 2, 3])
    engine.close(session)
    engine.create(tiny_engine.random_ids(1, 90))
    answer = _finish(stream)[1]
    assert answer.token_ids == wanted.token_ids
    assert answer.version == wanted.version


# What a query leaves behind


def test_queries_leave_every_session_bitwise_unchanged(engine, session):
    engine.fork(session)
    engine.advance(session, QUESTION[:2])
    before = tiny_engine.state_of(engine)
    engine.query(session, QUESTION, max_new_tokens=9, sampling=_tempered(), top_logprobs=2)
    engine.choose(session, QUESTION, [[1], [2, 3]])
    engine.generate(QUESTION, max_new_tokens=3)
    assert tiny_engine.state_of(engine) == before


@pytest.mark.parametrize("paid", [False, True])
def test_queries_write_to_pages_of_their_own(engine, session, paid):
    """Not even the unused cells behind a session's last token change."""
    if paid:
        engine.advance(session, QUESTION[:2])
    record = engine.session(session)
    tables = [record.entries, *(tail.entries for tail in record.paid)]
    pages = {entry.page for entries in tables for entry in entries}
    size = engine.config.page_size
    cells = np.asarray([page * size + cell for page in sorted(pages) for cell in range(size)])
    before = engine.executor.read_cells(cells)
    engine.query(session, QUESTION, max_new_tokens=12)
    engine.choose(session, QUESTION, [[1], [2, 3]])
    for old, new in zip(before, engine.executor.read_cells(cells), strict=True):
        assert [part.tobytes() for part in old] == [part.tobytes() for part in new]


def test_memory_is_constant_over_query_cycles(engine, session):
    held = engine.cells_held
    free = engine.pages.num_free
    for cycle in range(200):
        question = QUESTION[: 1 + cycle % 6]
        if cycle % 3 == 2:
            engine.choose(session, question, [[1], [2, 3]])
        else:
            engine.query(session, question, max_new_tokens=1 + cycle % 3)
        assert (engine.cells_held, engine.pages.num_free) == (held, free)
    assert engine.bytes_held == held * tiny_engine.MODEL.bytes_per_cell


def test_bytes_held_are_those_of_the_pools_pages(engine, session):
    assert engine.bytes_held == engine.cells_held * engine.model.bytes_per_cell
    one_cell = engine.executor.read_cells(np.zeros(1, np.int64))
    assert engine.model.bytes_per_cell == sum(k.nbytes + v.nbytes for k, v in one_cell)
    assert engine.cells_used == 45
    assert engine.cells_held == -(-45 // 8) * 8


# Forks


def test_fork_shares_every_cell(engine, session, context):
    before = tiny_engine.state_of(engine)
    forwarded = engine.executor.tokens_forwarded
    child = engine.fork(session)
    assert engine.cells_held == before["cells_held"]
    assert engine.cells_used == before["cells_used"]
    assert engine.executor.tokens_forwarded == forwarded
    state = tiny_engine.state_of(engine)["sessions"]
    assert state[session] == before["sessions"][session]
    assert state[child] == before["sessions"][session]


def test_forks_grow_apart(engine, session, context):
    child = engine.fork(session)
    engine.append(session, [1, 2, 3])
    engine.append(child, [4, 5])
    engine.rollback(session, 2)
    engine.append(session, [6])
    for name, ids in ((session, [*context, 1, 6]), (child, [*context, 4, 5])):
        assert engine.session(name).token_ids == ids
        answer = engine.query(name, QUESTION, max_new_tokens=3)
        assert list(answer.token_ids) == tiny_engine.greedy(ids + QUESTION, 3)


def test_child_survives_its_parent(engine, session, context):
    child = engine.fork(session)
    bits = tiny_engine.state_of(engine)["sessions"][child]["bits"]
    engine.close(session)
    engine.create(tiny_engine.random_ids(3, 80))
    assert tiny_engine.state_of(engine)["sessions"][child]["bits"] == bits
    answer = engine.query(child, QUESTION, max_new_tokens=3)
    assert list(answer.token_ids) == tiny_engine.greedy(context + QUESTION, 3)


# Durable verbs


def test_versions_count_durable_operations(engine, session):
    version = engine.session(session).version
    assert version == 1  # create is not one, the append was
    assert engine.append(session, [1, 2, 3]) == 2
    assert engine.rollback(session, 1) == 3
    assert engine.update(session, engine.session(session).token_ids[11:]) == 4
    engine.query(session, QUESTION, max_new_tokens=1)
    engine.advance(session, QUESTION)
    assert engine.session(engine.fork(session)).version == 4
    answer = engine.query(session, QUESTION, max_new_tokens=1, commit=True)
    assert answer.version == 4
    assert engine.session(session).version == 5


def test_update_forwards_only_what_differs(engine, session, context):
    stream = [*context[11:40], 1, 2, 3]
    before = engine.executor.tokens_forwarded
    engine.update(session, stream)
    assert engine.executor.tokens_forwarded - before == 3
    assert engine.session(session).token_ids == context[:11] + stream
    answer = engine.query(session, QUESTION, max_new_tokens=3)
    assert list(answer.token_ids) == tiny_engine.greedy(context[:11] + stream + QUESTION, 3)


def test_rollback_and_the_same_tokens_again_give_the_same_answer(engine, session, context):
    before = engine.query(session, QUESTION, max_new_tokens=4).token_ids
    engine.rollback(session, 9)
    assert engine.session(session).token_ids == context[:-9]
    engine.append(session, context[-9:])
    assert engine.query(session, QUESTION, max_new_tokens=4).token_ids == before


@pytest.mark.parametrize("paid", [False, True])
def test_committed_turn_becomes_part_of_the_stream(engine, session, context, paid):
    if paid:
        engine.advance(session, QUESTION[:4])
    answer = engine.query(session, QUESTION, max_new_tokens=5, commit=True)
    assert list(answer.token_ids) == tiny_engine.greedy(context + QUESTION, 5)
    record = engine.session(session)
    assert record.token_ids == context + QUESTION + list(answer.token_ids)
    assert record.paid == []
    seen = {
        entry.base + cell for entry in record.entries for cell in range(entry.first, entry.fill)
    }
    assert seen == set(range(len(record.token_ids)))
    answer = engine.query(session, [7], max_new_tokens=3)
    assert list(answer.token_ids) == tiny_engine.greedy([*record.token_ids, 7], 3)


def test_committed_turn_slides_a_full_session(engine, context):
    name = engine.create(context[:11], when_full="slide")
    engine.append(name, tiny_engine.random_ids(5, 80))
    answer = engine.query(name, QUESTION, max_new_tokens=3, commit=True)
    record = engine.session(name)
    stream = tiny_engine.random_ids(5, 80) + QUESTION + list(answer.token_ids)
    assert record.evicted == 8  # 100 tokens in 96 places, in quanta of 8
    assert record.token_ids == context[:11] + stream[8:]


def test_sliding_session_keeps_its_newest_tokens(engine, context):
    name = engine.create(context[:11], when_full="slide")
    stream = tiny_engine.random_ids(6, 300)
    for begin in range(0, 300, 23):
        engine.append(name, stream[begin : begin + 23])
    record = engine.session(name)
    assert record.evicted % 8 == 0
    assert record.context_len <= 96 < record.context_len + 23 + 8
    assert record.token_ids == context[:11] + stream[record.evicted :]
    assert engine.cells_used == record.context_len


@pytest.mark.parametrize("change", ["append", "update", "shorter update"])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_change_whose_step_fails_leaves_the_tokens_as_they_were(
    engine, context, monkeypatch, change, failing
):
    name = engine.create(context[:11], when_full="slide")
    engine.append(name, context[11:])
    if change == "append":
        engine.append(name, tiny_engine.random_ids(5, 51))  # full, nothing evicted yet
        change, ids = engine.append, tiny_engine.random_ids(6, 40)
    else:
        kept = context[11:20] if change == "update" else context[11:41]
        change, ids = engine.update, [*kept, *tiny_engine.random_ids(6, 20)]
    record = engine.session(name)
    tokens, version = list(record.token_ids), record.version
    run, calls = engine.executor.run, []

    def failing_run(groups):
        calls.append(1)
        if len(calls) == failing:
            raise RuntimeError("no such step")
        return run(groups)

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "run", failing_run)
        with pytest.raises(RuntimeError, match="no such step"):
            change(name, ids)
    assert (record.token_ids, record.version, record.evicted) == (tokens, version, 0)
    answer = engine.query(name, QUESTION, max_new_tokens=3)
    assert list(answer.token_ids) == tiny_engine.greedy(tokens + QUESTION, 3)
    assert (answer.version, answer.rebuilt) == (version, False)
    change(name, ids)
    assert record.version == version + 1 and record.token_ids[-20:] == ids[-20:]


# Paid tails


def test_query_that_begins_with_paid_tokens_forwards_the_rest(engine, session, context):
    wanted = tiny_engine.greedy(context + QUESTION, 4)
    engine.advance(session, QUESTION[:4])
    answer = engine.query(session, QUESTION, max_new_tokens=4)
    assert list(answer.token_ids) == wanted
    assert answer.source is Source.RESUMED
    assert answer.tokens_forwarded == 2 + 3
    engine.advance(session, QUESTION)
    answer = engine.query(session, QUESTION, max_new_tokens=4, top_logprobs=0)
    assert list(answer.token_ids) == wanted
    assert answer.tokens_forwarded == 3
    logprob = tiny_engine.dense_logprobs(context + QUESTION)[-1][wanted[0]]
    assert answer.tokens[0].logprob == pytest.approx(logprob, abs=1e-4)


def test_question_that_leaves_the_paid_tokens_resumes_where_they_part(engine, session, context):
    engine.advance(session, QUESTION)
    for question, forwarded in (([*QUESTION[:3], 1, 2], 2), (QUESTION[:3], 1), ([96, 1], 2)):
        answer = engine.query(session, question, max_new_tokens=1)
        assert list(answer.token_ids) == tiny_engine.greedy(context + question, 1)
        assert answer.tokens_forwarded == forwarded
        assert (answer.source is Source.RESUMED) is (forwarded < len(question))


def test_choices_resume_from_paid_tokens(engine, session):
    choices = [[1], [2, 3], [2]]
    plain = engine.choose(session, QUESTION, choices)
    engine.advance(session, QUESTION)
    paid = engine.choose(session, QUESTION, choices)
    np.testing.assert_allclose(paid.choice_logprobs, plain.choice_logprobs, atol=1e-4)
    assert paid.source is Source.RESUMED
    assert plain.tokens_forwarded == len(QUESTION) + 1  # token 2 has a choice behind it
    assert paid.tokens_forwarded == 1


def test_decoding_ahead_stops_at_the_next_decision(engine, session, context):
    ahead = tiny_engine.greedy(context + QUESTION, 6)
    tail = engine.advance(session, QUESTION, max_new_tokens=6)
    assert list(tail.token_ids) == QUESTION + ahead
    ended = engine.advance(session, QUESTION, max_new_tokens=6, eos_ids=[ahead[2]])
    stop = ahead.index(ahead[2])
    assert list(ended.token_ids) == QUESTION + ahead[:stop]
    unsure = engine.advance(session, QUESTION, max_new_tokens=6, min_gap=100.0)
    assert list(unsure.token_ids) == QUESTION


def test_next_durable_operation_drops_paid_tails(engine, session):
    held = engine.cells_held
    for change in (
        lambda: engine.append(session, [1]),
        lambda: engine.rollback(session, 1),
        lambda: engine.update(session, [*engine.session(session).token_ids[11:-1], 5]),
    ):
        engine.advance(session, QUESTION, max_new_tokens=3)
        assert engine.cells_held > held
        change()
        assert engine.session(session).paid == []
        assert engine.cells_held == held
    answer = engine.query(session, QUESTION, max_new_tokens=1)
    assert answer.source is Source.COMPUTED


def test_advance_keeps_only_the_pages_it_filled(engine, session):
    held = engine.cells_held
    engine.advance(session, QUESTION, max_new_tokens=30, min_gap=100.0)
    assert engine.cells_held == held + 8


# Compilation


class _Compilations:
    """Counts what XLA compiles while it is open; listeners cannot be taken off again."""

    def __init__(self):
        self.count = 0
        self.open = False
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, name, duration, **kwargs):
        self.count += self.open and "backend_compile" in name

    @contextlib.contextmanager
    def counted(self):
        self.open, self.count = True, 0
        yield
        self.open = False


@pytest.fixture(scope="module")
def compilations():
    return _Compilations()


def _tour(engine):
    """Every verb with every option that could need a program of its own."""
    name = engine.create(tiny_engine.random_ids(1, 11), when_full="slide")
    for count in (1, 2, 4, 7, 16, 33, 60):
        engine.append(name, tiny_engine.random_ids(count, count))
    engine.query(name, QUESTION, max_new_tokens=5)
    settings = _tempered(top_k=5, top_p=0.9, min_p=0.1, logit_bias={3: 1.0})
    engine.query(name, QUESTION, max_new_tokens=5, sampling=settings, top_logprobs=4)
    engine.query(name, QUESTION, max_new_tokens=5, eos_ids=[3], stop=["abc"], top_logprobs=0)
    with contextlib.closing(engine.stream(name, QUESTION, max_new_tokens=5)) as stream:
        next(stream)
    engine.choose(name, QUESTION, [[first, second] for first in range(9) for second in (1, 2)])
    engine.choose(name, [4], [[1], [2]])
    engine.advance(name, QUESTION, max_new_tokens=2)
    engine.query(name, QUESTION, max_new_tokens=1)
    engine.choose(name, QUESTION, [[1], [2, 3]])
    engine.generate(QUESTION, max_new_tokens=2)
    child = engine.fork(name)
    engine.append(child, [1, 2, 3])
    engine.rollback(child, 1)
    engine.query(child, QUESTION, max_new_tokens=2, commit=True)
    engine.update(name, engine.session(name).token_ids[11:] + [5])
    engine.executor.read_cells(np.arange(3))
    engine.executor.wait()
    engine.close(child)
    engine.close(name)


def test_nothing_compiles_after_ready(engine, compilations):
    jax.clear_caches()  # forget what other tests have made JAX compile on the way
    with compilations.counted():
        _tour(engine)
    assert compilations.count == 0
    with compilations.counted():  # the listener does hear
        jax.jit(lambda x: x * 3 + 1)(np.arange(5))
    assert compilations.count > 0


def test_progress_reports_every_executable():
    reports = []
    engine = tiny_engine.build(
        progress=lambda *report: reports.append(report), step_shapes=tiny_engine.SHAPES[:1]
    )
    total = engine.executor.num_executables
    assert [(done, of) for done, of, _, _ in reports] == [
        (index + 1, total) for index in range(total)
    ]
    assert [name for _, _, name, _ in reports[-3:]] == ["step 1", "take pages", "put pages"]
    assert all(seconds > 0 for *_, seconds in reports)


def test_steps_are_counted_and_split_at_the_longest_shape(engine):
    name = engine.create()
    steps = engine.executor.steps
    engine.append(name, [1] * 33)
    assert engine.executor.steps - steps == 3
