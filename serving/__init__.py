"""The server, its client, the command line: everything with a clock, a screen or users' files.

Names are imported when they are first used: a client needs no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxstate.serving.client import Client, Session
    from jaxstate.serving.client_aio import AsyncClient, AsyncSession
    from jaxstate.serving.client_channel import Tls

_HOMES = {
    "AsyncClient": "client_aio",
    "AsyncSession": "client_aio",
    "Client": "client",
    "Session": "client",
    "Tls": "client_channel",
}

__all__ = ["AsyncClient", "AsyncSession", "Client", "Session", "Tls"]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that has it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
