"""`jaxstate ask --server`: one question to a server, of a session or without one."""

from __future__ import annotations

import dataclasses
import json
import time

from rich.console import Console

from jaxstate.sampling import Sampling
from jaxstate.serving import terminal
from jaxstate.serving.client import Client
from jaxstate.serving.client_requests import Prompt, Wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteQuestion:
    """What `ask` was told on the command line.

    Attributes:
      session: id of the one that is asked; None = none, the prompt is all there is.
      prompt, raw, max_new_tokens, sampling, stop: see ask.Question; a session is asked with the
        prompt as a user's message, unless it is raw.
    """

    session: str | None
    prompt: str
    raw: bool
    max_new_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]


def run(
    question: RemoteQuestion, client: Client, *, as_json: bool, out: Console, log: Console
) -> None:
    """Answer on `out`: streamed text, or one JSON object at the end.

    Raises:
      JaxStateError: the message says what is wrong.
    """
    prompt: Prompt = question.prompt
    if not question.raw:
        prompt = [{"role": "user", "content": question.prompt}]
    how = Wanted(max_new_tokens=question.max_new_tokens, sampling=question.sampling)
    began = time.perf_counter()
    if question.session is None:
        stream = client.generate(prompt, stop=question.stop, **how)
    else:
        stream = client.session(question.session).query(prompt, stop=question.stop, **how)
    first_ms = None
    for token in stream:
        first_ms = first_ms or (time.perf_counter() - began) * 1e3
        if not as_json:
            out.file.write(token.text)
            out.file.flush()
    total_ms = (time.perf_counter() - began) * 1e3
    answer = stream.answer
    if not as_json:
        # An answer that was there already comes as a whole.
        out.file.write("\n" if answer.tokens else f"{answer.text}\n")
    else:
        found = {
            "session": question.session, "ids": list(answer.token_ids), "text": answer.text,
            "finish_reason": answer.finish_reason.value, "source": answer.source.value,
            "version": answer.version, "age": answer.age,
            "usage": dataclasses.asdict(answer.usage),
            "timings": {
                "first_token_ms": round(first_ms or total_ms, 3), "total_ms": round(total_ms, 3)
            },
        }  # fmt: skip
        out.file.write(json.dumps(found, ensure_ascii=False) + "\n")
    out.file.flush()
    usage = answer.usage
    terminal.say(
        log,
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them computed before; "
        f"{usage.answer_tokens} tokens after {total_ms:.0f} ms, {answer.source.value}, ended by "
        f"{answer.finish_reason.value}",
    )
