"""Names of sessions: what a tenant calls them, and what the engine, journal and metrics do.

The engine knows "acme/feed" where tenant acme says "feed". Tenants' names have no slash, so no two
of them ever come to the same name, whatever clients send. Without authentication there is one
tenant, "", whose names are the engine's; one with a slash in it would be another's.
"""

from __future__ import annotations

import re
import secrets

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What a tenant may be called; fit for a file's name."""


def qualified(tenant: str, name: str) -> str | None:
    """Return what the engine calls something of a tenant's; None = the tenant can have no such."""
    if tenant:
        return f"{tenant}/{name}"
    return None if "/" in name else name


def fresh(tenant: str) -> str | None:
    """Return an engine's name for a new session; None = the engine chooses.

    Chosen by chance where there are other tenants: a number would say how many sessions they open.
    """
    return qualified(tenant, f"s-{secrets.token_hex(8)}") if tenant else None


def unqualified(tenant: str, name: str) -> str | None:
    """Return what a tenant calls something of the engine's; None = it is not the tenant's."""
    if not tenant:
        return None if "/" in name else name
    return name[len(tenant) + 1 :] if name.startswith(f"{tenant}/") else None


def shown(tenant: str, text: str) -> str:
    """Return a message of the engine's with the names that the tenant knows."""
    text = re.sub(r"\bsession new \d+", "a new session", text)  # how many others asked for
    return text.replace(f"session {tenant}/", "session ") if tenant else text
