"""Convolutions with what follows them as one operation:

the same function, the same gradients, under every transformation.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from feddkd.engines.compile.fused_conv import _convolve, _to_weights
from feddkd.engines.compile.fusing import fusing
from feddkd.engines.compile.trace import traced

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "pooling, then ReLU": lambda: nn.Sequential(
        nn.Conv2d(2, 5, 3, bias=False), nn.MaxPool2d(2), nn.ReLU()
    ),
    "ReLU, then pooling": lambda: nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    ),
    "ReLU alone": lambda: nn.Sequential(nn.Conv2d(2, 5, 5, padding=2), nn.ReLU()),
    "nothing behind it": lambda: nn.Conv2d(2, 5, 3),
    "two in a row": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 4, 2, padding=1), nn.ReLU()
    ),
    "used twice": lambda: Twice(),
}


class Twice(nn.Module):
    """The convolution's output is read before and after pooling: both must be right."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.cat([y.flatten(1), F.max_pool2d(y, 2).relu().flatten(1)], 1)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        with fusing():
            return function(*inputs)

    return call


def gap(found: Any, expected: Any) -> float:
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs))


def weights_of(net: nn.Module, lanes: int) -> dict[str, Tensor]:
    return {
        name: torch.randn(lanes, *p.shape, dtype=torch.float64)
        for name, p in net.named_parameters()
    }


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fused_network_is_the_network_and_so_are_its_gradients_in_every_lane(name: str) -> None:
    torch.manual_seed(0)
    net = NETWORKS[name]()
    w, x = weights_of(net, 3), torch.randn(3, 4, 2, 9, 8, dtype=torch.float64)

    def loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(net, w, (x,))
        return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()

    for function in (vmap(loss), vmap(grad(loss, argnums=(0, 1)))):
        assert gap(fused(function)(w, x), function(w, x)) < 1e-12


@pytest.mark.parametrize("name", NETWORKS)
def test_at_shared_weights_clients_are_read_as_more_images_and_runs_as_more_lanes(
    name: str,
) -> None:
    torch.manual_seed(1)
    net = NETWORKS[name]()
    w, x = weights_of(net, 2), torch.randn(2, 3, 4, 2, 8, 8, dtype=torch.float64)

    def mean_loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
        losses: Tensor = vmap(lambda own: functional_call(net, w, (own,)).square().mean())(x)
        return losses.mean()

    function = vmap(grad(mean_loss))
    assert gap(fused(function)(w, x), function(w, x)) < 1e-12


def test_what_was_fused_leaves_nothing_of_its_parts_in_a_traced_graph() -> None:
    net = NETWORKS["pooling, then ReLU"]()
    w, x = weights_of(net, 2), torch.randn(2, 3, 2, 8, 8, dtype=torch.float64)

    def loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = functional_call(net, w, (x,))
        return out.sum()

    graph: Any = traced(fused(vmap(grad(loss))), w, x)
    graph.graph.eliminate_dead_code()
    kinds = Counter(str(node.target).split(".")[0:2][-1] for node in graph.graph.nodes)
    assert kinds["convolve"] == 1, "forward; the gradient of the images is not computed"
    assert kinds["to_weights"] == 1
    assert not kinds["convolution"]
    assert not kinds["max_pool2d_with_indices"]


class Watch(TorchFunctionMode):
    """Notes how that which norms read is laid out."""

    def __init__(self) -> None:
        super().__init__()
        self.plain: dict[str, bool] = {}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in ("batch_norm", "group_norm"):
            self.plain[f"{function.__module__}.{function.__name__}"] = args[0].is_contiguous()
        return function(*args, **(kwargs or {}))


def test_a_norm_behind_a_fused_convolution_reads_images_in_their_plain_order() -> None:
    def net(w: Tensor, x: Tensor) -> Tensor:
        y = F.conv2d(x, w)
        assert not y.is_contiguous(), "fused, channels come last"
        normed = (
            F.batch_norm(y, None, None, training=True),
            torch.batch_norm(y, None, None, None, None, True, 0.1, 1e-5, False),
            F.group_norm(y, 2),
            torch.group_norm(y, 2),
        )
        return torch.stack(normed).pow(3).sum()

    with Watch() as watch:
        fused(vmap(grad(net)))(torch.randn(3, 4, 2, 3, 3), torch.randn(3, 5, 2, 9, 8))
    assert len(watch.plain) == 4
    assert all(watch.plain.values()), watch.plain


OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a stride": lambda x, w: F.conv2d(x, w, stride=2),
    "a dilation": lambda x, w: F.conv2d(x, w, dilation=2),
    "unequal padding": lambda x, w: F.conv2d(x, w, padding=(1, 0)),
    "padding as wide as the kernel": lambda x, w: F.conv2d(x, w, padding=3),
    "padding by name": lambda x, w: F.conv2d(x, w, padding="same"),
    "groups": lambda x, w: F.conv2d(x, w[:, :1], groups=2),
    "an oblong kernel": lambda x, w: F.conv2d(x, w[..., :2]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_are_left_as_they_are(name: str) -> None:
    x, w = (
        torch.randn(2, 2, 9, 9, dtype=torch.float64),
        torch.randn(4, 2, 3, 3, dtype=torch.float64),
    )
    with fusing() as watch:
        found = OTHERS[name](x, w)
    assert not watch.origins
    assert torch.equal(found, OTHERS[name](x, w))


@pytest.mark.parametrize(
    "pooling",
    [
        lambda y: F.max_pool2d(y, 3),
        lambda y: F.max_pool2d(y, 2, stride=1),
        lambda y: F.max_pool2d(y, 2, padding=1),
        lambda y: F.max_pool2d(y, 2, ceil_mode=True),
        lambda y: F.max_pool2d(y, 2, return_indices=True)[0],
        lambda y: F.avg_pool2d(y, 2),
        lambda y: F.max_pool2d(F.max_pool2d(y, 2), 2),
    ],
)
def test_other_poolings_follow_a_convolution_unfused(pooling: Callable[[Tensor], Tensor]) -> None:
    x, w = (
        torch.randn(2, 2, 9, 9, dtype=torch.float64),
        torch.randn(4, 2, 3, 3, dtype=torch.float64),
    )

    def net(x: Tensor) -> Tensor:
        return pooling(F.conv2d(x, w))

    assert gap(fused(net)(x), net(x)) < 1e-12


def test_what_is_not_a_number_is_not_swallowed_by_pooling_or_relu() -> None:
    x = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    x[0, 0, 3, 3] = torch.nan
    net = NETWORKS["pooling, then ReLU"]()
    out = fused(
        lambda x: functional_call(
            net, {"0.weight": torch.ones(5, 1, 3, 3, dtype=torch.float64)}, (x,)
        )
    )(x)
    assert out.isnan().all()


SHAPES = [  # lanes, batch, side, channels, outputs, kernel, padding, pooling, ReLU, bias
    (3, 5, 32, 1, 32, 3, 0, 2, True, False),
    (3, 5, 15, 32, 64, 3, 0, 2, True, True),
    (2, 7, 8, 64, 130, 3, 1, 1, True, True),
    (1, 64, 9, 3, 20, 5, 2, 1, False, False),
    (2, 40, 7, 5, 6, 2, 1, 2, False, True),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # torch warns of how tf32 is switched
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)],
    ids=["float32", "bfloat16"],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernels_compute_what_torch_computes(
    shape: tuple[Any, ...], dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    lanes, batch, side, channels, outputs, kernel, pads, pool, relu, biased = shape
    torch.manual_seed(0)
    x, w = (
        torch.randn(lanes, batch, side, side, channels).to(dtype),
        torch.randn(lanes, kernel, kernel, channels, outputs).to(dtype),
    )
    bias = torch.randn(lanes, outputs).to(dtype) if biased else None
    size = (side + 2 * pads - kernel + 1) // pool
    on_gpu = [None if tensor is None else tensor.cuda() for tensor in (x, w, bias)]
    y, _ = _convolve(
        x.double(),
        w.double(),
        None if bias is None else bias.double(),
        pads,
        size,
        size,
        pool,
        relu,
    )
    found, _ = _convolve(*on_gpu, pads, size, size, pool, relu)
    assert float((found.cpu().double() - y).norm() / y.norm()) < tolerance
    slopes = torch.randn(lanes, batch, size, size, outputs).to(dtype)
    to_w = _to_weights(slopes.double(), x.double(), kernel, pads)
    found = _to_weights(slopes.cuda(), x.cuda(), kernel, pads)
    assert float((found.cpu().double() - to_w).norm() / to_w.norm()) < 1e-5
