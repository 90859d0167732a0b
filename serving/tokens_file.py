"""The file that says who may use a server: a tenant a line, in JSON, with a token's hash.

    {"tenant": "acme", "token_sha256": "9f86…", "max_sessions": 100, "max_cells": 200000}
    {"tenant": "desk", "certificates": ["desk.example.org"], "requests_per_s": 50}
    # a comment

Keys: tenant; token_sha256 and certificates (names in client certificates), at least one of them,
with both a call needs both; the quotas of `Quota`. The hash is plain SHA-256: a token is 256 random
bits, which nobody can try through, so the slow hashes that passwords need would only cost time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import secrets
from collections.abc import Iterator
from typing import Any

from jaxstate.serving import tenants
from jaxstate.serving.quotas import Quota

_QUOTAS = tuple(field.name for field in dataclasses.fields(Quota))
_KEYS = ("tenant", "token_sha256", "certificates", *_QUOTAS)
_NAMED = "a name of at most 64 letters, digits, and . _ - that begins with a letter or digit"
_PREFIX = "jst_"  # by which those who look for leaked secrets know what it is


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A tenant.

    Attributes:
      tenant: its name.
      token_sha256: of its token, in lower-case hex; "" = it has none.
      certificates: names, one of which its client certificate must have.
      quota: see Quota.
    """

    tenant: str
    token_sha256: str
    certificates: tuple[str, ...]
    quota: Quota

    @property
    def unique(self) -> list[tuple[str, str]]:
        """What no other tenant has, each with its kind."""
        tokens = [("token", self.token_sha256)] if self.token_sha256 else []
        named = [("certificate", name) for name in self.certificates]
        return [("tenant", self.tenant), *tokens, *named]


def digest(token: str) -> str:
    """Return what the file has of a token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def read(path: pathlib.Path) -> tuple[Entry, ...]:
    """Read all tenants.

    Raises:
      ValueError: a line is wrong; the message says which, what was expected, and what there is.
      OSError: the file cannot be read.
    """
    return tuple(entry for _, entry in _parsed(path, _lines(path)))


def issue(path: pathlib.Path, tenant: str, *, replace: bool) -> str:
    """Make a token for a tenant and put its hash into the file, which need not exist.

    Args:
      replace: exchange the token of a tenant that is there; what else its line says stays.
    Returns:
      the token, which is kept nowhere.
    Raises:
      ValueError: the file is wrong, or the name, or the tenant is there and is not to be replaced.
      OSError: the file cannot be written.
    """
    if not re.fullmatch(tenants.NAME, tenant):
        raise ValueError(f"tenant: expected {_NAMED}, got {tenant!r}")
    token = f"{_PREFIX}{secrets.token_urlsafe(32)}"
    with _replacing(path) as lines:
        index = _index(path, lines, tenant)
        if index is None:
            index = len(lines)
            lines.append(json.dumps({"tenant": tenant}))
        elif not replace:
            raise ValueError(
                f"{path}, line {index + 1}: tenant {tenant} is there already; --replace gives it "
                "another token, which ends the one it has"
            )
        lines[index] = json.dumps(json.loads(lines[index]) | {"token_sha256": digest(token)})
    return token


def remove(path: pathlib.Path, tenant: str) -> None:
    """Take a tenant out of the file; its sessions stay where they are.

    Raises:
      ValueError: the file is wrong, or has no such tenant.
      OSError: the file cannot be read or written.
    """
    with _replacing(path) as lines:
        index = _index(path, lines, tenant)
        if index is None:
            raise ValueError(f"{path}: expected a line of tenant {tenant}, got none; nothing to do")
        del lines[index]


def _lines(path: pathlib.Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected text in UTF-8, got something else") from None
    return text.removesuffix("\n").split("\n") if text else []


def _index(path: pathlib.Path, lines: list[str], tenant: str) -> int | None:
    return next((i for i, entry in _parsed(path, lines) if entry.tenant == tenant), None)


def _parsed(path: pathlib.Path, lines: list[str]) -> list[tuple[int, Entry]]:
    """Return the entries, each with the index of its line."""
    found: list[tuple[int, Entry]] = []
    taken: dict[tuple[str, str], int] = {}  # where names and credentials are
    for index, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            entry = _entry(line)
            for one in entry.unique:
                if taken.setdefault(one, index) != index:
                    raise ValueError(
                        f"expected every {one[0]} once, got that of line {taken[one] + 1} again; "
                        "remove one of the two"
                    )
        except ValueError as error:
            raise ValueError(f"{path}, line {index + 1}: {error}") from None
        found.append((index, entry))
    return found


def _entry(line: str) -> Entry:
    """Read a line; ValueError if it is wrong."""
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ValueError(f"expected a JSON object, got something else ({error})") from None
    if not isinstance(given, dict):
        raise ValueError(f"expected a JSON object, got {type(given).__name__}")
    for key in given:
        _expect(key in _KEYS, "key", f"one of {', '.join(_KEYS)}", key)
    tenant, token = given.get("tenant"), given.get("token_sha256", "")
    certificates = given.get("certificates", [])
    _expect(
        isinstance(tenant, str) and re.fullmatch(tenants.NAME, tenant), "tenant", _NAMED, tenant
    )
    _expect(
        isinstance(token, str) and re.fullmatch(r"([0-9a-f]{64})?", token), "token_sha256",
        "64 lower-case hex digits, as `jaxstate token` writes them", "something else",
    )  # fmt: skip
    _expect(
        isinstance(certificates, list)
        and all(isinstance(name, str) and name for name in certificates),
        "certificates", "a list of names", certificates,
    )  # fmt: skip
    _expect(token or certificates, "tenant", "token_sha256 or certificates with it", "neither")
    for name in _QUOTAS:
        number = given.get(name, 1)
        if name == "requests_per_s":
            fits = isinstance(number, int | float) and 0 < number < math.inf
        else:
            fits = isinstance(number, int) and number >= 1
        _expect(fits and number is not True, name, "a number above 0", number)
    return Entry(
        tenant=tenant, token_sha256=token, certificates=tuple(dict.fromkeys(certificates)),
        quota=Quota(**{name: given[name] for name in _QUOTAS if name in given}),
    )  # fmt: skip


def _expect(fits: Any, key: str, expected: str, got: Any) -> None:
    if not fits:
        raise ValueError(f"{key}: expected {expected}, got {json.dumps(got)}")


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[list[str]]:
    """Lend a file's lines; if nothing is raised meanwhile, they take its place all at once.

    Readable by its owner alone. The new file is also what keeps two writers apart.
    """
    path = path.resolve()
    new = path.with_name(f"{path.name}.new")
    try:
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(
            f"{new} is there: somebody changes the file; if nobody does, remove it"
        ) from None
    try:
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            lines: list[str] = []
            if path.exists():
                lines, owner = _lines(path), path.stat()
                os.fchown(file, owner.st_uid, owner.st_gid)
            yield lines
            stream.writelines(f"{line}\n" for line in lines)
            stream.flush()
            os.fsync(file)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
