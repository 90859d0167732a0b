"""Sessions beside each other on the device's kernels, against each alone on plain XLA."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import device_model
import numpy as np
from common import Limit
from device_model import PAGE_SIZE
from device_run import Run
from device_sizes import SessionSizes

from jaxstate.answer import Answer
from jaxstate.config import EngineConfig
from jaxstate.engine import Engine
from jaxstate.flash import Question
from jaxstate.models.params import Params
from jaxstate.prepositioning import Entry
from jaxstate.serving.local_service import LocalService

WAIT_S = 300.0
_SESSIONS = 4
_NEAR_TIE = 2e-3  # logits between the first two, in 32-bit floats
_NONE = Limit(op="==", value=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """An answer, and all that its session ever held."""

    token_ids: Sequence[int]
    question: Question
    answer: Answer


def check(run: Run) -> None:
    """Compare answers of every source; nothing may stay behind, and nothing be compiled late."""
    sizes = run.sizes.sessions
    params = device_model.draw_params(sizes.small)
    engine = _engine(sizes, params, run.kernels)
    service = LocalService(engine, preposition=0)
    asked = _play(sizes, service)
    compilations = service.metrics.compilations
    service.close()
    for session in engine.session_ids:
        engine.close(session)
    alone = _engine(sizes, params, "xla")
    found = [_compare(alone, one) for one in asked]
    run.report.check(
        "sessions answers", found.count("different"), _NONE, unit="that differ from those alone",
        answers=len(found), near_ties=found.count("near-tie"), sessions=_SESSIONS,
        sources=dict(Counter(one.answer.source.value for one in asked)),
    )  # fmt: skip
    run.report.check("sessions left", engine.cells_held, _NONE, unit="cells, all sessions closed")
    # Without a number it does not hold: then nobody knows.
    count = float("nan") if compilations is None else compilations
    run.report.check("sessions compiled late", count, _NONE, unit="programs")


def _engine(sizes: SessionSizes, params: Params, implementation: Any) -> Engine:
    pages = _SESSIONS * 3 * -(-2 * sizes.small_context // PAGE_SIZE)
    config = EngineConfig(
        num_pages=pages, page_size=PAGE_SIZE, context_len=2 * sizes.small_context, evict_quantum=1,
        step_shapes=sizes.small_shapes, implementation=implementation,
        kernel_cache_dir=tempfile.gettempdir(),
    )  # fmt: skip
    return Engine(params, sizes.small, config)


def _play(sizes: SessionSizes, service: LocalService) -> list[Asked]:
    """Append to sessions, ask, register and pay ahead, side by side."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, sizes.small.vocab_size, count).tolist())

    held: dict[str, tuple[int, ...]] = {}
    for number in range(_SESSIONS):
        ids = draw(sizes.small_context * (number + 1) // _SESSIONS)
        held[service.create(ids)] = ids
    first, second, *_ = held
    registered = [Question(token_ids=draw(6), max_new_tokens=4) for _ in range(3)]
    for question in registered:
        service.register(first, question)
    under_way = []
    for number in range(2):
        appends = []
        for session in held:
            ids = draw(3 + 5 * number)
            appends.append(service.append(session, ids))
            held[session] += ids
        for session in held:
            free = Question(token_ids=draw(5 + number), max_new_tokens=4)
            among = Question(token_ids=draw(4), choices=(draw(2), draw(3), draw(1)))
            under_way += [(session, one, service.query(session, one)) for one in (free, among)]
        for pending in appends:
            pending.result(WAIT_S)
    service.wait_until_idle(WAIT_S)
    under_way += [(first, question, service.query(first, question)) for question in registered]
    paid = draw(7)
    service.advance(second, Entry(token_ids=paid, max_new_tokens=3)).result(WAIT_S)
    for ids in (paid, (*paid, *draw(2))):
        question = Question(token_ids=ids, max_new_tokens=4)
        under_way.append((second, question, service.query(second, question)))
    return [
        Asked(token_ids=held[session], question=question, answer=pending.result(WAIT_S))
        for session, question, pending in under_way
    ]


def _compare(engine: Engine, one: Asked) -> str:
    """Ask again behind the tokens that the answer saw: "equal", "near-tie" or "different"."""
    session = engine.create(one.token_ids[: one.answer.context_len])
    question, answer = one.question, one.answer
    if question.choices:
        again = engine.choose(session, question.token_ids, question.choices)
        equal, sure = answer.choice == again.choice, again.certainty > _NEAR_TIE
    else:
        count = question.max_new_tokens
        again = engine.query(session, question.token_ids, max_new_tokens=count, top_logprobs=2)
        certain = _certain_len(again)
        equal = answer.token_ids[:certain] == again.token_ids[:certain]
        sure = certain == count
    engine.close(session)
    if not equal and (sure or not question.choices):
        return "different"
    return "equal" if sure else "near-tie"


def _certain_len(answer: Answer) -> int:
    """Tokens before the first that another was about as likely as."""
    for index, token in enumerate(answer.tokens):
        first, second = sorted((token.top_logprobs or {}).values(), reverse=True)
        if first - second < _NEAR_TIE:
            return index
    return len(answer.tokens)
