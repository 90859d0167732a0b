"""What the live page shows, as an object for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxstate.flash import FlashQuery
from jaxstate.plan import JobClass
from jaxstate.serving.description import Overview, SessionInfo

_LONGEST = 400  # characters of a question or answer

Text = Callable[[Sequence[int]], str]
"""Decodes tokens; "" where there is no tokenizer."""


def state(overview: Overview, text: Text, tenant: str | None) -> dict[str, Any]:
    """Say how a service stands.

    Args:
      tenant: whose sessions are shown, and then nothing that others have a part in, such as what
        is free; None = everybody's.
    """
    found: dict[str, Any] = {
        "tenant": tenant,
        "sessions": [
            _session(overview, info, queries, text)
            for info, queries in overview.sessions
            if tenant is None or info.tenant == tenant
        ],
    }
    if tenant is None:
        cells = overview.cells
        found["cells"] = {
            "sessions": cells.sessions, "prefixes": cells.prefixes, "tails": cells.tails,
            "free": cells.free, "host": cells.host, "disk": cells.disk,
            "copies": cells.copies,
        }  # fmt: skip
        found["running"] = overview.running[JobClass.QUERY]
        found["waiting"] = overview.waiting[JobClass.QUERY]
    return found


def _session(
    overview: Overview, info: SessionInfo, queries: Sequence[FlashQuery], text: Text
) -> dict[str, Any]:
    return {
        "id": info.session_id,
        "tenant": info.tenant,
        "version": info.version,
        "context_tokens": info.context_len,
        "prefix_tokens": info.frozen_len,
        "evicted_tokens": info.evicted,
        "slides": info.when_full == "slide",
        "rebuilt": info.rebuilt,
        "lag_tokens": info.lag_tokens,
        "lag_s": round(info.lag_s, 3),
        "questions": [_question(overview.now, info.version, query, text) for query in queries],
    }


def _question(now: float, version: int, query: FlashQuery, text: Text) -> dict[str, Any]:
    answer, question = query.answer, query.question
    found: dict[str, Any] = {
        "id": query.flash_id,
        "question": _shown(question.token_ids, text),
        "choices": [_shown(choice, text) for choice in question.choices],
        "evaluations": query.evaluations,
        "hits": query.hits,
        "stale_hits": query.stale_hits,
        "gate_fires": query.fires,
        "risk": query.risk,
        "error": str(query.error or ""),
        "answer": None,
    }
    if answer is not None:
        found["answer"] = {
            "text": _shown(answer.token_ids, text),
            "source": answer.source.value,
            "version": answer.version,
            "behind": version - answer.version,
            "age_s": round(now - query.answered_at, 3),
            "certainty": round(answer.certainty, 2),
        }
    return found


def _shown(token_ids: Sequence[int], text: Text) -> str:
    """Return tokens as text, or their ids; the middle of what is long is left out."""
    shown = text(token_ids) or "tokens " + " ".join(map(str, token_ids))
    if len(shown) <= _LONGEST:
        return shown
    return f"{shown[: _LONGEST // 2]} … {shown[-_LONGEST // 2 :]}"
