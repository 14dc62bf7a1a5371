"""Triton kernels: convolutions over lanes, with the 2x2 pooling and ReLU that follow them.

Each lane has its own weights. A convolution is a matrix product whose left operand, the patches, is
never written out: its elements are read from the image when they are needed. Pooling works on the
product in registers, so only a quarter of it is written, and one byte for each window that says
which of its four positions is the largest.

Images are (lanes, batch, height, width, channels), weights (lanes, kernel height, kernel width,
channels, outputs).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

DEPTH = 128  # bytes of a row that one step through a sum reads
PROGRAMS = 512  # at least this many keep a GPU busy
SHORTEST = 256  # positions in a piece of a sum, at least


@triton.jit
def _convolve(
    x, w, bias, y, place, B,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    HP: tl.constexpr, WP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    POOL: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute y = relu(pool(x * w + bias)), a tile of BM pooled positions by BN outputs.

    There is one sum for each position of the pooling window.
    """
    K: tl.constexpr = KH * KW * C
    lane = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    x += lane * B * (H * W * C)
    w += lane * (K * OUT)
    image, top, left = m // (HP * WP), m // WP % HP * POOL - PAD, m % WP * POOL - PAD
    inside = m < B * (HP * WP)
    corner = image * (H * W * C) + (top * W + left) * C
    sum0 = tl.zeros((BM, BN), tl.float32)
    sum1 = tl.zeros((BM, BN), tl.float32)
    sum2 = tl.zeros((BM, BN), tl.float32)
    sum3 = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, K, BK):
        k = k0 + tl.arange(0, BK)
        kh, kw = k // (KW * C), k // C % KW
        at = corner[:, None] + (kh * (W * C) + k % (KW * C))[None, :]
        there = inside[:, None] & (k < K)[None, :]
        weights = tl.load(
            w + k[:, None] * OUT + n[None, :], mask=(k < K)[:, None] & (n < OUT)[None, :], other=0.0
        )
        row, column = top[:, None] + kh[None, :], left[:, None] + kw[None, :]
        sum0 = _add(x + at, there, row, column, weights, sum0, H, W, PAD, PRECISION)
        if POOL == 2:
            sum1 = _add(x + at + C, there, row, column + 1, weights, sum1, H, W, PAD, PRECISION)
            sum2 = _add(x + at + W * C, there, row + 1, column, weights, sum2, H, W, PAD, PRECISION)
            diagonal = x + at + (W * C + C)
            sum3 = _add(diagonal, there, row + 1, column + 1, weights, sum3, H, W, PAD, PRECISION)
    to = lane * B * (HP * WP * OUT) + m[:, None] * OUT + n[None, :]
    mask = inside[:, None] & (n < OUT)[None, :]
    best = sum0
    if POOL == 2:
        where = tl.zeros((BM, BN), tl.int32)
        best, where = _larger(best, where, sum1, 1)
        best, where = _larger(best, where, sum2, 2)
        best, where = _larger(best, where, sum3, 3)
        tl.store(place + to, where.to(tl.uint8), mask=mask)
    if BIAS:
        best += tl.load(bias + lane * OUT + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    if RELU:
        best = tl.where(best < 0, 0.0, best)  # NaN stays NaN
    tl.store(y + to, best.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _add(
    pointers, there, row, column, weights, total,
    H: tl.constexpr, W: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if PAD > 0:
        there = there & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    return tl.dot(
        tl.load(pointers, mask=there, other=0.0), weights, total, input_precision=PRECISION
    )


@triton.jit
def _larger(best, where, other, number: tl.constexpr):
    """Return the larger value and its number: the first of equals, and NaN before any number."""
    wins = (other > best) | (other != other)
    return tl.where(wins, other, best), tl.where(wins, number, where)


@triton.jit
def _to_weights(
    slopes, x, dw, B, PIECE,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr,
    HO: tl.constexpr, WO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD: tl.constexpr,
    PIECES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the weights, a tile of BK of their rows by BN outputs.

    One program computes the part of the sum that comes from PIECE positions.
    """
    K: tl.constexpr = KH * KW * C
    lane = (tl.program_id(2) // PIECES).to(tl.int64)
    first = tl.program_id(2) % PIECES * PIECE
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    slopes += lane * B * (HO * WO * OUT)
    x += lane * B * (H * W * C)
    kh, kw = k // (KW * C), k // C % KW
    offset = kh * (W * C) + k % (KW * C)
    total = tl.zeros((BK, BN), tl.float32)
    last = min(first + PIECE, B * (HO * WO))
    for m0 in range(first, last, BM):
        m = m0 + tl.arange(0, BM)
        image, top, left = m // (HO * WO), m // WO % HO - PAD, m % WO - PAD
        there = (m < last)[:, None] & (k < K)[None, :]
        if PAD > 0:
            row, column = top[:, None] + kh[None, :], left[:, None] + kw[None, :]
            there = there & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        at = (image * (H * W * C) + (top * W + left) * C)[:, None] + offset[None, :]
        seen = tl.load(x + at, mask=there, other=0.0)
        slope = tl.load(
            slopes + m[:, None] * OUT + n[None, :],
            mask=(m < last)[:, None] & (n < OUT)[None, :],
            other=0.0,
        )
        total = tl.dot(tl.trans(seen), slope, total, input_precision=PRECISION)
    to = tl.program_id(2).to(tl.int64) * (K * OUT) + k[:, None] * OUT + n[None, :]
    tl.store(dw + to, total, mask=(k < K)[:, None] & (n < OUT)[None, :])


def convolve(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    pad: int,
    size: tuple[int, int],
    pool: int,
    relu: bool,
) -> tuple[Tensor, Tensor]:
    """Return relu(pool(x * w + bias)) of height and width `size`, and the pooling positions.

    For pool == 2 these are the positions of the largest values in their windows: 0 to 3.
    """
    (lanes, batch, height, width, channels), (kh, kw, _, out) = x.shape, w.shape[1:]
    y = x.new_empty(lanes, batch, *size, out)
    place = torch.empty(y.shape if pool == 2 else (0,), dtype=torch.uint8, device=x.device)
    bm = 64 if pool == 2 else 128
    bn = _tile(out, bm)
    bk = _tile(kh * kw * channels, DEPTH // pool // max(2, x.element_size()))
    grid = (triton.cdiv(batch * size[0] * size[1], bm), triton.cdiv(out, bn), lanes)
    _convolve[grid](
        x, w, bias, y, place, batch, height, width, channels, out, *size,
        kh, kw, pad, pool, relu, bias is not None,
        bm, bn, bk, _precision(), num_warps=8 if bm * bn > 8192 else 4, num_stages=3,
    )  # fmt: skip
    return y, place


def to_weights(slopes: Tensor, x: Tensor, kh: int, kw: int, pad: int) -> Tensor:
    """Return the gradient of the weights.

    `slopes` is the gradient of the convolution's output, or its upper left part if the rest is
    zero. The pieces of a long sum are added here, not by the compiler: it would join their sum with
    the update and read the pieces in the order of the weights, far apart, which for one lane of
    VGG-9 took four fifths of a step.
    """
    (lanes, batch, high, wide, out), (height, width, channels) = slopes.shape, x.shape[2:]
    rows, places = kh * kw * channels, batch * high * wide
    bm, bn, bk = DEPTH // max(2, x.element_size()), _tile(out, 128), _tile(rows, 128)
    tiles = lanes * triton.cdiv(rows, bk) * triton.cdiv(out, bn)
    # enough pieces to give the whole GPU work
    pieces = max(1, min(triton.cdiv(PROGRAMS, tiles), places // SHORTEST))
    # each piece is a whole number of steps; the last one may be shorter, or empty
    piece = triton.cdiv(triton.cdiv(places, pieces), bm) * bm
    dw = x.new_empty(lanes, pieces, kh, kw, channels, out, dtype=torch.float32)
    grid = (triton.cdiv(rows, bk), triton.cdiv(out, bn), lanes * pieces)
    _to_weights[grid](
        slopes, x, dw, batch, piece, height, width, channels, out, high, wide, kh, kw, pad, pieces,
        bm, bn, bk, _precision(),
        num_warps=8 if bk * bn > 8192 else 4, num_stages=2 if bk * bn <= 8192 else 3,
    )  # fmt: skip
    return dw.sum(1) if pieces > 1 else dw.squeeze(1)


def _tile(size: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(size)))


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
