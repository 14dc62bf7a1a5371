"""What `feddkd flower init` writes: a Flower app whose client side is one function of the user's."""

PYPROJECT = """\
# A Flower app: `flwr run .` runs it. feddkd[flower] must be installed on the server and on every node.
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

# What is run; every key of an experiment may stand here. Change one for a single run: flwr run . -c 'experiment.rounds=2'
[tool.flwr.app.config.experiment]
method = "fedavg(epochs=1, lr=0.1) | dkd(steps=5, lr=0.1)"
clients = 2  # nodes that take part
rounds = 3
model = "mlp(hidden='64')"
partition = "elsewhere()"  # clients bring their own examples
data = "test_only(path='test.npz')"  # the server's: arrays x_test and y_test, in the folder named below

[tool.flwr.app.config]
data = ""  # the server's folder with test.npz, best as an absolute path
out = "runs"  # where the server writes its records, likewise
deadline = 600.0  # seconds; a client that has not answered by then has not answered
join = 300.0  # seconds until all clients must be there
secure = false  # true: uploads come masked, the server learns sums alone; three clients at least
threshold = 0.66  # with secure: the share of a cohort without which no sum is opened
"""

CLIENT_APP = '''\
"""A client's examples. Change `load` so that it reads yours; the rest is feddkd's."""

from pathlib import Path

import numpy as np
from feddkd.flower.apps import NodeApp


def load(context):
    """This client's (x, y), or (x, y, x_test, y_test) if it is to be tested on examples of its own.

    x: one example a row, as the network takes them, or images of unsigned bytes (N, C, H, W). y: whole numbers from 0.
    Every node is started with a configuration of its own:
        flower-supernode ... --node-config 'partition-id=0 num-partitions=2 file="/data/mine.npz"'
    """
    with np.load(Path(str(context.node_config["file"]))) as arrays:
        return arrays["x"], arrays["y"]


app = NodeApp(load)
'''

FILES = {"pyproject.toml": PYPROJECT, "client_app.py": CLIENT_APP}
