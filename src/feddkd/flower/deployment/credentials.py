"""Makes a federation's own certificate authority, the server's certificate and nodes' key pairs.

Only their owner can read private files. A node needs the authority's certificate and its own
private key; the server needs the nodes' public keys. No private key ever leaves its machine.
"""

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from feddkd.errors import InputError

AUTHORITY, CERTIFICATE, PRIVATE = "ca.crt", "server.pem", "server.key"
DAYS = 365


def make_server(folder: Path, hosts: Sequence[str]) -> None:
    """Write ca.crt, server.pem and server.key for a server with these names and addresses.

    The authority's private key is not kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / PRIVATE).exists():
        raise InputError(
            f"{folder} already holds a server's certificate; remove it to make another"
        )
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = _name("feddkd federation")
    root = _certificate(issuer, issuer, authority.public_key(), DAYS).add_extension(
        x509.BasicConstraints(True, 0), critical=True
    )
    names = x509.SubjectAlternativeName(
        [_host(host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    )
    leaf = _certificate(_name(hosts[0]), issuer, server.public_key(), DAYS).add_extension(
        names, critical=False
    )
    leaf = leaf.add_extension(x509.BasicConstraints(False, None), critical=True)
    for file, certificate in ((AUTHORITY, root), (CERTIFICATE, leaf)):
        signed = certificate.sign(authority, hashes.SHA384())
        (folder / file).write_bytes(signed.public_bytes(Encoding.PEM))
    _private(
        folder / PRIVATE, server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )


def make_node(path: Path) -> None:
    """Write a node's key pair to `path` and `path`.pub."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise InputError(f"{path} already holds a key; remove it to make another")
    key = ec.generate_private_key(ec.SECP384R1())
    _private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    path.with_name(path.name + ".pub").write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    )


def read_public(path: Path) -> bytes:
    """Return a node's public key in the form (PEM) in which Flower knows it."""
    try:
        return load_ssh_public_key(path.read_bytes()).public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{path} holds no public key: {error}") from None


def _private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, from the moment it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    built = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    built = built.serial_number(x509.random_serial_number())
    return built.not_valid_before(now - timedelta(minutes=5)).not_valid_after(
        now + timedelta(days=days)
    )
