"""What a service remembers of a session's appends and answers, and for how long."""

from __future__ import annotations

import pytest

from jaxstate.answer import Answer, FinishReason, Source
from jaxstate.errors import CursorError, InputError
from jaxstate.flash import FlashQuery, Question
from jaxstate.plan import JobClass
from jaxstate.scheduler import State, Ticket
from jaxstate.serving import answer_log, write_memory
from jaxstate.serving.answer_log import AnswerLog
from jaxstate.serving.write_memory import WriteMemory, digest


def _ticket(state=State.DONE):
    return Ticket(
        job_id=0, job_class=JobClass.APPEND, session="s", deadline=0, submitted=0, state=state
    )  # fmt: skip


def _answer(version):
    return Answer(
        token_ids=(1,), text="", finish_reason=FinishReason.LENGTH, source=Source.COMPUTED,
        version=version, context_len=1, tokens_forwarded=1, gap=0.0,
    )  # fmt: skip


QUERY = FlashQuery(flash_id=1, question=Question(token_ids=(1, 2)))


@pytest.mark.parametrize(
    "state, known",
    [
        (State.WAITING, True),
        (State.RUNNING, True),
        (State.DONE, True),
        (State.FAILED, False),
        (State.EXPIRED, False),
        (State.CANCELLED, False),
    ],
)
def test_a_verb_is_tried_again_only_if_it_was_not_applied(state, known):
    memory, ticket = WriteMemory(), _ticket(state)
    memory.note(("feed", 1), digest("append", [1, 2]), ticket)
    assert memory.find(("feed", 1), digest("append", [1, 2])) is (ticket if known else None)
    for new in (("feed", 2), ("other", 1)):
        assert memory.find(new, digest("append", [1, 2])) is None


def test_a_number_that_was_forgotten_is_refused_and_not_applied_again():
    memory = WriteMemory()
    for number in range(1, write_memory.REMEMBERED + 2):
        memory.note(("feed", number), digest("append", [number]), _ticket())
    assert memory.find(("feed", 2), digest("append", [2])) is not None
    with pytest.raises(InputError, match="expected more than 1025"):
        memory.find(("feed", 1), digest("append", [1]))
    with pytest.raises(InputError, match="got something else"):
        memory.find(("feed", 2), digest("append", [3]))
    with pytest.raises(InputError, match="got something else"):
        memory.find(("feed", 2), digest("update", [2]))
    for number in (0, write_memory.HIGHEST + 1):
        with pytest.raises(InputError, match=f"1 to 9223372036854775807, got {number}"):
            memory.find(("feed", number), digest("append", [1]))


def test_a_cursor_is_followed_by_all_that_came_behind_it():
    log = AnswerLog()
    cursors = [log.cursor]
    for version in range(5):
        log.add(QUERY, _answer(version))
        cursors.append(log.cursor)
    for index, cursor in enumerate(cursors):
        assert [one.answer.version for one in log.since(cursor)] == list(range(index, 5))
    assert [one.cursor for one in log.since(cursors[0])] == cursors[1:]


def test_a_cursor_behind_which_something_is_lost_is_refused():
    log = AnswerLog()
    first = log.cursor
    log.add(QUERY, _answer(0))
    second = log.cursor
    for version in range(1, answer_log.KEPT + 1):
        log.add(QUERY, _answer(version))
    assert len(log.since(second)) == answer_log.KEPT
    name = first.split(".")[0]
    for cursor in (first, AnswerLog().cursor, f"{name}.9999999", f"{name}.-1", f"{name}.², ", ""):
        with pytest.raises(CursorError, match="leave it out"):
            log.since(cursor)


def test_who_begins_gets_the_newest_answers_and_a_cursor_behind_all_of_them():
    log = AnswerLog()
    queries = [
        FlashQuery(flash_id=n, question=Question(token_ids=(n,)), answer=_answer(n) if n else None)
        for n in range(3)
    ]
    found = log.newest(queries)
    assert [one.flash_id for one in found] == [1, 2]
    assert [one.cursor for one in found] == ["", log.cursor]
