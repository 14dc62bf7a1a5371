"""Kinds of tensors, initial weights, tensors kept at clients, and networks refused by name."""

# mypy: disable-error-code="no-any-return"

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from commandline import Feddkd
from feddkd import InputError, functional, parse, private, simulate
from feddkd.data.batches import Reads
from feddkd.experiment import Experiment
from feddkd.models.registry import MODELS, Architecture
from feddkd.runs.runner import execute
from own_networks import CASES, Attention, Encoder, TiedLanguage, frozen_backbone
from plain_networks import PlainNetworks
from small import clients as vectors
from test_own_networks import METHODS, WAYS, data, run

LOCAL = "fedavg(epochs=1, batch_size=8)"


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


# --- frozen, tied, non-persistent


def test_frozen_tensors_are_neither_trained_nor_sent_nor_held_by_clients() -> None:
    net, pairs = seeded(frozen_backbone), data(CASES["frozen backbone"])
    pairs = [(x.float(), y) for x, y in pairs]
    result = simulate(
        model=net, clients=pairs, test=pairs[0], method=f"{LOCAL} | dkd(steps=2)", rounds=2
    )
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    persistent = dict(net.named_buffers())
    assert set(result.params) == {*trainable, *persistent}
    floats = sum(
        tensor.numel()
        for tensor in {**trainable, **persistent}.values()
        if tensor.is_floating_point()
    )
    sent_once = 4 * floats + 8  # and batch norm's counter
    gradients = 4 * sum(tensor.numel() for tensor in trainable.values())
    assert result.history[0]["bytes_up"] == len(pairs) * (sent_once + 2 * gradients)
    after = result.state_dict()
    for name, parameter in net.named_parameters():
        assert torch.equal(after[name], parameter.detach()) == (not parameter.requires_grad)


def test_tied_weights_are_one_tensor_in_messages_and_two_names_in_the_state_dict() -> None:
    net, pairs = seeded(TiedLanguage), data(CASES["tied language model"])
    result = simulate(model=net, clients=pairs, test=pairs[0], method=LOCAL)
    assert set(result.params) == {"embed.weight", "mix.weight", "mix.bias"}
    assert result.history[0]["bytes_up"] == len(pairs) * 4 * sum(
        p.numel() for p in net.parameters()
    )
    state = result.state_dict()
    assert torch.equal(state["embed.weight"], state["out.weight"])
    net.load_state_dict(state)
    how: dict[str, Any] = {"clients": pairs, "test": pairs[0], "method": LOCAL, "engine": "serial"}
    again = simulate(model=net, **how)
    from_state = simulate(model=seeded(TiedLanguage), initial=state, **how)
    assert all(
        torch.equal(tensor, from_state.params[name]) for name, tensor in again.params.items()
    )


def test_two_values_for_one_tied_tensor_are_refused() -> None:
    net = seeded(TiedLanguage)
    state = {**net.state_dict(), "out.weight": torch.zeros(11, 4)}
    with pytest.raises(InputError, match=r"embed\.weight.*out\.weight"):
        functional(net).loaded(state)


def test_all_parameters_frozen_is_an_error() -> None:
    net = nn.Linear(5, 3).requires_grad_(False)
    with pytest.raises(InputError, match="requires_grad"):
        simulate(model=net, clients=vectors(), test=vectors()[0], method=LOCAL)


@pytest.mark.parametrize("way", ["serial", "vmap", "pool"])
def test_the_result_loads_into_the_module_whatever_its_tensors_are(way: str) -> None:
    for name in (
        "transformer decoder, non-persistent buffers",
        "shared layers",
        "spectral norm",
        "frozen backbone",
    ):
        net = seeded(CASES[name].build).double()
        found, _ = run(CASES[name], net, METHODS["fedavg"][0], WAYS[way], rounds=1)
        net.load_state_dict(found, strict=True)


# --- where it starts


def test_a_network_given_as_an_object_starts_from_its_weights() -> None:
    net = seeded(lambda: nn.Linear(5, 3)).double()
    nn.init.orthogonal_(net.get_parameter("weight"))
    still = simulate(model=net, clients=vectors(), test=vectors()[0], method="fedavg(lr=1e-300)")
    assert torch.allclose(still.params["weight"], net.get_parameter("weight").detach(), rtol=1e-14)


class Everywhere(nn.Module):
    """Draws its first weights from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Parameter(torch.randn(3, 6)),
            nn.Parameter(torch.tensor(np.random.randn(3)).float()),
        )
        self.c, self.attend = nn.Parameter(torch.tensor(random.random())), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a, self.b) * self.c + self.attend(x)


def test_seeds_decide_every_tensor_of_a_network_that_is_built_for_the_run() -> None:
    pairs = [(x.float(), y) for x, y in data(CASES["own parameters"])]
    states: list[Any] = [torch.get_rng_state(), repr(np.random.get_state()), random.getstate()]

    def first(seed: int) -> dict[str, Tensor]:
        return simulate(
            model=build, clients=pairs, test=pairs[0], method="fedavg(lr=1e-30)", seed=seed
        ).params

    def build() -> nn.Module:
        net = Everywhere()
        nn.init.normal_(net.attend.attend.in_proj_bias)
        nn.init.normal_(net.attend.attend.out_proj.bias)
        return net

    runs = [first(seed) for seed in (0, 1, 2)]
    assert all(torch.equal(tensor, first(1)[name]) for name, tensor in runs[1].items())
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert not any(torch.equal(runs[one][name], runs[other][name]) for name in runs[0])
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == [repr(np.random.get_state()), random.getstate()]


def test_weight_files_come_as_a_state_dict_a_module_or_a_file(tmp_path: Path) -> None:
    net, pairs = seeded(TiedLanguage), data(CASES["tied language model"])
    save_file(
        {name: tensor.clone() for name, tensor in net.state_dict().items()},
        tmp_path / "w.safetensors",
    )
    forms: list[Any] = [
        net.state_dict(),
        net,
        functional(net),
        tmp_path / "w.safetensors",
        str(tmp_path / "w.safetensors"),
        {**dict(net.named_parameters()), **dict(net.named_buffers())},
    ]
    ends = [
        simulate(
            model=lambda: TiedLanguage(), clients=pairs, test=pairs[0], method=LOCAL, initial=form
        )
        for form in forms
    ]
    direct = simulate(model=net, clients=pairs, test=pairs[0], method=LOCAL)
    assert all(
        torch.equal(end.params[name], tensor)
        for end in ends
        for name, tensor in direct.params.items()
    )


def test_frozen_weights_too_come_from_the_initial_state() -> None:
    net, other = seeded(frozen_backbone), frozen_backbone()
    model = functional(other).loaded(net.state_dict())
    assert all(
        torch.equal(model.constants[name], net.state_dict()[name]) for name in model.constants
    )
    assert len(model.constants) == 6


# --- experiments


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks for experiments on the digits: one with attention, one with a random backbone
    that is frozen.
    """

    def attentive() -> Architecture:
        def build(shape: tuple[int, ...], classes: int) -> nn.Module:
            return nn.Sequential(
                nn.Flatten(1, 2),
                nn.TransformerEncoderLayer(8, 2, 8, batch_first=True),
                nn.Flatten(),
                nn.Linear(64, classes),
            )

        return Architecture(build)

    def random_features() -> Architecture:
        def build(shape: tuple[int, ...], classes: int) -> nn.Module:
            frozen = nn.Linear(64, 20).requires_grad_(False)
            return nn.Sequential(nn.Flatten(), frozen, nn.Tanh(), nn.Linear(20, classes))

        return Architecture(build)

    monkeypatch.setattr(MODELS, "_factories", dict(MODELS._factories))
    MODELS.register(attentive)
    MODELS.register(random_features)


def experiment(**keys: Any) -> Experiment:
    return Experiment(
        **{"method": "fedavg(epochs=1)", "clients": 4, "rounds": 2, "model": "attentive", **keys}
    )


def test_two_runs_of_a_network_with_attention_are_the_same_bytes(
    attention: None, tmp_path: Path
) -> None:
    ends: list[tuple[bytes, bytes]] = []
    for out in (tmp_path / "a", tmp_path / "b"):
        torch.manual_seed(len(ends))  # what the generator held before does not matter
        execute([experiment()], out=out, engine="serial")
        (folder,) = out.iterdir()
        ends.append(
            ((folder / "rounds.jsonl").read_bytes(), (folder / "final.safetensors").read_bytes())
        )
    assert ends[0] == ends[1]


def test_seeds_that_differ_in_frozen_weights_are_run_one_by_one(
    attention: None, tmp_path: Path
) -> None:
    seeds = [experiment(model="random_features", seed=seed) for seed in (0, 1)]
    execute(seeds, out=tmp_path / "together", engine="batched", options={"strategy": "vmap"})
    for one in seeds:
        execute([one], out=tmp_path / "alone", engine="batched", options={"strategy": "vmap"})
    for folder in (tmp_path / "together").iterdir():
        assert (folder / "rounds.jsonl").read_bytes() == (
            tmp_path / "alone" / folder.name / "rounds.jsonl"
        ).read_bytes()
    frozen = [
        load_file(folder / "final.safetensors")["1.weight"]
        for folder in (tmp_path / "alone").iterdir()
    ]
    assert not torch.equal(*frozen)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["parameters"] == 20 * 10 + 10
    assert len(manifest["constants"]) == 64


def test_an_experiment_starts_from_a_file_and_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Experiment(method="fedavg(epochs=1)", clients=4, rounds=1)
    execute([first], out=tmp_path / "first", engine="serial")
    (folder,) = (tmp_path / "first").iterdir()
    (tmp_path / "w.safetensors").write_bytes((folder / "final.safetensors").read_bytes())
    second = Experiment(
        method="fedavg(lr=1e-30, epochs=1)", clients=4, rounds=1, initial="w.safetensors"
    )
    execute([second], out=tmp_path / "second", engine="serial")
    (folder,) = (tmp_path / "second").iterdir()
    before, after = load_file("w.safetensors"), load_file(folder / "final.safetensors")
    assert all(torch.allclose(before[name], after[name], rtol=1e-6) for name in before)
    moved = tmp_path / "elsewhere.safetensors"
    (tmp_path / "w.safetensors").rename(moved)
    assert (
        Experiment(**{**second.as_dict(), "initial": str(moved)}).digest
        == second.digest
        != first.digest
    )
    # a record is read without the file
    assert Experiment(**second.as_dict()).digest == second.digest
    moved.write_bytes(b"damaged")
    with pytest.raises(InputError, match="sha256"):
        execute(
            [Experiment(**{**second.as_dict(), "initial": str(moved)})],
            out=tmp_path / "third",
            engine="serial",
        )


# --- private by name


@pytest.mark.parametrize("way", ["serial", "vmap", "loop", "pool"])
@pytest.mark.parametrize("scaffold", [False, True])
def test_tensors_kept_by_name_are_each_clients_own(way: str, scaffold: bool) -> None:
    case = CASES["transformer encoder"]
    net = seeded(case.build).double()
    text = (
        f"{'scaffold' if scaffold else 'fedavg'}(epochs=1, batch_size=4, lr=0.05) |"
        " private(names='out.*, place')"
    )
    text += " | dkd(steps=2, batch_size=5, lr=0.3)"
    plain = PlainNetworks(
        copy.deepcopy(net),
        data(case),
        5,
        Reads(4, epochs=1),
        0.05,
        distil=2,
        scaffold=scaffold,
        own_names=lambda name: name.startswith("out.") or name == "place",
    )
    plain.run(rounds=2, cohort=3)
    pairs = data(case)
    result = simulate(
        model=net,
        clients=pairs,
        test=pairs[0],
        method=text,
        rounds=2,
        seed=5,
        dtype=torch.float64,
        engine=WAYS[way]["engine"],
    )
    assert result.history[-1]["test_client_accuracy"] == pytest.approx(
        [
            float((plain.view(k).eval()(pairs[0][0]).argmax(1) == pairs[0][1]).double().mean())
            for k in range(3)
        ]
    )
    for client in range(3):
        state = result.state_dict(client)
        for name, tensor in plain.view(client).state_dict().items():
            assert torch.allclose(state[name], tensor, rtol=0, atol=1e-10), name


def test_a_result_with_private_tensors_wants_to_know_whose_model_is_meant(tmp_path: Path) -> None:
    result = simulate(
        model=nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double(),
        clients=vectors(),
        test=vectors()[0],
        method=f"{LOCAL} | private(names='1.*')",
    )
    with pytest.raises(InputError, match=r"client=0"):
        result.state_dict()
    with pytest.raises(InputError, match="client 7"):
        result.state_dict(7)
    result.save(tmp_path / "shared.safetensors")
    assert set(load_file(tmp_path / "shared.safetensors")) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_private_names_may_be_given_apart_and_are_spelled_as_text(
    kind: Callable[[Sequence[str]], Sequence[str]],
) -> None:
    method = private(names=kind(("head.*", "*.bias")))
    assert str(method) == "private(names='head.*, *.bias')"
    assert method.private_patterns == {"head.*", "*.bias"}
    assert method == private(names="head.*, *.bias") == parse(str(method))
    assert private(names=kind(("head.*",))).canonical == private().canonical


def test_private_names_that_are_no_texts_are_refused() -> None:
    for names in ((), (1,), ("a", None), 1, {"a"}):
        with pytest.raises(InputError, match="names"):
            private(names=names)


def test_names_that_fit_nothing_and_everything_kept_at_home_are_refused() -> None:
    net, pairs = nn.Linear(5, 3).double(), vectors()
    with pytest.raises(InputError, match=r"'nope\.\*'.*bias, weight"):
        simulate(
            model=net, clients=pairs, test=pairs[0], method=f"{LOCAL} | private(names='nope.*')"
        )
    with pytest.raises(InputError, match="no shared model"):
        simulate(
            model=net, clients=pairs, test=pairs[0], method=f"{LOCAL} | private(names='*') | dkd()"
        )
    frozen = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 3)).double()
    with pytest.raises(InputError, match="never leave"):
        simulate(
            model=frozen, clients=pairs, test=pairs[0], method=f"{LOCAL} | private(names='0.*')"
        )
    with pytest.raises(InputError, match=r"fedgen.*shared"):
        simulate(
            model=net,
            clients=pairs,
            test=pairs[0],
            method="fedgen(epochs=1) | private(names='bias')",
        )
    with pytest.raises(InputError, match="global"):
        simulate(
            model=net,
            clients=pairs,
            test=pairs[0],
            method=f"{LOCAL} | private(names='bias')",
            evaluation="global",
        )
    assert (
        str(private(names="a.*") | private(names="b"))
        == "private(names='a.*') | private(names='b')"
    )


def test_fedma_refuses_tied_layers_and_tensors_that_clients_keep() -> None:
    net, pairs = (
        nn.Sequential(
            nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)
        ).double(),
        vectors(),
    )
    with pytest.raises(InputError, match=r"clients keep .*: 4\.bias"):
        simulate(
            model=net,
            clients=pairs,
            test=pairs[0],
            method="fedma(epochs=1) | private(names='4.bias')",
        )
    net[2].weight = net[0].weight
    with pytest.raises(InputError, match=r"share a tensor.*2\.weight"):
        simulate(model=net, clients=pairs, test=pairs[0], method="fedma(epochs=1)")


def test_simulate_takes_an_evaluation() -> None:
    net, pairs = nn.Linear(5, 3).double(), vectors()
    rows = [
        simulate(model=net, clients=pairs, test=pairs[0], method=LOCAL, evaluation=name).history[0]
        for name in ("global", "client_mean", "client_pooled")
    ]
    assert ["test_client_accuracy" in row for row in rows] == [False, True, True]
    with pytest.raises(InputError, match="client_mean, client_pooled, global"):
        simulate(model=net, clients=pairs, test=pairs[0], method=LOCAL, evaluation="nope")


# --- what is refused


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(5, 3)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        return self.out(x)


class Keeps(Broken):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.out(x) * self.calls


class DrawsFromNumpy(Broken):
    def forward(self, x: Tensor) -> Any:
        return self.out(x) * np.random.rand()


class DrawsUnkeyed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.multinomial(torch.ones(5), 5)


class ChangesAConstant(Broken):
    def forward(self, x: Tensor) -> Any:
        self.seen += 1
        return self.out(x)


class ReturnsATuple(Broken):
    def forward(self, x: Tensor) -> Any:
        return self.out(x), x


class HasABug(Broken):
    def forward(self, x: Tensor) -> Any:
        return self.out(x) / (1 // 0)


class SharesMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.out = nn.Linear(5, 4), nn.Linear(4, 5), nn.Linear(5, 3)
        self.decode.weight = nn.Parameter(self.encode.weight.t())

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.decode(self.encode(x)))


class Lists(Broken):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.out.weight]

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weights[0])


class Closes(Broken):
    def __init__(self) -> None:
        super().__init__()
        out = self.out
        self.compute: Callable[[Tensor], Any] = lambda x: out(x)

    def forward(self, x: Tensor) -> Any:
        return self.compute(x)


class Clamps(Broken):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.out.weight.clamp_(-0.1, 0.1)
        return self.out(x)


class Checkpoints(Broken):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.out, x, use_reentrant=False)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * slopes[0]


class Squares(Broken):
    def forward(self, x: Tensor) -> Any:
        return Square.apply(self.out(x))  # type: ignore[no-untyped-call]


class Rounds(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.long()


class Detaches(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.detach()


class Sums(Broken):
    def forward(self, x: Tensor) -> Any:
        return self.out(x).sum()


def hooked() -> nn.Module:
    layer = nn.Linear(5, 3)
    layer.weight.register_hook(lambda slope: 2 * slope)  # type: ignore[no-untyped-call]
    return layer


def with_buffer(tensor: Tensor, persistent: bool = True) -> nn.Module:
    layer = nn.Linear(5, 3)
    layer.register_buffer("seen", tensor, persistent=persistent)
    return layer


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(5, 3))


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(5, 3))
    layer(torch.zeros(1, 5))
    return nn.Sequential(layer)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        r"layer '0' \(LazyLinear\).*call the network once",
    ),
    "scripted": (scripted, r"torch\.jit"),
    "on meta": (lambda: nn.Linear(5, 3, device="meta"), r"'weight' is on the meta device"),
    "wrapped for several GPUs": (
        lambda: nn.DataParallel(nn.Linear(5, 3)),
        r"DataParallel.*\.module",
    ),
    "shared memory": (SharesMemory, r"'decode\.weight'.*share their memory|share their memory"),
    "keeps a state": (Keeps, "keeps a state"),
    "draws from numpy": (DrawsFromNumpy, r"random numbers .* cannot follow the seed"),
    "draws by a function without a key": (
        lambda: nn.Sequential(nn.Linear(5, 5), DrawsUnkeyed(), nn.Linear(5, 3)),
        r"layer '1' \(DrawsUnkeyed\)",
    ),
    "changes a constant": (ChangesAConstant, r"buffer 'seen'"),
    "a tuple": (ReturnsATuple, r"tuple of 2.*output="),
    "a bug": (HasABug, r"division.*test_network_kinds\.py, line \d+"),
    "no module": (lambda: "mlp", r"not str"),
    "a builder that returns no module": (lambda: lambda: 3, r"must return a torch\.nn\.Module"),
    "a builder that fails": (
        lambda: lambda: 1 // 0,
        r"builds the network failed.*test_network_kinds\.py, line \d+",
    ),
    "a parameter in a list": (Lists, r"'out\.weight' from a list"),
    "a layer in a closure": (Closes, r"'out\.(weight|bias)' from a list, a dict or a function"),
    "changes a parameter": (Clamps, r"changes its parameter 'out\.weight'"),
    "changes its input": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3)),
        "changes its input in place",
    ),
    "a hook on a tensor": (hooked, r"'weight' has a hook"),
    "checkpointing": (Checkpoints, "gradient of this network.*checkpointing"),
    "a function without setup_context": (Squares, r"gradient of this network.*setup_context"),
    "a complex buffer": (
        lambda: with_buffer(torch.ones(5, dtype=torch.complex64)),
        r"buffer 'seen' is complex",
    ),
    "logits of whole numbers": (
        lambda: nn.Sequential(nn.Linear(5, 3), Rounds()),
        r"logits must be.*torch\.int64",
    ),
    "one number for a batch": (Sums, r"logits must be.*of shape \(\)"),
    "outputs that nothing trains": (
        lambda: nn.Sequential(nn.Linear(5, 3), Detaches()),
        "gradient cannot be computed",
    ),
    "wrong input": (lambda: nn.Linear(7, 3), r"cannot read examples of shape \(5,\)"),
    "too few outputs": (lambda: nn.Linear(5, 2), r"3 logits or more.* returns 2"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
@pytest.mark.filterwarnings("ignore::UserWarning")  # LazyLinear
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(what: str) -> None:
    build, says = REFUSED[what]
    pairs = [(x.float(), y) for x, y in vectors()]
    with pytest.raises(InputError, match=says):
        simulate(model=build(), clients=pairs, test=pairs[0], method=LOCAL)


def test_a_class_and_any_other_callable_that_builds_a_network_is_called_under_the_seed() -> None:
    pairs = [(x.float(), y) for x, y in vectors()]
    forms: list[Any] = [
        Broken,
        lambda: Broken(),
        partial(Broken),
        type("Maker", (), {"__call__": lambda self: Broken()})(),
    ]
    ends = [
        simulate(
            model=form, clients=pairs, test=pairs[0], method=LOCAL, seed=3, engine="serial"
        ).params
        for form in forms
    ]
    assert all(torch.equal(end["out.weight"], ends[0]["out.weight"]) for end in ends)


def test_constants_may_be_complex() -> None:
    class Rotates(nn.Module):
        """A network with rotary positions."""

        turns: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)
            self.register_buffer(
                "turns", torch.polar(torch.ones(2), torch.arange(2.0)), persistent=False
            )

        def forward(self, x: Tensor) -> Tensor:
            turned = torch.view_as_complex(x[:, :4].contiguous().reshape(-1, 2, 2)) * self.turns
            return self.out(torch.view_as_real(turned).flatten(1))

    for dtype in ("float32", "float64"):
        assert simulate(
            model=Rotates(), clients=vectors(), test=vectors()[0], method=LOCAL, dtype=dtype
        ).history


def test_the_wrong_initial_state_is_refused_by_name(tmp_path: Path) -> None:
    net, pairs = nn.Linear(5, 3).double(), vectors()

    def says(initial: Any) -> str:
        with pytest.raises(InputError) as caught:
            simulate(model=net, clients=pairs, test=pairs[0], method=LOCAL, initial=initial)
        return str(caught.value)

    assert "no.safetensors" in says("no.safetensors")
    assert "int" in says(3)
    assert "'bias'" in says(nn.Linear(5, 3, bias=False))
    assert "meta" in says(nn.Linear(5, 3, device="meta"))
    assert "never called" in says(nn.LazyLinear(3))
    ones = torch.ones(3)
    for wrong in (math.nan * ones, ones.long(), ones.bool(), 1j * ones, ones.to_sparse()):
        assert "'bias'" in says({**net.state_dict(), "bias": wrong})
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    assert "safetensors" in says(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("output", "kind"), [("logits", "a dict"), (1, "a tuple"), (lambda found: found[1], "a tuple")]
)
def test_an_output_can_be_chosen(output: Any, kind: str) -> None:
    net = CASES[kind].build()
    model = functional(net, output=output)
    x = torch.randn(2, 6)
    assert torch.equal(model(*model.start(), x, mode="eval").logits, CASES[kind].logits(net(x)))


@pytest.mark.parametrize("output", ["nope", 7])
def test_a_wrong_choice_of_output_is_an_error_about_the_output(output: Any) -> None:
    model = functional(CASES["a tuple"].build(), output=output)
    with pytest.raises(InputError, match="output="):
        model(*model.start(), torch.randn(2, 6), mode="eval")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit, which the compiler imports
def test_a_compiled_module_is_taken_for_the_module_inside_it() -> None:
    net = seeded(lambda: nn.Linear(5, 3)).double()
    wrapped = torch.compile(net)
    how: dict[str, Any] = {"clients": vectors(), "test": vectors()[0], "method": LOCAL}
    found = simulate(model=wrapped, engine="serial", **how)
    expected = simulate(model=net, engine="serial", **how)
    assert torch.equal(found.params["_orig_mod.weight"], expected.params["weight"])
    assert isinstance(wrapped, nn.Module)
    wrapped.load_state_dict(found.state_dict())


def test_a_head_that_is_never_called_is_no_head() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.unused = nn.Conv1d(1, 3, 5), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x[:, None]).flatten(1)

    with pytest.raises(InputError, match="no linear layer"):
        simulate(
            model=Unused().double(), clients=vectors(), test=vectors()[0], method="fedmax(epochs=1)"
        )


def test_a_reused_dropout_layer_draws_a_new_mask_at_each_call() -> None:
    drop = nn.Dropout(0.5)
    model = functional(nn.Sequential(drop, drop))
    kept = model({}, {}, torch.ones(100, 100), mode="train", key=torch.tensor(3)).logits > 0
    assert abs(kept.float().mean().item() - 0.25) < 0.02


def test_two_random_functions_in_one_call_draw_different_numbers() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(F.dropout(x)) + 0 * torch.rand(100)

    kept = (
        functional(Twice())({}, {}, torch.ones(100, 100), mode="train", key=torch.tensor(3)).logits
        > 0
    )
    assert abs(kept.float().mean().item() - 0.25) < 0.02


def test_whole_numbers_are_tokens_and_a_table_of_them_is_told_how_to_come() -> None:
    pairs = data(CASES["transformer encoder"])
    assert simulate(model=seeded(Encoder), clients=pairs, test=pairs[0], method=LOCAL).history
    beyond = [pairs[0], (pairs[1][0].clone(), pairs[1][1])]
    beyond[1][0][-1, 2] = 99
    with pytest.raises(InputError, match=r"\(5,\), whole numbers.*index out of range"):
        simulate(model=seeded(Encoder), clients=beyond, test=pairs[0], method=LOCAL)
    with pytest.raises(InputError, match="floats"):
        simulate(model=nn.Linear(5, 3), clients=pairs, test=pairs[0], method=LOCAL)


# --- validation of personal models


def test_clients_with_tests_of_their_own_are_validated_on_examples_like_these(
    feddkd: Feddkd,
) -> None:
    rows = ["kind,a,b,owner"]
    draw_ = np.random.default_rng(0)
    for owner, sign in (("ann", 1), ("bob", -1)):
        for _ in range(150):
            x = draw_.normal(size=2)
            rows.append(f"{int(sign * x[0] > 0)},{x[0]:.3f},{x[1]:.3f},{owner}")
    Path("own.csv").write_text("\n".join(rows))
    table = """
data = "csv(path='own.csv', label='kind', domain='owner')"
partition = "domains()"
clients = 2
rounds = 4
model = "mlp(hidden='8')"
method = "fedavg(epochs=4, lr=0.5, batch_size=16) | private(names='*')"
"""
    Path("own.toml").write_text(table)
    assert feddkd("run", "own.toml", "--engine", "serial", "--json").status == 0
    (folder,) = Path("runs").iterdir()
    row = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    # their labels contradict each other: a shared model is at chance
    assert row["test_accuracy"] > 0.85
    assert row["validation_accuracy"] > 0.85
    assert (
        json.loads((folder / "manifest.json").read_text())["canonical"]["client_validation"]
        == "own"
    )


def test_several_threads_may_run_one_model() -> None:
    """Dropout draws by the key of a call, which must not be that of another thread's call."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    model, x = functional(net), torch.randn(16, 4, dtype=torch.float64)
    params, buffers = model.start()

    def outputs(seed: int) -> list[Tensor]:
        keys = [torch.tensor(1000 * seed + step) for step in range(60)]
        return [model(params, buffers, x, mode="train", key=key).logits for key in keys]

    alone = [outputs(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(outputs, range(4)))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
