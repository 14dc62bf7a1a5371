"""FedMA and Astraea: laws, and two rounds of each against a plain computation."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from feddkd import InputError, functional, parse, simulate
from feddkd.data.batches import Reads
from feddkd.method import Collect, Method, Part, World
from feddkd.methods.astraea import mediators
from feddkd.methods.unit_matching import assign, matched_average
from feddkd.models.functional import Model
from feddkd.models.layer_chain import chain
from feddkd.models.networks.digit_cnn import digit_cnn
from feddkd.models.networks.emnist_cnn import emnist_cnn
from feddkd.models.networks.femnist_cnn import FemnistCNN
from feddkd.models.networks.mlp import mlp
from feddkd.models.networks.small_cnn import small_cnn
from feddkd.models.networks.vgg9 import vgg9
from feddkd.tensors import Groups, Tensors, combine, only
from plain_matching import PlainFedMA
from plain_mediators import PlainAstraea
from playing import job_of, play_job
from small import clients as small_clients
from small import distance
from small import network as small_network
from small import run as small_run
from test_engines import WAYS, apart
from test_engines import network as engine_network
from test_engines import world as world_of
from test_laws import watched
from test_reference import clients as image_clients
from test_reference import network as image_network

DATA, NET = small_clients(), small_network()
# with batches of six an epoch ends in one of three or four: in pairs batch norm would magnify
# rounding
IMAGES = [(x[:n], y[:n]) for (x, y), n in zip(image_clients(), (10, 9, 22, 16), strict=True)]
LOCAL = "epochs=2, batch_size=6, lr=0.05, momentum=0.5, weight_decay=0.01"


# --- matching


def scramble(net: nn.Sequential, seed: int) -> nn.Sequential:
    """A network that computes the same with its hidden units in another order, moved by hand."""
    draw = torch.Generator().manual_seed(seed)
    net = copy.deepcopy(net)
    order: Tensor | None = None
    modules = [
        m for m in net if isinstance(m, nn.Linear | nn.Conv2d | nn.BatchNorm1d | nn.BatchNorm2d)
    ]
    last = [m for m in modules if isinstance(m, nn.Linear)][-1]
    with torch.no_grad():
        for module in modules:
            assert isinstance(module.weight, Tensor)
            if isinstance(module, nn.Linear | nn.Conv2d):
                if order is not None:
                    size = module.weight.shape[1] // len(order)
                    columns = torch.cat(
                        [torch.arange(int(unit) * size, int(unit) * size + size) for unit in order]
                    )
                    module.weight.copy_(module.weight[:, columns].clone())
                order = torch.randperm(len(module.weight), generator=draw)
            if module is not last:
                for tensor in [*module.parameters(), *module.buffers()]:
                    if tensor.dim():
                        tensor.copy_(tensor[order].clone())
    return net


def mlp_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 3)
    ).double()


def cnn_net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    norms: list[nn.Module] = (
        [nn.BatchNorm2d(5), nn.BatchNorm1d(7)] if norm else [nn.Identity(), nn.Identity()]
    )
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3, bias=False),
        norms[0],
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(20, 7),
        norms[1],
        nn.ReLU(),
        nn.Linear(7, 3),
    ).double()
    for module in net:
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(tensor, 0.5, 2)  # type: ignore[arg-type]
    return net.eval()


NETS = [(mlp_net(), (6,)), (cnn_net(), (2, 8, 8)), (cnn_net(norm=True), (2, 8, 8))]
NET_NAMES = ["full", "convolutional", "with batch norm"]


@pytest.mark.parametrize(("net", "shape"), NETS, ids=NET_NAMES)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 5.0, 2.0]])
def test_matched_averaging_of_permuted_copies_returns_the_network(
    net: nn.Sequential, shape: tuple[int, ...], weights: list[float]
) -> None:
    copies = [scramble(net, seed).eval() for seed in (1, 2, 3)]
    x = torch.randn(10, *shape, dtype=torch.float64)
    # the same function,
    assert all(torch.allclose(one(x), net(x), rtol=0, atol=1e-12) for one in copies)
    assert all(not torch.allclose(one[0].weight, net[0].weight) for one in copies)  # type: ignore[arg-type]  # in other places
    head = torch.tensor(weights, dtype=torch.float64)[:, None].expand(-1, 3)
    average, orders = matched_average(
        chain(net), [one.state_dict() for one in copies], weights, 5, head
    )
    assert orders is None
    matched = copy.deepcopy(net)
    matched.load_state_dict(average)
    assert torch.allclose(matched(x), net(x), rtol=0, atol=1e-10)
    plain = copy.deepcopy(net)
    plain.load_state_dict(
        {name: sum(one.state_dict()[name] for one in copies) / 3 for name in net.state_dict()}
    )
    assert not torch.allclose(plain(x), net(x), atol=1e-2)  # as the plain average does not


@pytest.mark.parametrize(("net", "shape"), NETS, ids=NET_NAMES)
def test_matched_averaging_of_one_network_is_that_network(
    net: nn.Sequential, shape: tuple[int, ...]
) -> None:
    average, _ = matched_average(chain(net), [net.state_dict()], [3.0], 5, torch.ones(1, 3))
    assert distance(average, net.state_dict()) == 0


@pytest.mark.parametrize("seed", range(10))
def test_two_networks_are_matched_as_well_as_any_permutation_could(seed: int) -> None:
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(2, 6, 4))
    orders = assign([a, b], [1.0, 2.0], sweeps=5)
    found = ((a[orders[0]] - b[orders[1]]) ** 2).sum()
    best = min(((a - b[list(order)]) ** 2).sum() for order in itertools.permutations(range(6)))
    assert found == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_when_nothing_moves_any_more_no_network_has_a_better_place(seed: int) -> None:
    random = np.random.default_rng(seed)
    units, weights = list(random.normal(size=(4, 5, 3))), np.array([1.0, 3.0, 2.0, 2.0])

    def spread(orders: Sequence[Any]) -> float:
        moved = np.stack([own[list(order)] for own, order in zip(units, orders, strict=True)])
        mean = np.average(moved, axis=0, weights=weights)
        return float((weights[:, None, None] * (moved - mean) ** 2).sum())

    orders = assign(units, list(weights), sweeps=100)
    for k in range(4):
        for order in itertools.permutations(range(5)):
            assert spread([*orders[:k], order, *orders[k + 1 :]]) > spread(orders) - 1e-12
    assert spread(orders) <= spread(assign(units, list(weights), sweeps=0)) + 1e-12


@pytest.mark.parametrize(
    ("net", "names", "blocks"),
    [
        (mlp((8, 8), 10, (5,)), ["1", "3"], [None, 1]),
        (small_cnn(3, 10), ["0", "2", "7", "10"], [None, 1, 196, 1]),
        (
            vgg9(3, 10),
            ["0", "2", "5", "7", "11", "13", "18", "20", "23"],
            [None, 1, 1, 1, 1, 1, 16, 1, 1],
        ),
        (FemnistCNN(1, 26), ["convs.0", "convs.1", "convs.2", "fc1", "fc2"], [None, 1, 1, 4, 1]),
        (emnist_cnn(1, 26), ["0", "3", "7", "8"], [None, 1, 49, 1]),
        (digit_cnn(3, 10), ["0", "4", "8", "12", "15", "18"], [None, 1, 1, 49, 1, 1]),
    ],
    ids=["mlp", "small_cnn", "vgg9", "femnist_cnn", "emnist_cnn", "digit_cnn"],
)
def test_the_packages_networks_are_chains(
    net: nn.Module, names: list[str], blocks: list[int | None]
) -> None:
    layers = chain(net)
    assert [layer.name for layer in layers] == names
    assert [layer.block for layer in layers] == blocks
    assert sorted(name for layer in layers for name in layer.names) == sorted(net.state_dict())


def test_unshuffled_it_reads_every_layers_examples_in_stored_order() -> None:
    model = functional(mlp((8, 8), 10, (5,)))
    assert [
        phase.reads.shuffle for phase in parse("fedma()").in_stored_order().fitted(model).phases
    ] == [False, False]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.third(x + self.second(x).relu())  # type: ignore[no-any-return]


class Branching(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(x) if x.sum() > 0 else self.first(x))  # type: ignore[no-any-return]


class Reshaping(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.first(x).view(-1, 5))  # type: ignore[no-any-return]


class Idle(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.first(x))  # type: ignore[no-any-return]


TWICE = nn.Linear(5, 5)


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Residual(), "'first' .*does not fit in"),
        (Branching(), "cannot be traced"),
        (Reshaping(), "'view' .*does not fit in"),
        (Idle(), "belong to no full or convolutional layer.*second"),
        (
            nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
            r"'1' \(LayerNorm\) does not fit in",
        ),
        (nn.Sequential(TWICE, nn.ReLU(), TWICE, nn.Linear(5, 3)), "layer '0' is used twice"),
        (
            nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)),
            "layer '0' .*normalise",
        ),
        (
            nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(4, 3)),
            "layer '0' is a convolution in groups",
        ),
        (
            nn.Sequential(nn.Conv2d(4, 4, 3), nn.Linear(4, 3)),
            "layer '1' works along the rows of maps",
        ),
        (
            nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(2), nn.Linear(4, 3)),
            r"'1' \(Flatten\) does not fit in",
        ),
        (nn.Sequential(nn.Flatten()), "no full or convolutional layer"),
    ],
)
def test_other_networks_are_refused_by_the_name_of_what_does_not_fit(
    net: nn.Module, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        chain(net)


def test_a_run_of_fedma_refuses_a_network_it_cannot_match_before_it_begins() -> None:
    with pytest.raises(InputError, match=r"'first' .*does not fit in"):
        small_run("fedma()", DATA, Residual().double())


# --- FedMA

FEDMA_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("fedma({})", "plain", {}),
    ("fedma({})", "bn", {}),
    ("fedma({}, form='once')", "plain", {"once": True}),
    ("fedma({}, form='once', sweeps=0)", "bn", {"once": True, "sweeps": 0}),
    ("fedma({}, weights='examples')", "plain", {"by_examples": True}),
    ("fedma({}, head='examples')", "bn", {"by_labels": False}),
    ("fedma({}) | dkd(steps=2, batch_size=5, lr=0.3)", "plain", {"dkd_steps": 2}),
    (
        "fedma({}, form='once') | dkd(steps=2, batch_size=5, lr=0.3)",
        "bn",
        {"once": True, "dkd_steps": 2},
    ),
]


def twin_network(kind: str) -> nn.Sequential:
    """Units that come in pairs which hardly differ at first: clients give them different roles, and
    matching has work to do.
    """
    net = image_network(kind)
    assert isinstance(net, nn.Sequential)
    with torch.no_grad():
        for module in list(net.children())[:-1]:
            if isinstance(module, nn.Linear | nn.Conv2d):
                twins = len(module.weight) // 2 * 2
                for tensor in module.parameters():
                    tensor[1:twins:2] = tensor[0:twins:2] + 0.01 * tensor[1:twins:2]
    return net


@pytest.mark.parametrize(("text", "kind", "settings"), FEDMA_CASES)
@pytest.mark.parametrize("cohort", [3, 4])
def test_two_rounds_of_fedma_equal_the_plain_computation(
    text: str, kind: str, settings: dict[str, Any], cohort: int
) -> None:
    start, seed = twin_network(kind), 5
    layers = [["0", "1"], ["4", "5"], ["7"]] if kind == "bn" else [["0"], ["3"], ["5"]]
    sgd = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
    plain = PlainFedMA(
        copy.deepcopy(start), IMAGES, seed, layers, sgd, Reads(6, epochs=2), **settings
    )
    plain.run(rounds=2, cohort=cohort)
    assert plain.moved > 0  # else agreement would mean little
    result = simulate(
        model=start,
        clients=IMAGES,
        test=IMAGES[0],
        method=text.format(LOCAL),
        rounds=2,
        cohort=cohort,
        seed=seed,
        initial=start.state_dict(),
        dtype=torch.float64,
    )
    assert distance(result.params, plain.net.state_dict()) < 1e-10


@pytest.mark.parametrize(
    "text",
    [
        "fedma({}, form='once', weights='examples', head='examples')",
        "fedma({}, form='once', sweeps=0)",
    ],
)
def test_fedma_of_clients_that_hardly_moved_is_their_average(text: str) -> None:
    """Every unit is nearest to itself, and equal clients have equal weights."""
    data = (
        DATA
        if "examples" in text
        else [DATA[0], (DATA[1][0][:12], DATA[0][1]), (DATA[2][0][:12], DATA[0][1])]
    )
    local = "epochs=2, batch_size=100, lr=0.001"
    matched, average = (small_run(one.format(local), data, NET) for one in (text, "fedavg({})"))
    assert distance(matched.params, average.params) < 1e-12


def test_fedma_of_a_single_client_is_that_client_s_training() -> None:
    local = "epochs=3, batch_size=8"
    once, alone = (
        small_run(text, DATA, NET, cohort=1)
        for text in (f"fedma({local}, form='once')", f"fedavg({local})")
    )
    assert distance(once.params, alone.params) < 1e-12


def test_in_exchange_l_the_layers_before_are_frozen_and_the_others_are_the_clients() -> None:
    engine, _ = watched(parse("fedma(epochs=1, batch_size=8, momentum=0.9, weight_decay=0.1)"))
    sent = [
        (name, order.cohort, set(order.sent))
        for name, order, _ in engine.seen
        if name.startswith("layer")
    ]
    assert sent[0] == ("layer 1", (0, 1, 2), {"params", "buffers", "rates"})
    assert sent[1:] == [("layer 2", (k,), {"matched", "own", "rates"}) for k in (0, 1, 2)]
    first = [dict(order.sent["matched"]) for name, order, _ in engine.seen if name == "layer 2"]
    assert all(set(layer) == {"0.weight", "0.bias"} for layer in first)
    assert distance(first[0], first[1]) == 0


def test_fedma_sends_one_layer_at_a_time() -> None:
    """Up: one model in all, and the labels' counts.

    Down: the model, then every layer but the last once more, and the order.
    """
    layers = [5 * 7 + 7, 7 * 3 + 3]
    row = small_run("fedma()", DATA, NET, rounds=1, cohort=2).history[0]
    assert row["bytes_up"] == 2 * 8 * (sum(layers) + 3)
    assert row["bytes_down"] == 2 * 8 * (sum(layers) + 1 + layers[0] + 7 + 1)
    assert row["communications"] == 2
    once = small_run("fedma(form='once')", DATA, NET, rounds=1, cohort=2).history[0]
    assert (once["bytes_up"], once["bytes_down"]) == (
        2 * 8 * (sum(layers) + 3),
        2 * 8 * (sum(layers) + 1),
    )
    assert (once["communications"], once["local_steps"]) == (1, row["local_steps"] / 2)


def test_fedma_goes_on_without_a_client_that_falls_silent() -> None:
    method = parse("fedma(batch_size=100, epochs=1, lr=0.5)")
    _, silent = watched(method, silent={"layer 1": {1}})
    smaller = small_run(str(method), [DATA[0], DATA[2]], NET, rounds=1)
    assert distance(dict(silent.state["params"]), smaller.params) < 1e-12
    _, later = watched(method, silent={"layer 2": {0}})
    assert distance(dict(later.state["params"]), smaller.params) > 1e-6
    assert "fedma" not in later.state


# --- Astraea

ASTRAEA_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("astraea({}, gamma=2)", "plain", {"gamma": 2}),
    ("astraea({}, gamma=3, passes=2)", "bn", {"gamma": 3, "passes": 2}),
    (
        "astraea({}, gamma=5) | dkd(steps=2, batch_size=5, lr=0.3)",
        "plain",
        {"gamma": 5, "dkd_steps": 2},
    ),
    (
        "astraea({}, gamma=2) | dkd(steps=2, batch_size=5, lr=0.3)",
        "bn",
        {"gamma": 2, "dkd_steps": 2},
    ),
]


@pytest.mark.parametrize(("text", "kind", "settings"), ASTRAEA_CASES)
@pytest.mark.parametrize("cohort", [3, 4])
def test_two_rounds_of_astraea_equal_the_plain_computation(
    text: str, kind: str, settings: dict[str, Any], cohort: int
) -> None:
    start, seed = image_network(kind), 5
    assert isinstance(start, nn.Sequential)
    sgd = {"lr": 0.05, "momentum": 0.5, "weight_decay": 0.01}
    settings = {"passes": 1, **settings}
    plain = PlainAstraea(
        copy.deepcopy(start), IMAGES, seed, 3, settings=sgd, reads=Reads(6, epochs=2), **settings
    )
    plain.run(rounds=2, cohort=cohort)
    result = simulate(
        model=start,
        clients=IMAGES,
        test=IMAGES[0],
        method=text.format(LOCAL),
        rounds=2,
        cohort=cohort,
        seed=seed,
        initial=start.state_dict(),
        dtype=torch.float64,
    )
    assert distance(result.params, plain.net.state_dict()) < 1e-10


def test_astraea_with_one_client_to_a_mediator_is_fedavg() -> None:
    local = "epochs=2, batch_size=100, lr=0.5"
    mediated, average = (
        small_run(text, DATA, NET) for text in (f"astraea({local}, gamma=1)", f"fedavg({local})")
    )
    assert distance(mediated.params, average.params) < 1e-12


def test_a_mediator_of_one_client_that_it_visits_twice_trains_twice_as_long() -> None:
    twice, longer = (
        small_run(text, DATA[:1], NET, rounds=1)
        for text in (
            "astraea(epochs=2, batch_size=100, passes=2)",
            "fedavg(epochs=4, batch_size=100)",
        )
    )
    assert distance(twice.params, longer.params) < 1e-12


def test_mediators_gather_clients_whose_labels_balance() -> None:
    # two clients with each label alone
    labels = torch.eye(3, dtype=torch.float64).repeat_interleave(2, 0) * 10
    assert mediators([0, 1, 2, 3, 4, 5], labels, 3) == [[0, 2, 4], [1, 3, 5]]
    assert mediators([1, 4, 5], labels, 2) == [[1, 4], [5]]
    assert mediators([0], labels, 4) == [[0]]


def test_every_client_of_a_cohort_has_one_seat() -> None:
    labels = torch.randint(0, 20, (23, 4), generator=torch.Generator().manual_seed(0)).double()
    groups = mediators(range(23), labels, 5)
    assert [len(group) for group in groups] == [5, 5, 5, 5, 3]
    assert sorted(client for group in groups for client in group) == list(range(23))


def test_clients_report_their_labels_once_and_each_hop_is_a_communication() -> None:
    params = sum(parameter.numel() for parameter in NET.parameters())
    rows = small_run("astraea(gamma=2, epochs=1, batch_size=8)", DATA, NET, rounds=2).history
    assert [row["communications"] for row in rows] == [1 + 2, 1 + 2 + 2]
    # counts, then models
    assert [row["bytes_up"] for row in rows] == [8 * 3 * (3 + params), 8 * 3 * (3 + 2 * params)]
    # learning rate, first pass or not
    assert [row["bytes_down"] for row in rows] == [8 * 3 * t * (params + 2) for t in (1, 2)]
    steps = sum(-(-n // 8) for n in (12, 20, 33)) / 3
    assert [row["local_steps"] for row in rows] == pytest.approx([1 + steps, 1 + 2 * steps])


def test_more_seats_than_clients_cost_nothing() -> None:
    few, many = (small_run(f"astraea(gamma={gamma})", DATA, NET, rounds=1) for gamma in (3, 10))
    assert distance(few.params, many.params) == 0
    assert few.history[0]["communications"] == many.history[0]["communications"] == 4


def test_a_mediator_goes_on_with_the_model_it_has_when_a_client_falls_silent() -> None:
    method = parse("astraea(gamma=3, epochs=1, batch_size=100, lr=0.5)")
    world = World(clients=3, classes=3)
    _, silent = watched(method, silent={"local": {1}}, world=world)
    _, census = watched(method, silent={"labels": {1}}, world=world)
    alone = small_run(str(method), [DATA[0], DATA[2]], NET, rounds=1)
    assert distance(dict(census.state["params"]), alone.params) < 1e-12
    assert distance(dict(silent.state["params"]), alone.params) < 1e-12
    assert int(silent.state["astraea"]["examples"]) == 12 + 33


# --- engines


def play_on(engine: str, text: str, norm: bool, **options: Any) -> tuple[list[Any], list[Any]]:
    model = functional(engine_network(norm))
    starts = [model.initial(("init", seed)) for seed in (0, 1)]
    job = job_of(
        model, text, [world_of(seed) for seed in (0, 1)], starts, (0, 1), rounds=3, cohort=3
    )
    runs, rows = play_job(job, engine, **options)
    return [run.state for run in runs], list(rows[-1].values())


ENGINE_CASES = [
    "fedma(epochs=1, batch_size=8, lr=0.03)",
    "fedma(epochs=1, batch_size=8, weights='examples', optimiser='adam', lr=0.01, eps=0.001)",
    "fedma(form='once', epochs=1, batch_size=8) | dkd(steps=2, batch_size=14)",
    "astraea(gamma=2, epochs=1, batch_size=8, lr=0.03)",
    "astraea(gamma=2, passes=2, epochs=1, batch_size=8, lr=0.03) | dkd(steps=2, batch_size=14)",
]
COSTS = ("communications", "local_steps", "bytes_up", "bytes_down")


@pytest.mark.parametrize("text", ENGINE_CASES)
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
def test_batched_agrees_with_serial(text: str, norm: bool) -> None:
    expected, rows = play_on("serial", text, norm)
    for way in ("vmap", "loop", "vmap in chunks"):
        found, same = play_on("batched", text, norm, **WAYS[way])
        assert apart(expected, found) < 1e-12, way
        assert [[row[name] for name in COSTS] for row in same] == [
            [row[name] for name in COSTS] for row in rows
        ]


@pytest.mark.parametrize(
    "text",
    ["fedma(steps=2, batch_size=10, lr=0.03)", "astraea(gamma=2, steps=2, batch_size=10, lr=0.03)"],
)
def test_the_pool_and_traced_steps_agree_with_serial(text: str) -> None:
    expected, _ = play_on("serial", text, False)
    assert apart(expected, play_on("pool", text, False, workers=2)[0]) < 1e-12
    assert apart(expected, play_on("batched", text, False, strategy="traced")[0]) < 1e-12


@pytest.mark.parametrize("rule", [Collect.MEAN_BY_EXAMPLES, Collect.MEAN_BY_CLIENTS])
def test_what_the_parts_of_a_cohort_send_is_gathered_as_if_it_were_one(rule: Collect) -> None:
    (phase,) = parse("fedavg(epochs=1, batch_size=100)").phases
    note = {"buffers": Collect.EVERY, "params": rule}

    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        mean = combine(lambda tensor: tensor.mean(0), collected["all"])
        return {
            **state,
            "params": collected["params"],
            "mean": mean,
            "who": only(rates, ("clients", "examples")),
        }

    whole = replace(phase, collect=note, every={"all": "params"}, server=server)
    split = replace(
        whole, parts=lambda state, cohort, step: [Part(cohort[:1], {}), Part(cohort[1:], {})]
    )
    ends = [watched(Method((one,)))[1] for one in (whole, split)]
    for group in ("params", "mean", "who"):
        assert distance(dict(ends[0].state[group]), dict(ends[1].state[group])) < 1e-12
    assert ends[0].state["who"]["examples"].tolist() == [12, 20, 33]
    assert ends[0].costs == ends[1].costs


WRONG = [
    "fedma(form='twice')",
    "fedma(weights='labels')",
    "fedma(sweeps=-1)",
    "fedma(head=2)",
    "astraea(gamma=0)",
]


@pytest.mark.parametrize("text", [*WRONG, "astraea(passes=0)"])
def test_wrong_options_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=text.partition("(")[2].partition("=")[0]):
        parse(text)
