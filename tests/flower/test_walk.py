"""The walk of docs/flower.md: a server and three hospitals, each with its own data in its own form.

Real processes on loopback. With `make federation` each has its own network, where the machine
can make some.
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("flwr")

from feddkd.cli.predict import predict_command
from feddkd.flower.deployment.credentials import make_node, make_server
from feddkd.flower.deployment.processes import Processes, free_port
from feddkd.flower.status import read_status
from test_deployment import until, words

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
FEDDKD = [sys.executable, "-m", "feddkd"]
SIDE = 6

LOADERS = {
    "npz": """
import numpy as np

def load(context):
    with np.load("{folder}/mine.npz") as arrays:
        return arrays["x"], arrays["y"], arrays["x"], arrays["y"]
""",
    "csv": """
import numpy as np

def load(context):
    table = np.loadtxt("{folder}/mine.csv", np.float32, delimiter=",", skiprows=1)
    x, y = table[:, 1:].reshape(-1, 1, 6, 6), table[:, 0].astype(np.int64)
    return x, y, x, y
""",
    "images": """
from pathlib import Path
import numpy as np
from PIL import Image

CLASSES = ["dark", "middle", "light"]

def load(context):
    files = sorted(Path("{folder}/images").glob("*/*.png"))
    x = np.stack([np.asarray(Image.open(file).convert("L")) for file in files])
    x = (x[:, None] / 255).astype(np.float32)
    y = np.array([CLASSES.index(file.parent.name) for file in files])
    return x, y, x, y
""",
}


def pictures(count: int, classes: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures that are the lighter, the higher their class is."""
    draw = np.random.default_rng(seed)
    y = draw.choice(classes, count)
    x = np.clip(0.3 * y[:, None, None] + draw.uniform(0, 0.3, (count, SIDE, SIDE)), 0, 1)
    return x.astype(np.float32)[:, None], y.astype(np.int64)


def fill(kind: str, folder: Path, classes: Sequence[int], seed: int) -> None:
    """Write a hospital's data and its loader."""
    x, y = pictures(40 + 20 * seed, classes, seed)
    if kind == "npz":
        np.savez(folder / "mine.npz", x=x, y=y)
    elif kind == "csv":
        header = ",".join(["label", *(f"p{n}" for n in range(SIDE * SIDE))])
        table = np.column_stack([y, x.reshape(len(x), -1)])
        np.savetxt(folder / "mine.csv", table, delimiter=",", header=header, comments="")
    else:
        for number, (one, label) in enumerate(zip(x, y, strict=True)):
            place = folder / "images" / ["dark", "middle", "light"][label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((one[0] * 255).astype(np.uint8)).save(place / f"{number}.png")
    (folder / "data.py").write_text(LOADERS[kind].replace("{folder}", str(folder)))


class Hosts:
    """The machines of the walk: how to run a command on one, and how a hospital finds the server.

    Without their own networks they are all this machine.
    """

    listens = "127.0.0.1"

    def on(self, host: str, *line: object) -> list[str]:
        return [*FEDDKD, *map(str, line)]

    def server_of(self, host: str) -> str:
        return "127.0.0.1"


class Namespaces(Hosts):
    """Machines with a network each: namespaces, and a cable from the server to each hospital."""

    listens = "0.0.0.0"

    def __init__(self, hospitals: Sequence[str]) -> None:
        self.names = {name: f"feddkd-{name}" for name in ("server", *hospitals)}
        self.addresses = {name: f"10.77.{n}.1" for n, name in enumerate(hospitals)}

    def __enter__(self) -> "Namespaces":
        for name in self.names.values():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for name, address in self.addresses.items():
            ends = [("server", f"srv-{name}", address), (name, "uplink", address[:-1] + "2")]
            (_, one, _), (_, other, _) = ends
            ip("-n", self.names["server"], "link", "add", one, "type", "veth", "peer", other)
            ip("-n", self.names["server"], "link", "set", other, "netns", self.names[name])
            for host, device, at in ends:
                ip("-n", self.names[host], "address", "add", f"{at}/24", "dev", device)
                ip("-n", self.names[host], "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)

    def on(self, host: str, *line: object) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *super().on(host, *line)]

    def server_of(self, host: str) -> str:
        return self.addresses[host]


def ip(*words: str) -> None:
    made = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine makes no networks: {made.stderr.strip()}")


EXPERIMENT = """
method = "fedavg(epochs=1, lr=0.1, batch_size=16) | dkd(steps=1, lr=0.2, batch_size=16)"
clients = 3
rounds = 2
partition = "elsewhere(tests=True)"
data = "described(shape='1x6x6', classes=3)"
model = "mlp(hidden='16')"
"""


HOSPITALS = {"npz": [0, 1, 2], "csv": [0, 1], "images": [1, 2]}


@pytest.mark.long
def test_three_hospitals_with_their_own_data_train_and_each_gets_the_model(tmp_path: Path) -> None:
    walk(Hosts(), tmp_path)


@pytest.mark.federation
def test_hospitals_on_networks_of_their_own_do_the_same(tmp_path: Path) -> None:
    if not shutil.which("ip"):
        pytest.skip("there is no command ip")
    with Namespaces(list(HOSPITALS)) as hosts:
        walk(hosts, tmp_path)


def walk(hosts: Hosts, folder: Path) -> None:
    """Do what docs/flower.md says, from the certificate to predictions by the model."""
    server, port = folder / "server", free_port()
    make_server(server, [*dict.fromkeys(hosts.server_of(kind) for kind in HOSPITALS)])
    (server / "federation.toml").write_text(EXPERIMENT)
    (server / "keys").mkdir()
    for seed, (kind, classes) in enumerate(HOSPITALS.items()):
        (folder / kind).mkdir()
        fill(kind, folder / kind, classes, seed)
        make_node(folder / kind / "node")
        public = (folder / kind / "node.pub").read_bytes()
        (server / "keys" / f"{kind}.pub").write_bytes(public)
    with Processes(folder) as processes:
        places = ["--folder", server, "--keys", server / "keys", "--out", server / "runs"]
        run = [server / "federation.toml", *places, "--host", hosts.listens, "--port", port]
        run += ["--join", 120, "--log", "csv", "--log-file", server / "log" / "server.log"]
        processes.start("server", hosts.on("server", "flower", "server", *run))
        until(lambda: words(server / "superlink.log").count("Created node_id") == 3, 60)
        for part, kind in enumerate(HOSPITALS):
            own, address = folder / kind, f"{hosts.server_of(kind)}:{port}"
            options = ["--key", own / "node", "--authority", server / "ca.crt", "--threads", 1]
            options += ["--load", f"{own / 'data.py'}:load", "--results", own / "models"]
            node = [address, "--part", part, "--parts", 3, "--port", free_port()]
            processes.start(kind, hosts.on(kind, "flower", "client", *node, *options))
        ended = processes.running.pop("server").wait(180)
        assert ended == 0, words(processes.log("server"))
        processes.check()
    found = read_status(server)
    assert {one["node"] for one in found["clients"].values()} == set(HOSPITALS)
    assert "client 0 has joined" in words(server / "log" / "server.log")
    (final,) = server.glob("runs/*/final.safetensors")
    for kind in HOSPITALS:
        (model,) = (folder / kind).glob("models/*/final.safetensors")
        assert model.read_bytes() == final.read_bytes()
    for private in (model, server / "superlink.db", server / "superlink.log"):
        assert private.stat().st_mode & 0o077 == 0
    check_predictions(final.parent, folder)
    check_predictions(model.parent, folder)


def check_predictions(run: Path, folder: Path) -> None:
    """Predict for new pictures from a run's folder, and see that most classes are right."""
    x, y = pictures(60, [0, 1, 2], 9)
    np.savez(folder / "new.npz", x=x)
    predict_command(run, folder / "new.npz", folder / "predictions.csv")
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60
    right = np.mean([int(row["class"]) == label for row, label in zip(rows, y, strict=True)])
    assert right > 1 / 3
    assert abs(sum(float(rows[0][f"p({name})"]) for name in range(3)) - 1) < 1e-4
