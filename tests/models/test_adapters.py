"""LoRA adapters: against plain PyTorch with whole weights, their names, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear, relu

from feddkd import InputError, lora, simulate
from feddkd.data.batches import Reads
from feddkd.models.adapters import adapters
from plain import Plain
from small import distance, pooled
from test_reference import DKD, DKD_TEXT, SGD, clients

LOCAL, READS = "epochs=2, batch_size=4, lr=0.05", Reads(4, epochs=2)
TEACH = DKD_TEXT.format("")


def base() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 6), nn.ReLU(),
        nn.Linear(6, 3),
    ).double()  # fmt: skip


class Whole(nn.Module):
    """The same network by hand: whole weights W + R + s B A; W and R are buffers."""

    def __init__(self, net: nn.Module, scale: float, frozen: bool) -> None:
        super().__init__()
        self.scale, self.head = scale, copy.deepcopy(net.get_submodule("5"))
        for place, layer in (("first", "0"), ("second", "3")):
            state = net.get_submodule(layer).state_dict()
            a, b = state["lora_A.default.weight"], state["lora_B.default.weight"]
            if frozen:
                self.register_buffer(f"{place}_a", a.clone())
            else:
                self.register_parameter(f"{place}_a", nn.Parameter(a.clone()))
            self.register_parameter(f"{place}_b", nn.Parameter(b.clone()))
            self.register_buffer(f"{place}_w", state["base_layer.weight"].clone())
            self.register_buffer(f"{place}_bias", state["base_layer.bias"].clone())
            self.register_buffer(f"{place}_r", torch.zeros_like(state["base_layer.weight"]))

    def adapter(self, place: str) -> Tensor:
        a, b = getattr(self, f"{place}_a"), getattr(self, f"{place}_b")
        flat: Tensor = b.reshape(len(b), -1) @ a.reshape(len(a), -1)
        return self.scale * flat.reshape(self.get_buffer(f"{place}_w").shape)

    def whole(self, place: str) -> Tensor:
        frozen: Tensor = getattr(self, f"{place}_w") + getattr(self, f"{place}_r")
        return frozen + self.adapter(place)

    def forward(self, x: Tensor) -> Tensor:
        x = relu(conv2d(x, self.whole("first"), self.get_buffer("first_bias"), padding=1))
        x = relu(linear(x.flatten(1), self.whole("second"), self.get_buffer("second_bias")))
        logits: Tensor = self.head(x)
        return logits

    def named(self) -> dict[str, Tensor]:
        """Return what clients train, and the residuals, by the names of the adapted network."""
        found = {f"5.{name}": tensor for name, tensor in self.head.state_dict().items()}
        for place, layer in (("first", "0"), ("second", "3")):
            found[f"{layer}.lora_B.default.weight"] = self.get_parameter(f"{place}_b")
            if f"{place}_a" in dict(self.named_parameters()):
                found[f"{layer}.lora_A.default.weight"] = self.get_parameter(f"{place}_a")
            found[f"{layer}.residual"] = self.get_buffer(f"{place}_r")
        return {name: tensor.detach() for name, tensor in found.items()}


class Training(Plain):
    """Local training, the average of factors, and DKD."""

    exact = False

    def average(self, teachers: dict[int, nn.Module]) -> None:
        """Average the factors; exactly: choose R so that the whole weight is the clients' mean."""
        super().average(teachers)
        if not self.exact:
            return
        total = sum(len(self.clients[k][1]) for k in teachers)
        for place in ("first", "second"):
            mean = torch.stack(
                [
                    len(self.clients[k][1]) / total * whole_of(net, place)
                    for k, net in teachers.items()
                ]
            ).sum(0)
            residual = self.net.get_buffer(f"{place}_r")
            residual += mean - whole_of(self.net, place)


def whole_of(net: nn.Module, place: str) -> Tensor:
    assert isinstance(net, Whole)
    return net.whole(place).detach()


class Exact(Training):
    exact = True


# text -> the plain computation
CASES: list[tuple[str, type[Training], dict[str, Any], dict[str, Any]]] = [
    (f"fedavg({LOCAL})", Training, {}, {}),
    (f"fedavg({LOCAL}) | {TEACH}", Training, {"alpha": 6.0}, {"dkd": DKD}),
    (f"fedavg({LOCAL}) | {TEACH}", Training, {"factors": "B"}, {"dkd": DKD}),
    (f"fedex_lora({LOCAL})", Exact, {"residual": True, "alpha": 6.0}, {}),
    (f"fedex_lora({LOCAL}) | {TEACH}", Exact, {"residual": True}, {"dkd": DKD}),
]


@pytest.mark.parametrize("engine", ["serial", "batched"])
@pytest.mark.parametrize(("text", "make", "options", "settings"), CASES)
def test_three_rounds_on_adapters_equal_those_on_whole_weights(
    text: str, make: type[Training], options: dict[str, Any], settings: dict[str, Any], engine: str
) -> None:
    net, data = lora(base(), rank=2, **options), clients()
    whole = Whole(net, options.get("alpha", 2.0) / 2, options.get("factors") == "B")
    plain = make(whole, data, 5, READS, SGD, 0.05, **settings)
    plain.run(rounds=3, cohort=3)
    result = simulate(
        model=net, clients=data, test=pooled(data), method=text, rounds=3, cohort=3, seed=5,
        engine=engine,
    )  # fmt: skip
    assert isinstance(plain.net, Whole)
    expected = plain.net.named()
    if not options.get("residual"):
        expected = {name: t for name, t in expected.items() if not name.endswith("residual")}
    else:
        assert max(t.abs().max() for n, t in expected.items() if n.endswith("residual")) > 1e-6
    assert distance(result.params, expected) < 1e-10


def test_an_adapted_network_begins_as_the_network_and_leaves_it_as_it_was() -> None:
    net = base()
    before = copy.deepcopy(net.state_dict())
    adapted, x = lora(net, rank=2), clients()[0][0]
    assert torch.equal(adapted(x), net(x))
    assert distance(net.state_dict(), before) == 0
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_only_adapters_and_the_head_are_trained_and_sent() -> None:
    net, data = lora(base(), rank=2), clients()
    trained = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    factors = {f"{n}.lora_{f}.default.weight" for n in ("0", "3") for f in "AB"}
    assert trained == factors | {"5.weight", "5.bias"}
    result = simulate(model=net, clients=data, test=pooled(data), method="fedavg(epochs=1)")
    numbers = 2 * 9 + 3 * 2 + 2 * 48 + 6 * 2 + 21
    assert result.history[0]["bytes_up"] == 8 * numbers * len(data)
    assert result.params.keys() == trained


def test_residuals_are_sent_to_clients_and_not_back() -> None:
    net, data = lora(base(), rank=2, residual=True), clients()
    row = simulate(
        model=net, clients=data, test=pooled(data), method="fedex_lora(epochs=1)"
    ).history[0]
    residuals = 8 * (27 + 6 * 48)
    assert row["bytes_down"] - row["bytes_up"] == (residuals + 8) * len(data)  # and the rate


@pytest.mark.parametrize("kind", ["attention", "encoder"])
def test_code_that_reads_a_layers_weight_sees_the_adapter(kind: str) -> None:
    torch.manual_seed(0)
    make = nn.MultiheadAttention if kind == "attention" else nn.TransformerEncoderLayer
    layer = make(8, 2, batch_first=True).double().eval()
    net = lora(nn.ModuleDict({"layer": layer, "head": nn.Linear(8, 3).double()}), rank=2)
    for adapted in adapters(net).values():
        nn.init.normal_(adapted.get_parameter("lora_B.default.weight"))
    whole = copy.deepcopy(layer)
    for name, adapted in adapters(net).items():
        part = whole.get_submodule(name.removeprefix("layer."))
        part.weight = nn.Parameter(adapted.weight.detach())
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    inputs = (x, x, x) if kind == "attention" else (x,)
    with torch.no_grad():
        expected, found = whole(*inputs), net["layer"](*inputs)  # type: ignore[index]
    if kind == "attention":
        expected, found = expected[0], found[0]
    assert len(adapters(net)) == (1 if kind == "attention" else 3)
    assert (found - expected).abs().max() < 1e-12


def test_a_layer_at_two_places_gets_one_adapter() -> None:
    shared = nn.Linear(4, 4)
    net = lora(nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(4, 2)), rank=1)
    assert net.get_submodule("0") is net.get_submodule("2")
    assert len(adapters(net)) == 1


def test_the_seed_draws_a_and_b_begins_at_zero_where_a_function_builds_the_network() -> None:
    data = clients()
    method = "fedavg(epochs=1, lr=1e-30)"
    first, second = (
        simulate(
            model=lambda: lora(base_as_drawn), clients=data, test=pooled(data), method=method,
            seed=seed,
        ).params
        for seed in (0, 1)
    )  # fmt: skip
    assert not torch.equal(first["3.lora_A.default.weight"], second["3.lora_A.default.weight"])
    assert second["3.lora_B.default.weight"].abs().max() < 1e-20


base_as_drawn = base()


@pytest.mark.parametrize(
    ("targets", "names"),
    [("3", {"3"}), ("0, 3", {"0", "3"}), (["*"], {"0", "3", "5"}), (None, {"0", "3"})],
)
def test_targets_are_names_and_patterns(targets: Any, names: set[str]) -> None:
    net = lora(base(), targets=targets)
    assert adapters(net).keys() == names
    head = net.get_submodule("5")
    whole = isinstance(head, nn.Linear)
    assert whole == ("5" not in names)
    assert all(parameter.requires_grad for parameter in head.parameters()) == whole


def test_the_end_of_a_name_is_enough() -> None:
    net = nn.ModuleDict({"block": nn.ModuleDict({"q_proj": nn.Linear(3, 3)}), "q": nn.Linear(3, 3)})
    assert adapters(lora(net, targets="q_proj", trained="")).keys() == {"block.q_proj"}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 2.5}, "rank"),
        ({"targets": "4.*"}, "targets"),
        ({"targets": "1"}, "targets"),
        ({"trained": "nothing"}, "trained"),
        ({"factors": "A"}, "factors"),
        ({"alpha": 0}, "alpha"),
        ({"alpha": "x"}, "alpha"),
        ({"targets": 5}, "targets"),
        ({"targets": [3]}, "targets"),
        ({"targets": ""}, "0, 3, 5"),
        ({"residual": "yes"}, "residual"),
        ({"net": "mlp"}, "net"),
        ({"net": nn.Linear(3, 3)}, "single layer"),
        ({"net": nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), "targets": "0"}, "groups"),
        ({"net": nn.Sequential(nn.Flatten(), nn.Linear(3, 3))}, "adapter"),
        ({"net": lora(base_as_drawn)}, "already"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_refused(change: dict[str, Any], part: str) -> None:
    options = {"net": base_as_drawn, **change}
    with pytest.raises(InputError, match=part):
        lora(options.pop("net"), **options)


@pytest.mark.parametrize(
    ("options", "method", "part"),
    [
        ({}, "fedex_lora(epochs=1)", "residual"),
        ({"residual": True}, "fedex_lora(epochs=1) | private(names='*lora_B*')", "keep"),
    ],
)
def test_fedex_lora_says_what_it_needs(options: dict[str, Any], method: str, part: str) -> None:
    data = clients()
    with pytest.raises(InputError, match=part):
        simulate(
            model=lora(base(), **options), clients=data, test=pooled(data), method=method
        )  # fmt: skip


class Others(nn.Linear):
    """A layer with an adapter that lora() has not made."""

    def __init__(self) -> None:
        super().__init__(16, 3, dtype=torch.float64)
        self.lora_A = nn.Linear(16, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = super().forward(x.flatten(1)) + self.lora_A(x.flatten(1))
        return logits


def test_fedex_lora_refuses_adapters_of_others() -> None:
    data = clients()
    net = nn.Sequential(Others())
    with pytest.raises(InputError, match="lora_A"):
        simulate(model=net, clients=data, test=pooled(data), method="fedex_lora(epochs=1)")


def test_fedex_lora_of_frozen_a_is_fedavg() -> None:
    data = clients()
    net = lora(base(), factors="B")
    options: dict[str, Any] = {"model": net, "clients": data, "test": pooled(data), "rounds": 2}
    exact = simulate(method=f"fedex_lora({LOCAL})", **options)
    assert distance(exact.params, simulate(method=f"fedavg({LOCAL})", **options).params) < 1e-12
