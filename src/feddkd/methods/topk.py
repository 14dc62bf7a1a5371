"""MEM-SGD: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018,
arXiv:1809.07599.

    m = top_k(u + e),   e <- u + e - m,   the server reads m

A piece to put after any method: `fedavg() | topk(share=0.01)` sends the hundredth part of a
client's update that is largest in size: k = share d of all d entries, each with its place. u is the
client's weights less those that it was sent, or its gradient (`fedavg() | dkd() | topk()`
compresses the J gradients of a round, too). The rest, e, stays with the client and is added to its
next update: error feedback. Other groups, such as the statistics of batch norm, are sent unchanged.
`share=1.0` sends everything and changes nothing. In the paper e is in units of steps; here an
update has its steps in it, and DKD's e is in units of its gradient.
"""

from functools import partial

import torch
from torch import Tensor

from feddkd.method import Codec, Method, Parts
from feddkd.methods.registry import METHODS
from feddkd.spec.types import Share
from feddkd.tensors import Tensors


@METHODS.register
def topk(*, share: Share = 0.01) -> Method:
    """The method before it, with only the largest entries sent: m = top_k(u + e)."""
    if share == 1:
        return Method(())
    return Method((), codec=Codec(partial(_largest, share), _spread, _problem, remembers=True))


def _count(share: float, entries: int) -> int:
    return max(int(share * entries + 1e-9), min(entries, 1))


def _largest(share: float, tensors: Tensors, key: Tensor) -> Parts:
    line = torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    places = line.abs().topk(_count(share, len(line))).indices.sort().values
    return {"values": {"all": line[places]}, "places": {"all": places.to(torch.int32)}}


def _spread(parts: Parts, like: Tensors) -> dict[str, Tensor]:
    values, places = parts["values"]["all"], parts["places"]["all"].long()
    sizes = [like[name].numel() for name in sorted(like)]
    line = values.new_zeros(sum(sizes)).scatter(0, places, values)
    pieces = dict(zip(sorted(like), torch.split(line, sizes), strict=True))
    return {name: pieces[name].reshape(like[name].shape) for name in like}


def _problem(parts: Parts, like: Tensors) -> str:
    places, entries = parts["places"]["all"], sum(tensor.numel() for tensor in like.values())
    rising = bool((places[1:] > places[:-1]).all())
    inside = not len(places) or (int(places[0]) >= 0 and int(places[-1]) < entries)
    return "" if rising and inside else f"the places must rise and lie in 0 to {entries - 1}"
