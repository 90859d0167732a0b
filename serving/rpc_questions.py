"""Calls that ask, and that pay ahead of questions."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sized

from jaxstate.errors import InputError
from jaxstate.flash import Question
from jaxstate.models.tokenizer import Tokenizer
from jaxstate.prepositioning import Entry
from jaxstate.serving import jaxstate_pb2 as pb
from jaxstate.serving import messages, prompts
from jaxstate.serving.pending import Pending
from jaxstate.serving.rpc_calls import LONG_TEXT, Call

MAX_CHOICES = 1024
"""Of a question."""
MAX_STOP = 64
"""Texts that end an answer."""


async def question(given: pb.Question, call: Call, *, begins: bool = False) -> Question:
    """Return what is asked; equal messages are equal questions.

    Args:
      begins: the prompt is a context of its own.
    Raises:
      InputError: more than anybody needs, or see prompts.ids, messages.sampling and
        messages.constraint.
    """
    vocab_size = call.service.model.vocab_size
    _check_count(given.choices, MAX_CHOICES, "question.choices")
    _check_count(given.eos_ids, vocab_size, "question.eos_ids")
    _check_count(given.sampling.logit_bias, vocab_size, "question.sampling.logit_bias")
    convert = functools.partial(_question, given, call.tokenizer, begins)
    return await call.run_text(convert) if given.ByteSize() > LONG_TEXT else convert()


def _question(given: pb.Question, tokenizer: Tokenizer | None, begins: bool) -> Question:
    eos_ids = set(given.eos_ids)
    if tokenizer is not None and not given.ignore_model_eos:
        eos_ids.update(tokenizer.eos_ids)
    choices = tuple(
        tuple(prompts.ids(choice, f"question.choices[{index}]", tokenizer))
        for index, choice in enumerate(given.choices)
    )
    return Question(
        token_ids=tuple(prompts.ids(given.prompt, "question.prompt", tokenizer, begins=begins)),
        max_new_tokens=1 if choices else given.max_new_tokens,
        choices=choices,
        eos_ids=tuple(sorted(eos_ids)),
        sampling=messages.sampling(given.sampling),
        constraint=messages.constraint(given),
    )


def _check_count(given: Sized, most: int, field: str) -> None:
    if len(given) > most:
        raise InputError(f"{field}: expected at most {most}, got {len(given)}; leave some out")


async def query(request: pb.QueryRequest, call: Call) -> AsyncIterator[pb.AnswerPart]:
    """Ask a session."""
    _check_count(request.stop, MAX_STOP, "stop")
    service, name = call.service, call.session_id(request.session_id)
    asked = await question(request.question, call)
    stale, entry = messages.stale(request.stale), messages.entry(request.entry)
    if request.min_version:
        await call.wait_for(lambda: service.version(name) >= request.min_version)
    if stale == "wait":
        await call.wait_for(lambda: not service.is_coming(name, asked))
        stale = "compute"
    pending = await call.begin(
        service.query, name, asked, stale=stale, entry=entry, commit=request.commit,
        risk=request.risk if request.HasField("risk") else None, stop=tuple(request.stop),
        top_logprobs=request.top_logprobs if request.HasField("top_logprobs") else None,
    )  # fmt: skip
    async for part in _answer(pending, len(asked.token_ids), call):
        yield part


async def generate(request: pb.GenerateRequest, call: Call) -> AsyncIterator[pb.AnswerPart]:
    """Answer a prompt without a session."""
    _check_count(request.stop, MAX_STOP, "stop")
    asked = await question(request.question, call, begins=True)
    if asked.choices:
        raise InputError("choices: expected none without a session; create one and query it")
    pending = await call.begin(
        call.service.generate, asked.token_ids, max_new_tokens=asked.max_new_tokens,
        tenant=call.tenant, sampling=asked.sampling, eos_ids=asked.eos_ids,
        stop=tuple(request.stop), constraint=asked.constraint,
        top_logprobs=request.top_logprobs if request.HasField("top_logprobs") else None,
    )  # fmt: skip
    async for part in _answer(pending, len(asked.token_ids), call):
        yield part


async def _answer(pending: Pending, prompt_len: int, call: Call) -> AsyncIterator[pb.AnswerPart]:
    """Yield the prompt, deltas and the answer; end the verb if the client goes away."""
    begun = False
    try:
        while True:
            is_over = pending.is_over
            tokens = pending.take()
            if tokens and not begun:
                begun = True
                yield _prompt(prompt_len, max(prompt_len - pending.tokens_to_first, 0))
            if tokens:
                yield messages.delta(tokens)
            elif not is_over:
                await call.change()
            if is_over:
                break
        answer = messages.answer(pending.result(0), prompt_len)
        if not begun:
            yield _prompt(prompt_len, answer.usage.cached_tokens)
        yield pb.AnswerPart(answer=answer)
    finally:
        call.cancel(pending)


def _prompt(prompt_len: int, cached: int) -> pb.AnswerPart:
    info = pb.PromptInfo(prompt_tokens=prompt_len, cached_tokens=cached)
    return pb.AnswerPart(prompt=info)


async def advance(request: pb.AdvanceRequest, call: Call) -> pb.AdvanceResponse:
    """Pay for a header once, in idle time."""
    pending = await call.begin(
        call.service.advance, call.session_id(request.session_id),
        await _header(request.header, call),
    )  # fmt: skip
    paid = await call.result(pending)
    ahead = paid.token_ids[paid.entry_len :]
    return pb.AdvanceResponse(token_ids=ahead, text=call.service.text(ahead), gap=paid.ready.gap)


async def declare(request: pb.DeclareRequest, call: Call) -> pb.DeclareResponse:
    """Have a header paid for in idle time, from now on."""
    header = await _header(request.header, call)
    await call.run(call.service.declare, call.session_id(request.session_id), header)
    return pb.DeclareResponse()


async def _header(given: pb.Header, call: Call) -> Entry:
    vocab_size = call.service.model.vocab_size
    _check_count(given.eos_ids, vocab_size, "header.eos_ids")
    _check_count(given.slot_ids, vocab_size, "header.slot_ids")
    return Entry(
        token_ids=tuple(await call.ids(given.prompt, "header.prompt")),
        max_new_tokens=given.max_new_tokens,
        min_gap=messages.number(given.min_gap, "header.min_gap"),
        eos_ids=tuple(given.eos_ids),
        slot_ids=tuple(given.slot_ids),
    )
