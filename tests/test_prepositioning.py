"""Which beginnings of questions are worth paying for, and what they lead to."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxstate.answer import FinishReason, Source
from jaxstate.flash import Question
from jaxstate.prepositioning import Entry, Prepositions, Ready
from jaxstate.sampling import Sampling
from jaxstate.session import PaidTail
from jaxstate.tail import NextToken

TEMPLATE = (9, 8, 7, 6, 5)


def _next(row):
    row = np.asarray(row, np.float32)
    top = np.sort(row)[::-1]
    return NextToken(
        top_id=int(row.argmax()), gap=float(top[0] - top[1]), lse=0.0,
        row_logits=lambda: jnp.asarray(row),
    )  # fmt: skip


def _ready(row, token_ids=()):
    return Ready(version=3, context_len=20, next_token=_next(row), token_ids=token_ids)


def _tokens(prepositions):
    return [entry.token_ids for entry in prepositions.entries()]


def test_what_different_questions_have_in_common_is_paid_for():
    found = Prepositions(4)
    found.receive((*TEMPLATE, 1, 2))
    assert _tokens(found) == []
    found.receive((*TEMPLATE, 3))
    assert _tokens(found) == [TEMPLATE]


def test_a_question_that_comes_again_is_paid_for_as_a_whole():
    found = Prepositions(4)
    for _ in range(2):
        found.receive((*TEMPLATE, 1, 2))
    found.receive((*TEMPLATE, 3))
    # The template is the beginning of what is paid for already, whichever comes first.
    assert (*TEMPLATE, 1, 2) in _tokens(found)


def test_short_beginnings_and_more_than_the_most_are_left_out():
    found = Prepositions(2)
    found.receive((1, 2, 3, 4))
    found.receive((1, 2, 3, 5))
    assert _tokens(found) == []
    for first in range(10, 14):
        for _ in range(2):
            found.receive((first, *TEMPLATE))
    assert _tokens(found) == [(13, *TEMPLATE), (12, *TEMPLATE)]
    none = Prepositions(0)
    none.receive(TEMPLATE)
    none.receive(TEMPLATE)
    assert _tokens(none) == []


def test_entries_are_outdated_after_a_change_or_until_they_are_noted():
    found = Prepositions(4)
    header = Entry(token_ids=TEMPLATE, max_new_tokens=2)
    found.declare(header)
    assert found.outdated(3) == [header]
    tail = PaidTail(
        token_ids=(*TEMPLATE, 2, 1), entries=(), along=(_next([0, 1, 4]), _next([3, 1, 0]))
    )
    tail = PaidTail(token_ids=(*TEMPLATE, 2), entries=(), along=tail.along)
    found.note(header, 3, 20, tail)
    assert found.outdated(3) == [] and found.outdated(4) == [header]
    ready = found.ready[TEMPLATE]
    assert (ready.token_ids, ready.next_token.top_id, ready.version) == ((2,), 2, 3)
    found.fail(header, 4)
    assert found.outdated(4) == [] and found.outdated(5) == [header]


def test_a_ready_state_answers_choices_by_their_first_tokens():
    ready = _ready([0.0, 2.0, 5.0, 3.5])
    answer = ready.answer(Question(token_ids=(1,), choices=((1, 7), (3,))))
    assert answer is not None and answer.source is Source.GATED
    assert (answer.choice, answer.token_ids, answer.finish_reason) == (1, (3,), FinishReason.CHOICE)
    assert answer.certainty == 1.5
    assert ready.answer(Question(token_ids=(1,), choices=((1, 7), (1, 6)))) is None


def test_a_ready_state_answers_freely_as_far_as_it_was_decoded():
    ready = _ready([0.0, 2.0, 5.0], token_ids=(2, 1, 0))
    answer = ready.answer(Question(token_ids=(1,), max_new_tokens=2))
    assert answer is not None and answer.token_ids == (2, 1)
    assert ready.answer(Question(token_ids=(1,), max_new_tokens=4)) is None
    ended = ready.answer(Question(token_ids=(1,), max_new_tokens=4, eos_ids=(1,)))
    assert ended is not None
    assert (ended.token_ids, ended.finish_reason) == ((2, 1), FinishReason.EOS)
    drawn = Question(token_ids=(1,), max_new_tokens=2, sampling=Sampling(temperature=1.0, seed=1))
    assert ready.answer(drawn) is None
