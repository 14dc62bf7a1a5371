"""Membership: the folder of keys, clients that belong to keys, certificates, greetings."""

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography import x509

from feddkd import InputError
from feddkd.cli.flower_node import certificate, revoke
from feddkd.flower.deployment import credentials, join_checks
from feddkd.flower.deployment.credentials import (
    AUTHORITY,
    CERTIFICATE,
    check_validity,
    make_node,
    make_server,
    read_certificate,
    read_public,
    renew_server,
)
from feddkd.flower.deployment.join_checks import (
    NotYetError,
    _check_server,
    _obstacle,
    _trust,
    wait_to_join,
)
from feddkd.flower.deployment.key_folder import KeyFolder
from feddkd.flower.deployment.processes import Processes, free_port
from feddkd.flower.deployment.superlink import Superlink
from feddkd.flower.wire import WireError

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")


class Link:
    """Stands for a SuperLink whose node 10 has the key `a`, and so on."""

    def __init__(self, folder: Path, keys: Path) -> None:
        self.folder, self.keys = folder, {n: keys / f"{name}.pub" for n, name in NODES.items()}
        self.admitted: list[str] = []

    def admit(self, keys: dict[bytes, str]) -> None:
        self.admitted = sorted(keys.values())

    def key_of(self, node: int) -> bytes:
        path = self.keys[node]
        return read_public(path if path.exists() else path.with_suffix(".revoked"))


NODES = {10: "a", 11: "b", 12: "2-c"}


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    (tmp_path / "keys").mkdir()
    for name in NODES.values():
        make_node(tmp_path / "keys" / name)
    made = KeyFolder(tmp_path / "keys", Link(tmp_path, tmp_path / "keys"))  # type: ignore[arg-type]
    made.admit()
    return made


def test_the_folder_is_the_list(folder: KeyFolder, tmp_path: Path) -> None:
    assert folder._link.admitted == ["2-c", "a", "b"]  # type: ignore[attr-defined]
    assert folder.is_member(10)
    revoke("a", tmp_path / "keys")
    folder.admit()
    assert folder._link.admitted == ["2-c", "b"]  # type: ignore[attr-defined]
    assert not folder.is_member(10)
    (tmp_path / "keys" / "a.revoked").rename(tmp_path / "keys" / "a.pub")
    folder.admit()
    assert folder.is_member(10)


def test_a_running_server_sees_that_a_key_is_removed(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feddkd.flower.deployment.key_folder.EVERY", 0.01)
    with folder.watched():
        revoke("b", tmp_path / "keys")
        limit = datetime.now(UTC) + timedelta(seconds=10)
        while folder.is_member(11) and datetime.now(UTC) < limit:
            pass
    assert not folder.is_member(11)


def test_a_client_belongs_to_the_key_that_first_stood_for_it(
    folder: KeyFolder, tmp_path: Path
) -> None:
    folder.check(0, 10)
    folder.bind(0, 10)
    again = KeyFolder(tmp_path / "keys", folder._link)  # as after a restart
    again.admit()
    again.check(0, 10)
    with pytest.raises(WireError, match="client 0 belongs to the key a"):
        again.check(0, 11)
    revoke("a", tmp_path / "keys")
    again.admit()
    again.check(0, 11)  # whose key was removed is no owner
    with pytest.raises(WireError, match="not in the folder"):
        again.check(0, 10)


def test_a_key_with_a_number_is_for_that_client_alone(folder: KeyFolder) -> None:
    folder.check(2, 12)
    with pytest.raises(WireError, match="for client 2"):
        folder.check(0, 12)
    with pytest.raises(WireError, match="belongs to the key 2-c"):
        folder.check(2, 10)


def test_who_is_revoked_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no key .*x\.pub"):
        revoke("x", tmp_path)


# --- certificates


def test_a_renewed_certificate_has_the_same_authority_and_names(tmp_path: Path) -> None:
    make_server(tmp_path, ["fed.example.org", "192.0.2.7"])
    root, before = (read_certificate(tmp_path / name) for name in (AUTHORITY, CERTIFICATE))
    certificate(tmp_path, None, renew=True)
    after = read_certificate(tmp_path / CERTIFICATE)
    assert read_certificate(tmp_path / AUTHORITY) == root
    assert after.serial_number != before.serial_number
    names = [
        one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for one in (before, after)
    ]
    assert names[0] == names[1]
    after.verify_directly_issued_by(root)
    assert all((tmp_path / name).stat().st_mode & 0o077 == 0 for name in ("ca.key", "server.key"))


def test_without_the_authoritys_key_nothing_is_renewed(tmp_path: Path) -> None:
    make_server(tmp_path, ["localhost"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(InputError, match=r"no ca\.key"):
        renew_server(tmp_path)


@pytest.mark.parametrize(("days", "warned"), [(29, True), (31, False)])
def test_a_certificate_that_expires_soon_is_announced(
    days: int,
    warned: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(credentials, "DAYS", days + 1)
    make_server(tmp_path, ["localhost"])
    check_validity(tmp_path)
    assert ("expires in" in caplog.text) == warned


def test_an_expired_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_server(tmp_path, ["localhost"])
    later = datetime.now(UTC) + timedelta(days=400)
    monkeypatch.setattr(credentials, "datetime", SimpleNamespace(now=lambda zone: later))
    with pytest.raises(InputError, match=r"expired on .*--renew"):
        check_validity(tmp_path)


# --- a node and a real SuperLink


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Superlink]:
    folder = tmp_path_factory.mktemp("server")
    make_server(folder, ["localhost"])
    make_node(folder / "known")
    with Processes(folder) as processes:
        link = Superlink(folder, processes, free_port())
        link.start()
        link.admit({read_public(folder / "known.pub"): "known"})
        yield link


def test_a_node_waits_until_its_key_is_known(
    server: Superlink,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_node(tmp_path / "new")

    def admit(seconds: float) -> None:
        server.admit({read_public(tmp_path / "new.pub"): "new"})

    monkeypatch.setattr("feddkd.flower.deployment.join_checks.time.sleep", admit)
    wait_to_join(f"localhost:{server.port}", tmp_path / "new", server.folder / AUTHORITY)
    assert "does not know this node's key" in caplog.text
    assert "new.pub" in caplog.text
    server.admit({read_public(server.folder / "known.pub"): "known"})


def test_each_obstacle_has_its_own_message(
    server: Superlink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, here = server.folder / "known", f"localhost:{server.port}"
    own = _trust(server.folder / AUTHORITY)
    _check_server(here, key, own)
    with pytest.raises(NotYetError, match="cannot be reached"):
        _check_server(f"localhost:{free_port()}", key, own)
    make_server(tmp_path, ["localhost"])
    with pytest.raises(InputError, match="is not the one"):
        _check_server(here, key, _trust(tmp_path / AUTHORITY))
    monkeypatch.setattr(join_checks, "__version__", "9.9")
    with pytest.raises(InputError, match=r"this node has 9\.9"):
        _check_server(here, key, own)


@pytest.mark.parametrize(
    ("code", "kind", "word"),
    [(10, NotYetError, "renew"), (62, InputError, "not for"), (19, InputError, "not the one")],
)
def test_what_is_wrong_with_a_certificate_is_said(
    code: int, kind: type[Exception], word: str
) -> None:
    cause = ssl.SSLCertVerificationError()
    cause.verify_code, cause.verify_message = code, "told by OpenSSL"
    error = httpx.ConnectError("failed")
    error.__cause__ = cause
    found = _obstacle("fed.example.org:9092", error)
    assert isinstance(found, kind)
    assert word in str(found)
