"""Compare FedAvg and FedDKD on handwritten digits; each of ten clients holds two digits.

The cells open as a notebook in most editors; `python examples/quickstart.py` runs the file. It
takes less than a minute and writes quickstart.png and quickstart.safetensors.
"""

# %% Imports: the package, and data from scikit-learn
import os

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import feddkd

ROUNDS = int(os.environ.get("ROUNDS", "15"))

# %% A fifth of the images is the test set; client k of ten gets images of the digits k and k + 1
x, y = load_digits(return_X_y=True)
x = (x / 16).astype(np.float32)
mixed = np.random.default_rng(0).permutation(len(y))
test, rest = mixed[:360], mixed[360:]
halves = [np.array_split(rest[y[rest] == digit], 2) for digit in range(10)]
parts = [np.concatenate([halves[k][0], halves[(k + 1) % 10][1]]) for k in range(10)]
clients = [(x[part], y[part]) for part in parts]

# %% The network: any nn.Module
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

# %% Both methods get the same clients, cohorts and initial weights
methods = {
    "FedAvg": "fedavg(epochs=5, batch_size=32, lr=0.1)",
    "FedDKD": "fedavg(epochs=5, batch_size=32, lr=0.1) | dkd(steps=10, batch_size=32, lr=0.2)",
}
results = {
    name: feddkd.simulate(
        model=net,
        clients=clients,
        test=(x[test], y[test]),
        method=method,
        rounds=ROUNDS,
        cohort=0.5,
        engine="batched",
    )
    for name, method in methods.items()
}

# %% The last round
for name, result in results.items():
    last = result.history[-1]
    print(
        f"{name}: {last['test_accuracy']:.1%} after {last['round']} rounds and"
        f" {last['communications']} communications"
    )

# %% Accuracy in every round
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, result in results.items():
    axes.plot(
        [row["round"] for row in result.history],
        [row["test_accuracy"] for row in result.history],
        marker=".",
        label=name,
    )
axes.set(xlabel="round", ylabel="test accuracy", ylim=(0, 1))
axes.legend()
figure.savefig("quickstart.png", dpi=150)

# %% The final weights, as safetensors
results["FedDKD"].save("quickstart.safetensors")
