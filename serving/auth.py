"""Who calls: from a bearer token, a client certificate, or both, to a tenant.

access = Access(pathlib.Path("tokens"))              # see tokens_file
access.tenant_of(metadata, names_in_certificate)     # "acme", or raises
with access.under_way("acme"): …                     # a call, within its quotas

The file is looked at with every call and read again when it has changed: a new token works at once,
one that was replaced or removed does not any more, and long streams end. If it is gone or wrong
then, the last good one stands and the log says why.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import pathlib
from collections.abc import Iterable, Sequence

from jaxstate.errors import DeniedError, UnauthenticatedError
from jaxstate.serving import tokens_file
from jaxstate.serving.quotas import Quota, Requests
from jaxstate.serving.tokens_file import Entry

logger = logging.getLogger(__name__)

_HEADER = "authorization"


class Access:
    """Tenants of a server, as its tokens file has them."""

    def __init__(self, path: pathlib.Path):
        """Read the file.

        Raises:
          ValueError, OSError: see tokens_file.read.
        """
        self._path = path
        self._state = self._stat()
        self._use(tokens_file.read(path))
        self.requests = Requests(self.quota)

    @property
    def tenants(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self._entries)

    @property
    def asks_for_certificates(self) -> bool:
        """Whether some tenant needs a client certificate."""
        return any(entry.certificates for entry in self._entries.values())

    def quota(self, tenant: str) -> Quota:
        """Return what a tenant may have now; one that was removed may have nothing new anyway."""
        entry = self._entries.get(tenant)
        return entry.quota if entry else Quota()

    def under_way(self, tenant: str) -> contextlib.AbstractContextManager[None]:
        """Count a call, see Requests.under_way."""
        return self.requests.under_way(tenant)

    def tenant_of(
        self, metadata: Iterable[tuple[str, str | bytes]], certificate: Iterable[bytes]
    ) -> str:
        """Return who calls.

        Args:
          metadata: of the call.
          certificate: names in the client's certificate, which somebody has verified: its subject
            alternative names, or the common name if it has none.
        Raises:
          UnauthenticatedError: nobody, or nobody any more.
          DeniedError: somebody, but no tenant, or not with this certificate.
        """
        self._refresh()
        token = _token(metadata)
        names = {name.decode(errors="replace") for name in certificate}
        if token is None:
            return self._by_certificate(names)
        entry = self._by_token(token)
        if entry.certificates and not names.intersection(entry.certificates):
            raise DeniedError(
                f"{_HEADER}: the token is that of tenant {entry.tenant}, which also needs one of "
                "its client certificates; connect with one"
            )
        return entry.tenant

    def _by_token(self, token: str) -> Entry:
        given, found = tokens_file.digest(token), None
        for entry in self._entries.values():  # all of them, so that time tells nothing
            if hmac.compare_digest(entry.token_sha256, given):
                found = entry
        if found is None:
            raise UnauthenticatedError(
                f"{_HEADER}: expected a token of this server, got one that is unknown or was "
                "revoked; ask its operator for another"
            )
        return found

    def _by_certificate(self, names: set[str]) -> str:
        found = [one for one in self._entries.values() if names.intersection(one.certificates)]
        if any(one.token_sha256 for one in found) or not names:
            raise UnauthenticatedError(
                f'{_HEADER}: expected "Bearer TOKEN" in the metadata, got none; send the token '
                "that the server's operator gave you"
            )
        if len(found) != 1:
            raise DeniedError(
                f"client certificate: expected a name of one tenant's, got names of {len(found)}; "
                "ask the server's operator"
            )
        return found[0].tenant

    def _refresh(self) -> None:
        """Read the file again if it has changed."""
        state = self._stat()
        if state == self._state:
            return
        self._state = state
        try:
            self._use(tokens_file.read(self._path))
        except (ValueError, OSError) as error:
            logger.error("tokens stay as they were: %s", error)
        else:
            logger.warning("tokens read again; tenants: %d", len(self._entries))

    def _stat(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _use(self, entries: Sequence[Entry]) -> None:
        self._entries = {entry.tenant: entry for entry in entries}


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the bearer token of a call; None = it has none.

    Raises:
      UnauthenticatedError: what is there is none, or more than one.
    """
    given = [value for key, value in metadata if key == _HEADER]
    if not given:
        return None
    scheme, _, token = str(given[0]).partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not token:
        raise UnauthenticatedError(f'{_HEADER}: expected one "Bearer TOKEN", got something else')
    return token
