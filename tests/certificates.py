"""An authority, and certificates that it signs, in PEM files."""

from __future__ import annotations

import datetime
import ipaddress
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates; its own is `path`."""

    def __init__(self, directory: pathlib.Path, name: str):
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        ca = x509.BasicConstraints(ca=True, path_length=0)
        certificate = _builder(self._name, self._name, self._key).add_extension(ca, critical=True)
        self.path = directory / f"{name}.pem"
        self.path.write_bytes(_pem(certificate.sign(self._key, hashes.SHA256())))

    def sign(self, name: str, *alternatives: str) -> tuple[pathlib.Path, pathlib.Path]:
        """Make a certificate and its key; what is alternatively an address is one."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key)
        if alternatives:
            names = [_alternative(one) for one in alternatives]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        paths = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        paths[0].write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )  # fmt: skip
        )
        return paths


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(subject, issuer, key) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )


def _pem(certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
