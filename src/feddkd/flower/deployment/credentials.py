"""Makes a federation's own certificate authority, the server's certificate and nodes' key pairs.

Only their owner can read private files. A node needs the authority's certificate and its own
private key; the server needs the nodes' public keys. No private key ever leaves its machine.
"""

import ipaddress
import logging
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
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from feddkd.errors import InputError

log = logging.getLogger(__name__)
AUTHORITY, CERTIFICATE, PRIVATE = "ca.crt", "server.pem", "server.key"
AUTHORITY_KEY = "ca.key"
DAYS, AUTHORITY_DAYS = 365, 3650
WARNING_DAYS = 30  # before a certificate expires


def make_server(folder: Path, hosts: Sequence[str]) -> None:
    """Write ca.crt, ca.key, server.pem and server.key for a server with these names and addresses.

    ca.key signs the server's next certificates; only the server's operator needs it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / PRIVATE).exists():
        raise InputError(
            f"{folder} already holds a server's certificate; --renew makes its successor"
        )
    authority, issuer = ec.generate_private_key(ec.SECP384R1()), _name("feddkd federation")
    root = _certificate(issuer, issuer, authority.public_key(), AUTHORITY_DAYS).add_extension(
        x509.BasicConstraints(True, 0), critical=True
    )
    signed = root.sign(authority, hashes.SHA384())
    (folder / AUTHORITY).write_bytes(signed.public_bytes(Encoding.PEM))
    _private(folder / AUTHORITY_KEY, _pem(authority))
    names = [_host(host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    _issue(folder, hosts[0], names, authority, issuer)


def renew_server(folder: Path) -> None:
    """Replace server.pem and server.key under the same authority, for the same names.

    Nodes need nothing new.
    """
    if not (folder / AUTHORITY_KEY).is_file():
        raise InputError(
            f"there is no {AUTHORITY_KEY} in {folder}, which signs certificates: make new"
            " certificates in another folder, and send its ca.crt to the nodes"
        )
    before = read_certificate(folder / CERTIFICATE)
    names = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    common = before.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
    authority = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    issuer = read_certificate(folder / AUTHORITY).subject
    _issue(folder, str(common), list(names), authority, issuer)


def _issue(
    folder: Path,
    name: str,
    hosts: Sequence[x509.GeneralName],
    authority: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
) -> None:
    """Write server.key and the server.pem that the authority signs."""
    server = ec.generate_private_key(ec.SECP384R1())
    leaf = _certificate(_name(name), issuer, server.public_key(), DAYS)
    leaf = leaf.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    leaf = leaf.add_extension(x509.BasicConstraints(False, None), critical=True)
    (folder / PRIVATE).unlink(missing_ok=True)
    _private(folder / PRIVATE, _pem(server))
    signed = leaf.sign(authority, hashes.SHA384())
    (folder / CERTIFICATE).write_bytes(signed.public_bytes(Encoding.PEM))


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} holds no certificate: {error}") from None


def check_validity(folder: Path) -> None:
    """Raise InputError if a certificate of the server has expired; warn if one will soon."""
    for file in (AUTHORITY, CERTIFICATE):
        until = read_certificate(folder / file).not_valid_after_utc
        left = until - datetime.now(UTC)
        if left < timedelta(0):
            raise InputError(
                f"the certificate {folder / file} expired on {until:%Y-%m-%d};"
                f" feddkd flower certificate {folder} --renew makes its successor"
            )
        if left < timedelta(days=WARNING_DAYS):
            log.warning(
                "the certificate %s expires in %s days; feddkd flower certificate %s --renew makes"
                " its successor",
                folder / file,
                left.days,
                folder,
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


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


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
