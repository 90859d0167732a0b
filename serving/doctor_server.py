"""`jaxstate doctor --server`: whether a server answers, and what it serves."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from jaxstate.errors import JaxStateError
from jaxstate.serving.client import Client
from jaxstate.serving.doctor import Finding


def examine(client: Client, address: str) -> Iterator[Finding]:
    """Look at one thing after another; stops where the next could only fail for the same reason."""
    try:
        serving = client.is_serving()
    except JaxStateError as error:
        yield Finding(check="server", verdict="failed", text=f"{address}: {error}")
        return
    if not serving:
        text = f"{address} is there, but serves nothing: it loads its model, or goes down"
        yield Finding(check="server", verdict="failed", text=text)
        return
    yield Finding(check="server", verdict="ok", text=f"{address} serves")
    try:
        info, stats = client.model_info(), client.stats()
    except JaxStateError as error:
        yield Finding(check="access", verdict="failed", text=str(error))
        return
    here = importlib.metadata.version("jaxstate")
    text = f"server {info.server_version}, this program {here}"
    if info.server_version == here:
        yield Finding(check="versions", verdict="ok", text=text)
    else:
        remedy = "what one of them does not know yet it refuses"
        yield Finding(check="versions", verdict="warning", text=f"{text}: {remedy}")
    text = (
        f"{info.name}: {info.family}, {info.num_layers} layers, vocabulary of {info.vocab_size}, "
        f"contexts of up to {info.context_tokens:,} tokens"
    )
    lacks = [] if info.has_tokenizer else ["tokenizer"]
    lacks += [] if info.has_chat_template else ["chat template"]
    verdict = "warning" if lacks else "ok"
    if lacks:
        text += f"; without {' and '.join(lacks)}"
    yield Finding(check="model", verdict=verdict, text=text)
    text = f"{stats.sessions:,} sessions, {stats.cells_held:,} of {stats.cells:,} cells held"
    yield Finding(check="load", verdict="ok", text=text)
