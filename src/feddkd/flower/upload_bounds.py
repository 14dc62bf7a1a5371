"""Bounds on uploads where they arrive: absurd ones are refused, clipping is enforced.

The size of an upload is the L2 norm of its difference from the tensors sent:

    u_k is refused if |u_k| > 1000 max(median_{j != k} |u_j|, |w|, 1)

w are the parameters that were sent. No upload vouches for itself: one that came alone is compared
with w. A finite upload such as 1e30 would otherwise spoil the mean,
and then the honest clients would be the ones whose numbers are not finite. A smaller lie passes:
clip, the median and the trimmed mean are for that.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

import torch
from torch import Tensor

from feddkd.flower.wire import WireError
from feddkd.methods.aggregation import clipped
from feddkd.tensors import Groups

FACTOR = 1000.0
ROUNDING = 1e-5  # a clipped update may exceed its bound by this share


def believable(
    uploads: Mapping[int, Groups], sent: Groups, clip: float | None
) -> tuple[dict[int, Groups], dict[int, WireError]]:
    """Return the uploads of an exchange that are within bounds, and why the others are not.

    Those of a phase that clips are clipped where their client has not done so.
    """
    norms = {client: norm_of(upload, sent) for client, upload in uploads.items()}
    good, refused = dict[int, Groups](), dict[int, WireError]()
    for client, norm in norms.items():
        bound = norm_bound([norms[other] for other in norms if other != client], sent)
        if not norm <= bound:
            why = f"its upload has the norm {norm:.3g}; at most {bound:.3g} is believed"
            refused[client] = WireError(why)
        elif clip is None or norm <= clip * (1 + ROUNDING):
            good[client] = uploads[client]
        else:
            good[client] = clipped(uploads[client], sent, clip)
    return good, refused


def norm_bound(others: Sequence[float], sent: Groups) -> float:
    """Return the largest norm of an upload that is believed, given those of the other uploads."""
    middle = median_low(others) if others else 0.0
    return FACTOR * max(middle, size(sent.get("params", {}).values()), 1.0)


def norm_of(upload: Groups, sent: Groups) -> float:
    """Return the L2 norm of the difference between an upload and the tensors sent."""
    moves = []
    for group, tensors in upload.items():
        origin = sent.get(group, {})
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                start = origin.get(name)
                moves.append(tensor if start is None else tensor.double() - start.double().cpu())
    return size(moves)


def size(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of some tensors together."""
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.float64).cpu()
        for tensor in tensors
        if tensor.is_floating_point()
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
