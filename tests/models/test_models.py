"""Networks: the published sizes, and what `functional` promises."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from feddkd.errors import InputError
from feddkd.models.functional import Mode, functional
from feddkd.models.registry import MODELS
from feddkd.tensors import stack

WITH_EVERYTHING = nn.Sequential(
    nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
)


@pytest.mark.parametrize(
    ("text", "shape", "classes", "parameters"),
    [
        ("femnist_cnn", (1, 32, 32), 26, 200_506),
        ("femnist_cnn(geometry='28')", (1, 28, 28), 26, 200_506),
        ("femnist_cnn(conv_bias=True)", (1, 32, 32), 26, 200_666),
        ("vgg9", (3, 32, 32), 10, 3_491_530),
        ("vgg9", (3, 32, 32), 100, 3_537_700),
        ("digit_cnn", (3, 28, 28), 10, 14_219_210),
        ("emnist_cnn", (1, 28, 28), 26, 26_962),
        ("emnist_cnn", (1, 28, 28), 25, 26_929),
        ("small_cnn", (3, 32, 32), 10, 1_626_442),
        ("mlp(hidden='64,64')", (1, 8, 8), 10, 64 * 65 + 64 * 65 + 65 * 10),
        ("mlp(hidden='')", (5,), 2, 12),
    ],
)
def test_networks_have_the_published_size(
    text: str, shape: tuple[int, ...], classes: int, parameters: int
) -> None:
    model = functional(MODELS.one(text).build(shape, classes))
    params, buffers = model.initial(("init", 0))
    assert sum(tensor.numel() for tensor in params.values()) == parameters
    assert model(params, buffers, torch.zeros(2, *shape), mode="eval").logits.shape == (2, classes)


def test_the_digits_network_has_5632_batch_norm_parameters() -> None:
    model = functional(MODELS.one("digit_cnn").build((3, 28, 28), 10))
    params, _ = model.initial(("init", 0))
    assert sum(params[name].numel() for name in model.norm_names & model.param_names) == 5_632


def test_a_network_refuses_images_it_was_not_made_for() -> None:
    with pytest.raises(InputError, match=r"femnist_cnn.*32 x 32.*\(1, 8, 8\)"):
        MODELS.one("femnist_cnn").build((1, 8, 8), 10)
    with pytest.raises(InputError, match="hidden"):
        MODELS.one("mlp(hidden='64,x')")


def state_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("mode", ["train", "eval", "batch"])
def test_a_call_changes_neither_its_arguments_nor_the_module(mode: Mode) -> None:
    net = copy.deepcopy(WITH_EVERYTHING)
    before, model = state_of(net), functional(net)
    params, buffers = model.split(before)
    given = {name: tensor.clone() for name, tensor in {**params, **buffers}.items()}
    model(params, buffers, torch.randn(5, 4), mode=mode, key=torch.tensor(1))
    assert all(torch.equal(given[name], tensor) for name, tensor in {**params, **buffers}.items())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_training_mode_returns_the_buffers_that_the_module_itself_would_have() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    model, x = functional(net), torch.randn(7, 4)
    output = model(*model.split(net.state_dict()), x, mode="train")
    assert torch.equal(output.logits, net(x))
    assert all(
        torch.equal(output.buffers[name], net.state_dict()[name]) for name in model.buffer_names
    )


def test_batch_mode_normalises_by_the_batch_without_dropout_and_leaves_buffers_alone() -> None:
    net = copy.deepcopy(WITH_EVERYTHING)
    model, x = functional(net), torch.randn(9, 4)
    params, buffers = model.split(net.state_dict())
    output = model(params, buffers, x, mode="batch")
    net.train()
    net[3].eval()
    assert torch.equal(output.logits, net(x))
    assert all(torch.equal(output.buffers[name], buffers[name]) for name in buffers)


def test_features_are_the_input_of_the_last_linear_layer_and_the_head_turns_them_into_logits() -> (
    None
):
    net = copy.deepcopy(WITH_EVERYTHING).eval()
    model, x = functional(net), torch.randn(5, 4)
    params, buffers = model.split(net.state_dict())
    output = model(params, buffers, x, mode="eval")
    assert torch.equal(output.features, net[:-1](x))
    assert torch.allclose(model.apply_head(params, output.features), output.logits)


def test_a_head_can_be_named_and_a_wrong_name_is_refused() -> None:
    assert functional(WITH_EVERYTHING, head="0").head == "0"
    with pytest.raises(InputError, match=r"no linear layer 'nope'; it has: 0, 4"):
        functional(WITH_EVERYTHING, head="nope")


def test_a_network_without_a_linear_layer_offers_its_logits_as_features() -> None:
    model = functional(nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten()))
    output = model(*model.initial(("init", 0)), torch.randn(2, 1, 2, 2), mode="eval")
    assert model.head is None
    assert torch.equal(output.features, output.logits)


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Dropout2d(0.3)])
def test_dropout_is_a_function_of_the_key_and_drops_the_share_it_should(layer: nn.Module) -> None:
    model, x = functional(nn.Sequential(layer)), torch.ones(100, 50, 2, 2)

    def drop(key: int) -> Tensor:
        return model({}, {}, x, mode="train", key=torch.tensor(key)).logits

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))
    assert abs((drop(1) == 0).float().mean().item() - 0.3) < 0.02
    assert torch.all((drop(1) == 0) | torch.isclose(drop(1), torch.tensor(1 / 0.7)))
    whole = drop(1).flatten(2)
    assert bool((whole == whole[:, :, :1]).all()) == isinstance(layer, nn.Dropout2d)


def test_dropout_without_a_key_in_training_is_an_error() -> None:
    model = functional(nn.Sequential(nn.Dropout(0.5)))
    with pytest.raises(InputError, match="needs a key"):
        model({}, {}, torch.ones(2, 2), mode="train")


def test_two_dropout_layers_draw_different_masks() -> None:
    model = functional(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    kept = model({}, {}, torch.ones(100, 100), mode="train", key=torch.tensor(3)).logits > 0
    assert abs(kept.float().mean().item() - 0.25) < 0.02


def test_many_clients_at_once_under_vmap_compute_what_each_computes_alone() -> None:
    model = functional(copy.deepcopy(WITH_EVERYTHING))
    starts = [model.initial(("init", client)) for client in range(3)]
    params, buffers = stack([p for p, _ in starts]), stack([b for _, b in starts])
    x, keys = torch.randn(3, 8, 4), torch.tensor([5, 6, 7])

    def call(
        p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, key: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        output = model(p, b, x, mode="train", key=key)
        return output.logits, output.buffers

    together, moved = vmap(call)(params, buffers, x, keys)
    for client, (p, b) in enumerate(starts):
        logits, after = call(p, b, x[client], keys[client])
        assert torch.allclose(together[client], logits, atol=1e-5)
        assert all(torch.allclose(moved[name][client], after[name], atol=1e-5) for name in after)


def test_weight_files_follow_the_key_and_leave_torchs_generator_alone() -> None:
    model = functional(WITH_EVERYTHING)
    before = torch.get_rng_state()
    first, again, other = (model.initial(("init", seed))[0]["0.weight"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_an_initial_state_that_does_not_fit_is_refused_by_name() -> None:
    model, state = functional(WITH_EVERYTHING), dict(WITH_EVERYTHING.state_dict())
    with pytest.raises(InputError, match=r"lacks '0\.weight'"):
        model.split({name: tensor for name, tensor in state.items() if name != "0.weight"})
    with pytest.raises(InputError, match=r"'0\.weight' has shape \(2, 2\)"):
        model.split({**state, "0.weight": torch.zeros(2, 2)})
    with pytest.raises(InputError, match="'ghost'"):
        model.split({**state, "ghost": torch.zeros(1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pooling_before_relu_gives_the_bits_of_pooling_after_it(dtype: torch.dtype) -> None:
    net = MODELS.one("femnist_cnn").build((1, 32, 32), 26).to(dtype)
    parameters = list(net.parameters())
    x = torch.randint(-4, 5, (8, 1, 32, 32), generator=torch.Generator().manual_seed(0)).to(
        dtype
    )  # coarse, so that there are ties

    def loss(pools_last: bool) -> torch.Tensor:
        seen = x
        for conv in net.get_submodule("convs").children():
            seen = conv(seen)
            seen = (
                nn.functional.max_pool2d(seen.relu(), 2)
                if pools_last
                else nn.functional.max_pool2d(seen, 2).relu()
            )
        logits = net.get_submodule("fc2")(net.get_submodule("fc1")(seen.flatten(1)).relu())
        assert pools_last or torch.equal(logits, net(x))
        return nn.functional.cross_entropy(logits, torch.arange(8))

    before, after = (torch.autograd.grad(loss(last), parameters) for last in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers that are copied."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default and not args[0].is_meta:
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))


def test_wrapping_a_network_copies_its_weights_once() -> None:
    net = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3))
    net.get_parameter("0.weight").requires_grad = False
    with Copies() as copies:  # type: ignore[no-untyped-call]
        model = functional(net)
    assert copies.numbers == sum(weight.numel() for weight in net.parameters())
    assert all(weight.is_meta for twin in model.nets.values() for weight in twin.parameters())
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(model.net.parameters(), net.parameters(), strict=True)
    )
