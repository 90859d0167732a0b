"""Answers that have to be something: against a dense forward under masks found by brute force."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
import threading

import command_line
import grpc_service
import jsonschema
import model_files
import numpy as np
import plain_sentencepiece
import pytest
import tiny_engine
import tiny_service

from jaxstate import constraint as constraint_module
from jaxstate import models
from jaxstate.answer import FinishReason, Source
from jaxstate.constraint import LONGEST, Constraint, Guide
from jaxstate.errors import CancelledError, InputError
from jaxstate.flash import Question
from jaxstate.models.constraints import Constraints
from jaxstate.plan import JobClass, Limits
from jaxstate.prepositioning import Entry, Ready
from jaxstate.sampling import Sampling
from jaxstate.scheduler import Scheduler
from jaxstate.serving import journal_rows
from jaxstate.serving.journal import Journal

WAIT_S = 60
EOS = 2
FROZEN = tuple(range(30, 40))
FINITE = Constraint(regex="(buy|sell|höher) ?[12]{1,3}(!| a)?")
LANGUAGE = {
    "".join(parts).encode()
    for parts in itertools.product(
        ("buy", "sell", "höher"), ("", " "),
        ["".join(digits) for n in (1, 2, 3) for digits in itertools.product("12", repeat=n)],
        ("", "!", " a"),
    )
}  # fmt: skip
ORDER = {
    "type": "object",
    "properties": {
        "s": {"enum": ["buy", None]},
        "q": {"type": "integer", "minimum": -20, "maximum": 3000},
        "w": {"type": "string", "maxLength": 3},
    },
    "required": ["s", "q"],
    "additionalProperties": False,
}
SCHEMAS = (
    ORDER,
    {"type": "array", "items": {"type": ["boolean", "null"]}, "minItems": 1, "maxItems": 2},
    {"anyOf": [{"type": "string", "pattern": "^[a-f]{2,6}$"}, {"const": {"a": [1, "é"]}}]},
    {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "properties": {"n": {"$ref": "#/$defs/node"}, "v": {"enum": [1, 2]}},
        "required": ["v"], "additionalProperties": False}}},
)  # fmt: skip
REGEXES = (
    r"[A-Z]{2}-[0-9]{1,4}(\.[0-9]{2})?", r"(é|ü|a b|\n){1,6}x", "(yes|no|ye)(, (but|so))*\\.",
    r"[^a-zA-Z]{3,9}",
)  # fmt: skip
SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[1-9][0-9]?/\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return grpc_service.load(tmp_path_factory.mktemp("constraint"))


@pytest.fixture(scope="module")
def shared_engine(model):
    return grpc_service.engine_of(model, prefix_share=0.2)


@pytest.fixture
def engine(shared_engine):
    with tiny_engine.left_empty(shared_engine) as engine:
        yield engine


@pytest.fixture
def service(shared_engine):
    with tiny_service.started(shared_engine) as service:
        yield service


@pytest.fixture(scope="module")
def dense(model):
    return command_line.Dense(model, 64)


def _compact(schema):
    guidance = {"whitespace_flexible": False}
    return Constraint(json_schema=json.dumps(schema | {"x-guidance": guidance}))


def _ids(seed, count=5):
    return tuple(np.random.default_rng(seed).integers(3, 260, count).tolist())


def _question(seed=1, count=24, constraint=FINITE, **more):
    return Question(
        token_ids=_ids(seed), max_new_tokens=count, constraint=constraint, eos_ids=(EOS,), **more
    )


def _ask(engine, session, asked, **more):
    return engine.query(
        session, asked.token_ids, max_new_tokens=asked.max_new_tokens, eos_ids=asked.eos_ids,
        sampling=asked.sampling, constraint=asked.constraint, **more,
    )  # fmt: skip


def _reference(dense, tokenizer, prompt, count):
    """Answer by whole forwards: of the tokens that begin a text of LANGUAGE, the most likely.

    Returns ids, why it ended, and each token's log-probability among those allowed.
    """
    beginnings = {text[:end] for text in LANGUAGE for end in range(len(text) + 1)}
    text, ids, logprobs = b"", [], []
    while len(ids) < count:
        logits = dense.logits([*prompt, *ids])[-1].astype(np.float64)
        allowed = [EOS] if text in LANGUAGE else []
        allowed += [
            idx for idx in range(3, tokenizer.vocab_size)
            if text + tokenizer.token_bytes(idx) in beginnings
        ]  # fmt: skip
        if allowed == [EOS]:
            return ids, FinishReason.STOP, logprobs
        best = min(allowed, key=lambda idx: (-logits[idx], idx))
        logprobs.append(logits[best] - np.log(np.exp(logits[allowed]).sum()))
        ids.append(best)
        if best == EOS:
            return ids, FinishReason.EOS, logprobs
        text += tokenizer.token_bytes(best)
    if text in LANGUAGE and not any(
        text + tokenizer.token_bytes(idx) in beginnings for idx in range(3, tokenizer.vocab_size)
    ):
        return ids, FinishReason.STOP, logprobs
    return ids, FinishReason.LENGTH, logprobs


def _differing(engine, dense, tokenizer):
    """Answers that are not the reference's, of forty."""
    session = engine.create(FROZEN)
    differ = []
    for seed in range(40):
        asked = _question(seed, count=3 + seed % 12)
        answer = _ask(engine, session, asked, top_logprobs=4)
        ids, reason, logprobs = _reference(
            dense, tokenizer, [*FROZEN, *asked.token_ids], asked.max_new_tokens
        )
        found = [token.logprob for token in answer.tokens]
        same = list(answer.token_ids) == ids and answer.finish_reason is reason
        if not same or not np.allclose(found, logprobs, atol=1e-3):
            differ.append((seed, answer, ids, reason))
    return differ


def test_an_answer_is_what_a_dense_forward_draws_among_the_tokens_that_go_on(engine, dense, model):
    assert not _differing(engine, dense, model.tokenizer)


@pytest.mark.parametrize("mutation", ["ends are never allowed", "one more token is allowed"])
def test_a_mutation_of_what_is_allowed_shows(engine, dense, model, monkeypatch, mutation):
    plain = Guide.allowed

    def mutated(self):
        bits = plain(self)
        if mutation == "one more token is allowed":
            bits[3] |= np.uint32(1)  # of id 96
        elif bits[0] != 4:
            bits[0] &= ~np.uint32(1 << EOS)
        return bits

    monkeypatch.setattr(Guide, "allowed", mutated)
    monkeypatch.setattr(Guide, "accept", _accept_anything(Guide.accept))
    assert _differing(engine, dense, model.tokenizer)


def _accept_anything(accept):
    def mutated(self, token_id):
        try:
            accept(self, token_id)
        except InputError:
            pass

    return mutated


def _drawn(engine, constraints, count, bias=()):
    """200 random answers; those that were cut short a second time, with room to end."""
    session = engine.create(FROZEN)
    for seed in range(200):
        constraint = constraints[seed % len(constraints)]
        asked = _question(
            seed % 50, count=(count, 7)[seed % 5 == 0], constraint=constraint,
            sampling=Sampling(
                temperature=1.5, seed=seed, top_p=(1.0, 0.9)[seed % 2], logit_bias=dict(bias)
            ),
        )  # fmt: skip
        answer = _ask(engine, session, asked)
        if answer.finish_reason is FinishReason.LENGTH:
            cut, answer = answer, _ask(engine, session, _longer(asked))
            assert answer.token_ids[: len(cut.token_ids)] == cut.token_ids
            assert answer.text.startswith(cut.text)
            assert answer.finish_reason is not FinishReason.LENGTH
        assert (answer.finish_reason is FinishReason.EOS) == (answer.token_ids[-1] == EOS)
        yield seed, answer


def _longer(asked):
    return Question(
        token_ids=asked.token_ids, max_new_tokens=100, constraint=asked.constraint,
        eos_ids=asked.eos_ids, sampling=asked.sampling,
    )  # fmt: skip


def test_answers_to_a_schema_are_json_that_it_allows(engine):
    constraints, reasons = [_compact(schema) for schema in SCHEMAS], set()
    for seed, answer in _drawn(engine, constraints, 48):
        jsonschema.validate(json.loads(answer.text), SCHEMAS[seed % len(SCHEMAS)])
        reasons.add(answer.finish_reason)
    assert reasons == {FinishReason.STOP}  # nothing can follow


def test_answers_to_a_schema_may_have_space_between_their_parts(engine):
    session = engine.create(FROZEN)
    asked = _question(
        constraint=Constraint(json_schema=json.dumps(SCHEMAS[1])), count=90,
        sampling=Sampling(temperature=1.5, seed=3),
    )  # fmt: skip
    answer = _ask(engine, session, asked)
    jsonschema.validate(json.loads(answer.text), SCHEMAS[1])
    assert re.search(r"\s", answer.text)


def test_answers_to_a_regex_match_it_from_beginning_to_end(engine):
    constraints, reasons = [Constraint(regex=regex) for regex in REGEXES], set()
    for seed, answer in _drawn(engine, constraints, 40):
        assert re.fullmatch(REGEXES[seed % len(REGEXES)], answer.text), answer.text
        reasons.add(answer.finish_reason)
    assert reasons == {FinishReason.STOP, FinishReason.EOS}


def test_answers_to_a_grammar_are_of_its_language(engine, model):
    signs = model.tokenizer.encode("+(", continues=True)  # seldom enough that sums end
    deepest = 0
    for _, answer in _drawn(engine, [Constraint(grammar=SUM)], 60, dict.fromkeys(signs, -1.0)):
        assert re.fullmatch("[0-9+()]+", answer.text)
        ast.parse(answer.text, mode="eval")  # Python's own grammar
        assert not re.search(r"0\d|\d{3}|\+\+|\(\+|^\+", answer.text)
        deepest = max(deepest, answer.text.count("("))
    assert deepest > 1


def _together(engine, session, questions):
    """Ask all in the same steps; each one's answer with its tokens' log-probabilities."""
    scheduler = Scheduler(engine.executor, engine.pages, Limits(tokens=16, rows=4))
    tickets = [
        scheduler.submit(
            functools.partial(
                engine.verbs.stream, session, asked.token_ids, eos_ids=asked.eos_ids,
                max_new_tokens=asked.max_new_tokens, sampling=asked.sampling, top_logprobs=5,
                constraint=asked.constraint,
            ),
            job_class=JobClass.QUERY, session=session, tokens=len(asked.token_ids), cells=40, now=0,
        )
        for asked in questions
    ]  # fmt: skip
    while scheduler.num_waiting:
        scheduler.step(0)
    return [ticket.result for ticket in tickets]


def test_rows_beside_a_constrained_one_keep_every_bit_and_it_is_what_it_is_alone(engine):
    session = engine.create(FROZEN)
    free = [
        _question(seed, 8, None, sampling=Sampling(temperature=0.8, seed=seed)) for seed in range(4)
    ]
    held = _question(9, 8, Constraint(regex="[a-z]{9}"), sampling=Sampling(temperature=2, seed=7))
    unheld = dataclasses.replace(held, constraint=None)
    for one in range(4):
        before, after = free[:one], free[one + 1 :]
        steps = engine.executor.steps
        *_, with_held, alone = (
            _together(engine, session, [*before, other, *after]) for other in (unheld, held, held)
        )
        assert engine.executor.steps - steps <= 3 * 12  # shared
        without = _together(engine, session, [*before, unheld, *after])
        for row in range(4):
            if row != one:
                assert with_held[row].tokens == without[row].tokens
        assert with_held[one].tokens == alone[one].tokens != without[one].tokens
        assert with_held[one].token_ids == _ask(engine, session, held).token_ids
        assert re.fullmatch("[a-z]{8}", with_held[one].text)


def test_what_was_paid_ahead_is_gone_on_from_but_not_taken_for_an_answer(engine):
    session = engine.create(FROZEN)
    held = _question(4, 6)
    free = dataclasses.replace(held, constraint=None)
    computed, plain = _ask(engine, session, held), _ask(engine, session, free)
    assert computed.source is Source.COMPUTED and computed.text != plain.text
    engine.advance(session, held.token_ids, max_new_tokens=5)
    resumed = _ask(engine, session, held)
    assert resumed.source is Source.RESUMED
    assert resumed.tokens_forwarded == len(resumed.token_ids) - 1
    assert (resumed.token_ids, resumed.finish_reason) == (
        computed.token_ids, computed.finish_reason
    )  # fmt: skip
    assert resumed.gap == pytest.approx(computed.gap, abs=1e-3)
    assert _ask(engine, session, free).token_ids == plain.token_ids


def test_a_registered_question_is_held_to_its_constraint(service):
    session = service.create(FROZEN)
    held = _question(5, 6)
    free = dataclasses.replace(held, constraint=None)
    other = dataclasses.replace(held, constraint=Constraint(regex="[0-9]{6}"))
    computed = service.query(session, held).result(WAIT_S)
    plain = service.query(session, free).result(WAIT_S)
    service.register(session, held)
    service.wait_until_idle(WAIT_S)
    flash = service.query(session, held).result(WAIT_S)
    assert (computed.source, flash.source) == (Source.COMPUTED, Source.FLASH)
    assert flash.token_ids == computed.token_ids
    # What its evaluation left behind is no answer to another question of the same tokens.
    resumed = service.query(session, free).result(WAIT_S)
    assert resumed.source is Source.RESUMED and resumed.token_ids == plain.token_ids
    digits = service.query(session, other).result(WAIT_S)
    assert digits.source is Source.RESUMED and re.fullmatch("[0-9]{6}", digits.text)
    # With what no answer at hand knows of, it is computed.
    cut = service.query(session, held, stop=[flash.text[1]]).result(WAIT_S)
    assert cut.source is not Source.FLASH and cut.text == flash.text[0]


def test_a_header_does_not_answer_what_has_a_constraint(service):
    session = service.create(FROZEN)
    held = _question(5, 1)
    service.declare(session, Entry(token_ids=held.token_ids, max_new_tokens=3))
    service.wait_until_idle(WAIT_S)
    [ready] = service._sessions[session].prepositions.ready.values()
    assert isinstance(ready, Ready) and ready.answer(held) is None
    assert ready.answer(dataclasses.replace(held, constraint=None)) is not None


def test_a_constraint_outlives_the_service_with_its_question(shared_engine, tmp_path):
    held = _question(6, 6)

    def journal():
        return Journal(tmp_path / "journal.db", durability="normal", fingerprint="tiny")

    with tiny_service.started(shared_engine, journal=journal()) as service:
        session = service.create(FROZEN)
        service.register(session, held)
        service.wait_until_idle(WAIT_S)
        answer = service.query(session, held).result(WAIT_S)
    with tiny_service.started(shared_engine, journal=journal()) as service:
        [query] = service.flash_queries(session)
        assert query.question == held
        service.wait_until_idle(WAIT_S)
        again = service.query(session, held).result(WAIT_S)
        assert again.source is Source.FLASH and again.token_ids == answer.token_ids


def test_questions_of_older_journals_have_none():
    held = _question()
    assert journal_rows.question_from_json(journal_rows.question_to_json(held)) == held
    free = dataclasses.replace(held, constraint=None)
    saved = json.loads(journal_rows.question_to_json(free))
    del saved["constraint"]
    assert journal_rows.question_from_json(json.dumps(saved)) == free


def test_equal_constraints_make_equal_questions():
    assert _question().key == _question().key
    keys = {_question(constraint=one).key for one in (
        None, FINITE, Constraint(regex="a"), Constraint(grammar="a"), Constraint(json_schema="a"),
    )}  # fmt: skip
    assert len(keys) == 5


def test_a_text_that_nothing_can_follow_ends_with_its_last_token(engine):
    session = engine.create(FROZEN)
    for end_ids in ((), (EOS,)):
        answer = engine.query(
            session, _ids(1), max_new_tokens=20, constraint=Constraint(regex="abc"), eos_ids=end_ids
        )
        assert (answer.text, answer.finish_reason) == ("abc", FinishReason.STOP)
    answer = engine.query(
        session, _ids(1), max_new_tokens=3, constraint=Constraint(regex="a{3}"), commit=True
    )
    assert answer.finish_reason is FinishReason.STOP  # not LENGTH: it is whole
    assert engine.session(session).token_ids == [*FROZEN, *_ids(1), *answer.token_ids]


def test_end_tokens_end_a_whole_text_whatever_they_stand_for(engine, model):
    session = engine.create(FROZEN)
    (b,) = model.tokenizer.encode("b", continues=True)
    for seed in range(12):
        answer = engine.query(
            session, _ids(seed), max_new_tokens=30, constraint=Constraint(regex="(aa)+b?"),
            eos_ids=[b], sampling=Sampling(temperature=2, seed=seed),
        )  # fmt: skip
        assert answer.token_ids[-1] == b and answer.finish_reason is FinishReason.EOS
        assert re.fullmatch("(aa)+", answer.text)
    with pytest.raises(InputError, match="^regex: .*eos_ids"):
        engine.query(
            session, _ids(1), max_new_tokens=9, constraint=Constraint(regex="abc"), eos_ids=[b]
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_token_ends_a_text_whose_every_beginning_is_banned(engine, model, temperature):
    session = engine.create(FROZEN)
    begins = [n for n in range(3, 260) if model.tokenizer.token_bytes(n)[:1] in (b"y", b"n")]
    banned = Sampling(logit_bias=dict.fromkeys(begins, -np.inf), temperature=temperature)
    with pytest.raises(InputError, match="^logit_bias: "):
        engine.query(
            session, _ids(1), max_new_tokens=4, constraint=Constraint(regex="yes|no"), eos_ids=[0],
            sampling=banned,
        )  # fmt: skip


def test_a_character_that_is_cut_at_the_last_token_is_left_out(engine):
    session = engine.create(FROZEN)
    answer = engine.query(
        session, _ids(1), max_new_tokens=3, constraint=Constraint(regex="ééé"), eos_ids=[EOS]
    )
    assert (answer.text, answer.finish_reason) == ("é", FinishReason.LENGTH)


def test_sampling_and_log_probabilities_are_of_the_tokens_that_are_allowed(engine, dense, model):
    session = engine.create(FROZEN)
    asked = _question(3, 4, Constraint(regex="[a-d]{4}"))
    letters = [model.tokenizer.encode(one, continues=True)[0] for one in "abcd"]
    [first, *_] = _ask(engine, session, asked, top_logprobs=20).tokens
    logits = dense.logits([*FROZEN, *asked.token_ids])[-1].astype(np.float64)
    expected = logits[letters] - np.log(np.exp(logits[letters]).sum())
    assert first.top_logprobs == pytest.approx(
        dict(zip(letters, expected.tolist(), strict=True)), abs=1e-3
    )
    drawn = np.zeros(4)
    stream = Constraint(regex="[a-d]")
    for seed in range(150):
        answer = engine.query(
            session, asked.token_ids, max_new_tokens=1, constraint=stream,
            sampling=Sampling(temperature=1.0, seed=seed),
        )  # fmt: skip
        drawn[letters.index(answer.token_ids[0])] += 1
    spread = np.sqrt(np.exp(expected) * (1 - np.exp(expected)) / drawn.sum())
    assert (np.abs(drawn / drawn.sum() - np.exp(expected)) < 4 * spread).all()
    second = letters[int(np.argsort(expected)[-2])]
    biased = Sampling(logit_bias={second: 20.0})
    answer = engine.query(
        session, asked.token_ids, max_new_tokens=4, constraint=asked.constraint, sampling=biased
    )
    assert answer.token_ids == (second,) * 4
    with pytest.raises(InputError, match="^logit_bias: "):
        banned = Sampling(logit_bias=dict.fromkeys(letters, -np.inf))
        engine.query(session, asked.token_ids, max_new_tokens=4, constraint=stream, sampling=banned)


def test_callers_compile_constraints_and_no_step_waits_for_it(service, monkeypatch):
    threads, start = [], Constraints.start

    def note(self, grammar):
        threads.append(threading.get_ident())
        return start(self, grammar)

    monkeypatch.setattr(Constraints, "start", note)
    session = service.create(FROZEN)
    held = [_question(1, 4, Constraint(regex=f"[a-z]{{{n}}}b?")) for n in range(21, 25)]
    service.query(session, held[0]).result(WAIT_S)
    service.query(session, held[1], commit=True).result(WAIT_S)
    service.generate(_ids(1), max_new_tokens=3, constraint=held[2].constraint).result(WAIT_S)
    service.register(session, held[3])
    service.wait_until_idle(WAIT_S)
    assert threads == [threading.get_ident()] * 4


def test_a_registered_constraint_is_compiled_by_its_caller_and_when_the_service_starts(
    shared_engine, tmp_path, monkeypatch
):
    workers, start = [], Constraints.start

    def note(self, grammar):
        workers.append(threading.current_thread() is not threading.main_thread())
        return start(self, grammar)

    monkeypatch.setattr(Constraints, "start", note)
    kept = shared_engine.verbs._tokenizer.constraints
    monkeypatch.setattr(kept, "compiled", kept._compile)  # others push out what was compiled

    def journal():
        return Journal(tmp_path / "journal.db", durability="normal", fingerprint="tiny")

    for restarted in (False, True):
        with tiny_service.started(shared_engine, journal=journal()) as service:
            if not restarted:
                session = service.create(FROZEN)
                for n in range(2, 5):
                    service.register(session, _question(1, 2, Constraint(regex=f"[a-z]{{{n}}}")))
            for _ in range(2):
                service.append(session, _ids(2, 3)).result(WAIT_S)
                service.wait_until_idle(WAIT_S)
            queries = service.flash_queries(session)
            assert [query.answer.version for query in queries] == [service.version(session)] * 3
            service.snapshot(session, tmp_path / f"saved{restarted}", fingerprint="tiny")
            service.restore(
                tmp_path / f"saved{restarted}", fingerprint="tiny", session_id=f"r{restarted}"
            )
            service.wait_until_idle(WAIT_S)
            service.close_session(f"r{restarted}")
    assert workers == [False] * 12


def test_nothing_is_compiled_for_a_constraint(service):
    session = service.create(FROZEN)
    for seed in range(3):
        temperature = 0.7 * seed
        asked = _question(seed, sampling=Sampling(temperature=temperature, seed=seed))
        service.query(session, asked, top_logprobs=2).result(WAIT_S)
    service.wait_until_idle(WAIT_S)
    assert service.metrics.compilations == 0


WRONG = {
    "json": (dict(json_schema="{"), "json_schema: expected a schema in JSON"),
    "schema": (dict(json_schema='{"type": 3}'), "json_schema: "),
    "keyword": (dict(json_schema='{"uniqueItems": true}'), "json_schema: .*uniqueItems"),
    "regex": (dict(regex="(a"), "regex: .*unclosed group"),
    "look-around": (dict(regex="(?!a)b"), "regex: .*look-around"),
    "grammar": (dict(grammar="start: foo"), 'grammar: .*unknown name: "foo"'),
    "control token": (dict(grammar="start: <|im_start|>"), "grammar: .*unknown special token"),
    "nothing": (dict(regex="a{0}"), "regex: .*allows none"),
}


@pytest.mark.parametrize("given, words", WRONG.values(), ids=WRONG)
def test_what_cannot_be_kept_is_refused_when_it_is_asked(service, given, words):
    session = service.create(FROZEN)
    held = _question(1, 4, Constraint(**given))
    for ask in (
        lambda: service.query(session, held),
        lambda: service.query(session, held, commit=True),
        lambda: service.register(session, held),
        lambda: service.generate(held.token_ids, max_new_tokens=4, constraint=held.constraint),
        lambda: service._engine.verbs.stream(
            session, held.token_ids, max_new_tokens=4, constraint=held.constraint
        ),
    ):
        with pytest.raises(InputError, match=f"^{words}") as caught:
            ask()
        assert "\n" not in str(caught.value)
    assert not service.flash_queries(session)


@pytest.mark.parametrize(
    "given, words",
    [
        ({}, "^constraint: .*got none"),
        (dict(regex="a", grammar="b"), "^constraint: .*got regex, grammar"),
        (dict(regex=""), "^regex: expected text of 1 to"),
        (dict(json_schema={"type": "null"}), "^json_schema: expected text .*got dict"),
        (dict(grammar="x" * (LONGEST + 1)), "^grammar: expected text of 1 to"),
    ],
)
def test_a_constraint_is_one_text(given, words):
    with pytest.raises(InputError, match=words):
        Constraint(**given)


def test_choices_have_no_constraint():
    with pytest.raises(InputError, match="^regex: expected none with choices"):
        Question(token_ids=(1,), choices=((1,), (2,)), constraint=FINITE)


def test_without_a_tokenizer_constraints_are_refused():
    with pytest.raises(InputError, match="^regex: .*no tokenizer"):
        constraint_module.compiled(FINITE, None)


def test_stop_strings_end_a_constrained_answer(engine):
    session = engine.create(FROZEN)
    for seed in range(8):
        asked = _question(seed, 20, sampling=Sampling(temperature=1, seed=seed))
        whole = _ask(engine, session, asked)
        stop = whole.text[-2:]
        cut = _ask(engine, session, asked, stop=[stop])
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason is FinishReason.STOP


def test_who_gives_up_leaves_nothing_behind(service):
    session = service.create(FROZEN)
    held = service._engine.cells_held
    pending = service.query(session, _question(2, 80, Constraint(regex="[a-z]{80}")))
    next(iter(pending))
    pending.cancel()
    with pytest.raises(CancelledError):
        pending.result(WAIT_S)
    service.wait_until_idle(WAIT_S)
    assert service._engine.cells_held == held


def test_what_becomes_too_complex_on_the_way_fails_and_leaves_nothing_behind(engine):
    session = engine.create(FROZEN)
    before = tiny_engine.state_of(engine)
    complex_ = Constraint(regex="((a{1,500}){1,500}){1,500}")
    with pytest.raises(InputError, match="^regex: "):
        engine.query(session, _ids(1), max_new_tokens=60, constraint=complex_)
    assert tiny_engine.state_of(engine) == before


def test_prompts_without_a_session_are_answered_likewise(service, shared_engine):
    session = service.create(_ids(1, 20))
    asked = _question(2)
    within = service.query(session, asked).result(WAIT_S)
    apart = service.generate(
        [*_ids(1, 20), *asked.token_ids], max_new_tokens=asked.max_new_tokens,
        constraint=asked.constraint, eos_ids=asked.eos_ids,
    ).result(WAIT_S)  # fmt: skip
    assert apart.token_ids == within.token_ids and apart.text == within.text


def test_a_space_that_a_constraint_wants_is_shown(tmp_path):
    path = tmp_path / "llama2.gguf"
    model_files.write_gguf(path, plain_sentencepiece.metadata(), {})
    tokenizer = models.Tokenizer.from_gguf(path)
    (blank_a,) = tokenizer.encode("a")
    assert models.Detokenizer(tokenizer, context=[1], skip_special=True).push(blank_a) == "a"
    shown = models.Detokenizer(tokenizer, context=[1], skip_special=True, continues=True)
    assert shown.push(blank_a) == " a"
