"""The files that `feddkd flower init` writes: a Flower app whose data loader the user writes."""

PYPROJECT = """\
# A Flower app: `flwr run .` runs it. Install feddkd[flower] on the server and on every node.
[project]
name = "my-federation"
version = "1.0.0"
description = "Federated learning by decentralised knowledge distillation"
license = "Apache-2.0"
dependencies = ["feddkd[flower]"]

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "feddkd.flower.apps:server"
clientapp = "client_app:app"

# The experiment: every key of an experiment's TOML file may stand here.
# To change a key for one run: flwr run . -c 'experiment.rounds=2'
[tool.flwr.app.config.experiment]
method = "fedavg(epochs=1, lr=0.1) | dkd(steps=5, lr=0.1)"
clients = 2  # nodes that take part
rounds = 3
model = "mlp(hidden='64')"
partition = "elsewhere()"  # clients bring their own examples
# the server's test examples: arrays x_test and y_test in a file in the folder `data` below
data = "test_only(path='test.npz')"

[tool.flwr.app.config]
data = ""  # the server's folder with test.npz; use an absolute path
out = "runs"  # the server's folder for its records; use an absolute path
deadline = 600.0  # seconds to wait for the clients' answers in an exchange
join = 300.0  # seconds to wait until all clients have joined
secure = false  # true: uploads are masked and the server learns only sums; needs three clients
threshold = 0.66  # with secure: the fraction of a cohort that a sum needs
"""

CLIENT_APP = '''\
"""Loads a client's examples. Change `load` so that it reads yours."""

from pathlib import Path

import numpy as np
from feddkd.flower.apps import NodeApp


def load(context):
    """Return this client's examples (x, y), or (x, y, x_test, y_test) if it has test examples.

    x: one example per row, as the network takes them, or images of unsigned bytes (N, C, H, W).
    y: whole numbers from 0.
    Each node is started with its own configuration, for example
        flower-supernode ... --node-config 'partition-id=0 num-partitions=2 file="/data/mine.npz"'
    """
    with np.load(Path(str(context.node_config["file"]))) as arrays:
        return arrays["x"], arrays["y"]


app = NodeApp(load)
'''

FILES = {"pyproject.toml": PYPROJECT, "client_app.py": CLIENT_APP}
