"""The folder with the public keys of a federation's nodes. The folder is the list of members.

A key that is put there may join at once, a key that is removed is shut out at once: the server
looks at the folder every few seconds. A client's number belongs to the key that first stood for it;
a file named `3.pub` or `3-NAME.pub` is for client 3 alone.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from feddkd.errors import InputError
from feddkd.flower.deployment.credentials import read_public
from feddkd.flower.deployment.superlink import Superlink
from feddkd.flower.membership import pinned_client
from feddkd.flower.wire import WireError
from feddkd.runs.files import put

log = logging.getLogger(__name__)
OWNERS = "clients.json"  # client -> name of the key that stands for it
EVERY = 2.0  # seconds between two looks at the folder


class KeyFolder:
    """The members of a federation; it also says which client belongs to which key."""

    def __init__(self, keys: Path, link: Superlink) -> None:
        self._keys, self._link = keys, link
        self._names: dict[bytes, str] = {}  # public key -> name
        self._seen: dict[str, int] = {}  # file -> time of its last change
        self._owners = _read_owners(link.folder / OWNERS)

    def admit(self) -> None:
        """Let exactly the nodes join whose keys are in the folder now."""
        files = sorted(self._keys.glob("*.pub"))
        self._seen = {str(file): file.stat().st_mtime_ns for file in files}
        names = {read_public(file): file.stem for file in files}
        for key, name in self._names.items():
            if key not in names:
                log.warning("the key %s is not in %s any more: it is shut out", name, self._keys)
        self._link.admit(names)
        self._names = names

    @contextmanager
    def watched(self, also: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Admit and shut out nodes as the folder changes, until the block ends.

        `also` is called as often as the folder is looked at.
        """
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(EVERY):
                try:
                    also()
                    if self._changed():
                        self.admit()
                except (OSError, InputError) as error:
                    log.warning("cannot look after %s: %s", self._keys, error)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _changed(self) -> bool:
        now = {str(file): file.stat().st_mtime_ns for file in self._keys.glob("*.pub")}
        return now != self._seen

    # --- membership, as the engine asks for it

    def name(self, node: int) -> str | None:
        """Return the name of a node's key; None if it is not in the folder."""
        return self._names.get(self._link.key_of(node))

    def is_member(self, node: int) -> bool:
        """Return whether a node's key is in the folder."""
        return self.name(node) is not None

    def check(self, client: int, node: int) -> None:
        """Raise WireError if a client belongs to another key than the node's."""
        name = self.name(node)
        if name is None:
            raise WireError("its key is not in the folder of keys")
        if (own := pinned_client(name)) not in (None, client):
            raise WireError(f"the key {name} is for client {own}, and it claims {client}")
        owner = self._owner(client)
        if owner not in (None, name):
            place = self._link.folder / OWNERS
            raise WireError(f"client {client} belongs to the key {owner} ({place}), not to {name}")

    def bind(self, client: int, node: int) -> None:
        """Remember on disk that a client belongs to the key of a node."""
        name = self.name(node)
        if name is not None and self._owners.get(str(client)) != name:
            self._owners[str(client)] = name
            put(self._link.folder / OWNERS, json.dumps(self._owners, indent=1).encode())

    def _owner(self, client: int) -> str | None:
        """Return the name of the key that a client belongs to, if the key is in the folder."""
        names = set(self._names.values())
        for name in names:
            if pinned_client(name) == client:
                return name
        owner = self._owners.get(str(client))
        return owner if owner in names else None


def _read_owners(path: Path) -> dict[str, str]:
    try:
        return {str(client): str(name) for client, name in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
