"""Convolutions, with the pooling and ReLU that follow them, as one operation over lanes.

The operation works under vmap, grad and tracing.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad, relu


class Form(NamedTuple):
    """The fused operations.

    A convolution without stride, equally padded on all sides, then perhaps pooling and ReLU.
    """

    pad: int
    pool: int = 1
    relu: bool = False

    def size(self, x: Tensor, w: Tensor) -> tuple[int, int]:
        """Return height and width of the result; images and weights are laned."""
        high, wide = (x.shape[2 + d] + 2 * self.pad - w.shape[1 + d] + 1 for d in (0, 1))
        return high // self.pool, wide // self.pool


# --- on laned tensors: images (lanes, batch, height, width, channels), weights (lanes, kernel
# height, width, channels, outputs)


@torch.library.custom_op("feddkd::convolve", mutates_args=())
def _convolve(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    pads: int,
    high: int,
    wide: int,
    pool: int,
    relus: bool,
) -> tuple[Tensor, Tensor]:
    """Return (relu(pool(x * w + bias)), the position of the largest value in each window)."""
    # imported here: Triton comes with torch's CUDA builds only
    from feddkd.engines.compile.triton_kernels import convolve

    return convolve(x, w, bias, pads, (high, wide), pool, relus)


@_convolve.register_fake
def _(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    pads: int,
    high: int,
    wide: int,
    pool: int,
    relus: bool,
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(*x.shape[:2], high, wide, w.shape[-1])
    return y, y.new_empty(y.shape if pool == 2 else (0,), dtype=torch.uint8)


@_convolve.register_kernel("cpu")
def _(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    pads: int,
    high: int,
    wide: int,
    pool: int,
    relus: bool,
) -> tuple[Tensor, Tensor]:
    """Return the same by torch's convolution, lane after lane; it checks the kernels."""
    below = high * pool + w.shape[1] - 1 - x.shape[2] - pads
    right = wide * pool + w.shape[2] - 1 - x.shape[3] - pads
    images = pad(x.permute(0, 1, 4, 2, 3), (pads, max(0, right), pads, max(0, below)))
    biases = [None] * len(w) if bias is None else bias
    lanes = zip(images, w.permute(0, 4, 3, 1, 2), biases, strict=True)
    y = torch.stack([conv2d(*lane) for lane in lanes])[..., : high * pool, : wide * pool]
    place = torch.empty(0, dtype=torch.uint8)
    if pool == 2:
        windows = y.reshape(*y.shape[:3], high, 2, wide, 2).transpose(4, 5).flatten(5, 6)
        y, position = windows.max(-1)
        place = position.permute(0, 1, 3, 4, 2).to(torch.uint8).contiguous()
    y = y.permute(0, 1, 3, 4, 2)
    return (relu(y) if relus else y).clone(memory_format=torch.contiguous_format), place


@torch.library.custom_op("feddkd::to_weights", mutates_args=())
def _to_weights(slopes: Tensor, x: Tensor, side: int, pads: int) -> Tensor:
    """Return the gradient of square weights with `side` rows."""
    from feddkd.engines.compile.triton_kernels import to_weights

    return to_weights(slopes, x, side, side, pads)


@_to_weights.register_fake
def _(slopes: Tensor, x: Tensor, side: int, pads: int) -> Tensor:
    return x.new_empty(len(x), side, side, x.shape[-1], slopes.shape[-1], dtype=_summed(x))


@_to_weights.register_kernel("cpu")
def _(slopes: Tensor, x: Tensor, side: int, pads: int) -> Tensor:
    images, (high, wide) = pad(x, (0, 0, pads, pads, pads, pads)), slopes.shape[2:4]
    parts = [images[:, :, i : i + high, j : j + wide] for i in range(side) for j in range(side)]
    rows = torch.stack([torch.einsum("lbhwc,lbhwo->lco", part, slopes) for part in parts], 1)
    return rows.reshape(len(x), side, side, *rows.shape[2:]).to(_summed(x))


def _summed(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _forward(form: Form, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _convolve(
        x.contiguous(), w.contiguous(), bias, form.pad, *form.size(x, w), *form[1:]
    )
    return result


def _backward(
    form: Form, slopes: Tensor, x: Tensor, w: Tensor, y: Tensor, place: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the images, the weights and the bias.

    The first is a convolution, too, with the weights mirrored.
    """
    if form.relu:
        slopes = torch.where(y > 0, slopes, 0)
    to_bias = slopes.sum((1, 2, 3))
    if form.pool == 2:
        slopes = _unpooled(slopes, place)
    slopes, side = slopes.contiguous(), w.shape[1]
    mirrored = w.flip(1, 2).transpose(3, 4).contiguous()
    to_x, _ = _convolve(slopes, mirrored, None, side - 1 - form.pad, *x.shape[2:4], 1, False)
    to_w = _to_weights(slopes, x.contiguous(), side, form.pad)
    return to_x, to_w.to(w.dtype), to_bias


def _unpooled(slopes: Tensor, place: Tensor) -> Tensor:
    """Return the gradient before pooling: that of a window goes to its largest value alone."""
    number = torch.arange(4, dtype=torch.uint8, device=place.device).reshape(2, 1, 2, 1)
    spread = torch.where(place[:, :, :, None, :, None] == number, slopes[:, :, :, None, :, None], 0)
    return spread.flatten(4, 5).flatten(2, 3)


# --- under vmap and grad


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    return function.apply(*inputs)  # type: ignore[no-untyped-call]


def _laned(
    dims: Iterable[int | None], count: int, tensors: Iterable[Tensor | None]
) -> list[Tensor | None]:
    """Return tensors whose lanes include vmap's axis; those without the axis are repeated."""

    def laned(axis: int | None, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:  # no bias
            return None
        if not tensor.numel():  # no pooling positions
            return tensor if axis is None else tensor.select(axis, 0)
        whole = tensor.expand(count, *tensor.shape) if axis is None else tensor.movedim(axis, 0)
        return whole.flatten(0, 1)

    return [laned(axis, tensor) for axis, tensor in zip(dims, tensors, strict=True)]


def _unlaned(count: int, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(
        t.reshape(count, -1, *t.shape[1:]) if t.numel() else t.expand(count, 0) for t in tensors
    )


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(form: Form, *tensors: Tensor) -> Any:
        return _backward(form, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        raise NotImplementedError("fused convolutions have no second derivative")

    @staticmethod
    def vmap(info: Any, dims: Any, form: Form, *tensors: Tensor) -> Any:
        results = _apply(_Backward, form, *_laned(dims[1:], info.batch_size, tensors))
        return _unlaned(info.batch_size, results), (0, 0, 0)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(form: Form, x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
        return _forward(form, x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.form, x, w, bias = inputs
        ctx.biased = bias is not None
        ctx.save_for_backward(x, w, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, slopes: Tensor, _: Any) -> Any:
        to_x, to_w, to_bias = _apply(_Backward, ctx.form, slopes, *ctx.saved_tensors)
        return None, to_x, to_w, to_bias if ctx.biased else None

    @staticmethod
    def vmap(info: Any, dims: Any, form: Form, x: Tensor, w: Tensor, bias: Tensor | None) -> Any:
        (_, axis, *shared), count = dims, info.batch_size
        # one lane that reads more images, so that no weights are repeated
        if axis is not None and shared == [None, None] and len(w) == 1:
            results = _apply(_Convolution, form, x.movedim(axis, 1).flatten(1, 2), w, bias)
            return tuple(
                t.reshape(1, count, -1, *t.shape[2:]) if t.numel() else t.expand(1, count, 0)
                for t in results
            ), (1, 1)
        results = _apply(_Convolution, form, *_laned(dims[1:], count, (x, w, bias)))
        return _unlaned(count, results), (0, 0)


def fused_convolution(form: Form, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Return relu(pool(convolution)).

    Images are (batch, channels, height, width), weights (outputs, channels, kernel height, width).
    """
    images, weights = x.permute(0, 2, 3, 1).unsqueeze(0), w.permute(2, 3, 1, 0).unsqueeze(0)
    biases = None if bias is None else bias.unsqueeze(0)
    y: Tensor = _apply(_Convolution, form, images, weights, biases)[0]
    return y.squeeze(0).permute(0, 3, 1, 2)
