"""Certificates for tests: an own authority, and certificates that it signs for 127.0.0.1."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority's certificate, that of a server, and the server's key."""

    authority: Path
    certificate: Path
    key: Path


def certificates(folder: Path, address: str = "127.0.0.1") -> Certificates:
    """Make an authority, and a certificate for a server at an address."""
    root_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    root = _signed("an authority of tests", "an authority of tests", root_key.public_key(), root_key, None)
    leaf = _signed("a server of tests", "an authority of tests", key.public_key(), root_key, address)
    made = Certificates(folder / f"{address}.ca.pem", folder / f"{address}.pem", folder / f"{address}.key.pem")
    made.authority.write_bytes(root.public_bytes(Encoding.PEM))
    made.certificate.write_bytes(leaf.public_bytes(Encoding.PEM))
    made.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return made


def _signed(
    name: str, by: str, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey, address: str | None
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(by))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=address is None, path_length=None), critical=True)
    )
    if address is not None:
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(signer, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
