"""Certificates of a server, looked at before anything else is begun."""

from __future__ import annotations

import dataclasses
import pathlib
import ssl

import grpc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tls:
    """Files in PEM.

    Attributes:
      cert: the server's certificate, and those between it and the authority's, in this order.
      key: of the certificate, without a password.
      client_ca: who signs clients' certificates, which then are asked for; None = they are not.
    """

    cert: pathlib.Path
    key: pathlib.Path
    client_ca: pathlib.Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files.

        Raises:
          FileNotFoundError: one is missing.
          ValueError: one is no such file, or key and certificate are not of each other.
        """
        cert, key = self.cert.read_bytes(), self.key.read_bytes()
        client_ca = self.client_ca.read_bytes() if self.client_ca else None
        self._check()
        return grpc.ssl_server_credentials(
            [(key, cert)], root_certificates=client_ca, require_client_auth=client_ca is not None
        )

    def _check(self) -> None:
        """Refuse here what gRPC would refuse every client for."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_verify_locations(self.cert)
        except ssl.SSLError as error:
            raise ValueError(
                f"tls-cert: expected a certificate in PEM, got {_got(self.cert, error)}"
            ) from None
        try:
            context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except ssl.SSLError as error:
            raise ValueError(
                f"tls-key: expected the key of {self.cert} in PEM, without a password, got "
                f"{_got(self.key, error)}"
            ) from None
        try:
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
        except ssl.SSLError as error:
            raise ValueError(
                f"tls-client-ca: expected certificates in PEM, got {_got(self.client_ca, error)}"
            ) from None


def _got(path: pathlib.Path, error: ssl.SSLError) -> str:
    reason = (error.reason or "unreadable").lower().replace("_", " ")
    return f"{path} ({reason})"
