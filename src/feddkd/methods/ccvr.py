"""CCVR: Luo, Chen, Hu, Zhang, Liang, Feng, "No fear of heterogeneity: classifier calibration for
federated learning with non-IID data", NeurIPS 2021, arXiv:2106.05001.

    client: n_kc, mu_kc, S_kc = number, mean and covariance of its features z of each class c
    server: n_c = sum_k n_kc,   mu_c = sum_k n_kc mu_kc / n_c
            S_c = ( sum_k (n_kc - 1) S_kc + sum_k n_kc mu_kc mu_kc' - n_c mu_c mu_c' ) / (n_c - 1)
            h <- h - lr grad CE(h(z), c),   z ~ N(mu_c, S_c),   h = the head

A piece to put after any method with a shared head: fedavg() | ccvr(). The server calibrates the
last linear layer on features that it draws itself. z is the input of this layer in the shared
model, in evaluation mode; clients read their examples once more and upload for each class the
number, the sum of z and the sum of z z', from which the formulas above follow: an exchange of its
own. Only sums go up, yet they tell a lot of a class of which a client has few examples.

The paper calibrates once, after the last round; here the next round starts from the calibrated
head. `warmup` is the number of rounds without calibration, so warmup=99 in a run of 100 rounds is
the paper's. `samples` features are drawn for each class on average, as many of each class with at
least two examples in the cohort. The server makes `server_steps` steps of plain SGD on
`server_batch_size` of them, drawn with replacement; these numbers are ours.
"""

from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from feddkd.data.batches import Reads
from feddkd.errors import InputError, RunError
from feddkd.method import Batch, Collect, Fold, Method, Phase, World, own_model
from feddkd.methods.losses import CLASSES, FEATURES, cross_entropy
from feddkd.methods.registry import METHODS
from feddkd.methods.virtual_samples import draw_samples
from feddkd.models.functional import Model
from feddkd.randomness import fold, generator
from feddkd.spec.schedules import Rate, Repeat
from feddkd.spec.types import Count, Positive, Whole
from feddkd.tensors import Groups, Tensors, add, combine, only

AT_ONCE = 1000  # examples whose features are computed in one step


@METHODS.register
def ccvr(
    *,
    samples: Count = 100,
    server_steps: Count = 100,
    server_batch_size: Count = 64,
    server_lr: Positive = 0.1,
    warmup: Whole = 0,
) -> Method:
    """The method before it, with the head calibrated on features drawn from N(mu_c, S_c)."""
    telling = Phase(
        name="features",
        client=Fold(_start, _step, _finish),
        server=partial(_draw, samples),
        reads=Reads(AT_ONCE, random=False),
        facts=frozenset({"labels"}),
        collect={"features": Collect.MEAN_BY_CLIENTS},
        repeat=Repeat(1, warmup),
        follows=True,
        opens=_open,
        requires=CLASSES | FEATURES,
    )
    calibrating = Phase(
        name="calibrate",
        client=_calibrate(server_batch_size),
        server=_take_head,
        reads=Reads(1, steps=server_steps, source="none"),
        collect={"head": Collect.MEAN_BY_CLIENTS},  # a mean over one upload, the server's own
        sends=("params", "features"),
        rates={"lr": Rate(server_lr)},
        repeat=Repeat(1, warmup),
        at="server",
        refines=True,
    )
    return Method((telling, calibrating))


def _open(model: Model, state: Groups, world: World) -> Groups:
    """Return a key and the number of calibrations so far; refuse networks without a shared head."""
    if model.head is None or not model.head_names <= frozenset(state["params"]):
        raise InputError(
            "ccvr calibrates the last linear layer at the server, and in this run there is none"
            " that is trained and shared"
        )
    return {"ccvr": {"key": torch.tensor(fold(("ccvr", *world.key))), "count": torch.tensor(0)}}


# --- the client's half


def _start(model: Model, sent: Groups, memo: Groups) -> Groups:
    params, buffers = own_model(model, sent, memo)
    weight = params[next(name for name in model.head_names if params[name].dim() == 2)]
    zero = weight.new_zeros(len(memo["facts"]["labels"]), dtype=torch.float64)
    zeros = zero.reshape(-1, 1, 1) * weight.new_zeros(weight.shape[1], weight.shape[1])
    table = {"count": zero, "sum": zeros[:, 0], "square": zeros}
    return {"params": params, "buffers": buffers, "features": table}


def _step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    """Add the features of a batch and their squares, class by class."""
    table = carry["features"]
    z = model(carry["params"], carry["buffers"], batch.x, mode="eval", key=batch.key).features
    z, marks = z.double(), batch.marks(len(table["count"])).double()
    added = {
        "count": marks.sum(0),
        "sum": marks.T @ z,
        "square": torch.einsum("bc,bi,bj->cij", marks, z, z),
    }
    return {**carry, "features": add(table, added)}


def _finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    dtype = next(iter(sent["params"].values())).dtype
    return {"features": combine(lambda tensor: tensor.to(dtype), carry["features"])}, memo


# --- the server's half


def moments(table: Tensors, clients: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return n_c, mu_c and S_c from means over the clients of their sums; no S_c below n_c = 2."""
    total = combine(lambda mean: clients * mean.double(), table)
    n = total["count"]
    mu = total["sum"] / n.clamp(min=1).unsqueeze(-1)
    outer = n.reshape(-1, 1, 1) * mu.unsqueeze(2) * mu.unsqueeze(1)
    return n, mu, (total["square"] - outer) / (n - 1).clamp(min=1).reshape(-1, 1, 1)


def square_root(covariance: Tensor, mu: Tensor, dtype: torch.dtype) -> Tensor:
    """Return S_c^(1/2). Variances that are only rounding errors of sums in this type are zero."""
    values, vectors = torch.linalg.eigh(covariance)
    largest = values[:, -1:] + mu.square().amax(1, keepdim=True)
    real = values > 1e3 * torch.finfo(dtype).eps * largest
    roots = torch.where(real, values, 0).sqrt()
    root: Tensor = vectors * roots.unsqueeze(1) @ vectors.mT
    return root


def _draw(samples: int, model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Draw features z ~ N(mu_c, S_c): mu_c + S_c^(1/2) e with normal e."""
    n, mu, covariance = moments(collected["features"], len(rates["clients"]))
    known = (n > 1.5).nonzero().flatten()  # whole numbers, rounded by the mean
    if not len(known):
        raise RunError("ccvr: no class has two examples among the clients of the round")
    root = square_root(covariance, mu, collected["features"]["sum"].dtype)
    ledger, size = state["ccvr"], samples * len(n)
    random = generator(("ccvr", int(ledger["key"]), int(ledger["count"])))
    normal = torch.from_numpy(random.standard_normal((size, mu.shape[1]))).to(mu.device)
    y = known[torch.arange(size, device=mu.device) % len(known)]
    z = mu[y] + (root[y] @ normal.unsqueeze(-1)).squeeze(-1)
    drawn = {"z": z.to(collected["features"]["sum"].dtype), "y": y}
    return {**state, "features": drawn, "ccvr": {**ledger, "count": ledger["count"] + 1}}


def _calibrate(size: int) -> Fold:
    """Return the steps of the head on the drawn features."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {"head": only(sent["params"], model.head_names)}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        some = draw_samples(sent["features"], size, batch.key)
        share = torch.full_like(some["z"][:, 0], 1 / size)
        drawn = Batch(some["z"], some["y"], share, batch.key)

        def loss(h: Tensors) -> Tensor:
            return cross_entropy(model.apply_head(h, drawn.x), drawn)

        return {"head": add(carry["head"], grad(loss)(carry["head"]), -sent["rates"]["lr"])}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return {"head": carry["head"]}, memo

    return Fold(start, step, finish)


def _take_head(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    params = {**state["params"], **collected["head"]}
    kept = {group: tensors for group, tensors in state.items() if group != "features"}
    return {**kept, "params": params}
