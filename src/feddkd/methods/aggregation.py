"""Aggregation: clipping of uploads, noise, and robust means.

These are options of local training and of dkd, each for its own exchanges. clip, noise: DP-FedAvg
of McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR
2018, arXiv:1710.06963; gather: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed
learning", ICML 2018, arXiv:1803.01498, and the others in `defences`.

    u_k <- u_k min(1, clip / |u_k|)
    u = 1/m sum_k u_k + N(0, (noise clip / m)^2),   or the median or trimmed mean by coordinate

u_k is the difference between all that a client uploads in an exchange and what it was sent: the
change of its parameters and buffers, or its gradient. docs/privacy.md says what the numbers
guarantee and what they do not.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Collect, Finish, Fold, Phase, ServerFn, World
from feddkd.methods.defences import (
    Defence,
    centred_clipping,
    geometric_median,
    krum,
    multi_krum,
    updates_of,
    uploads_of,
)
from feddkd.models.functional import Model
from feddkd.randomness import fold, generator
from feddkd.spec.types import LATER, Bound, Positive
from feddkd.tensors import Groups, Tensors, combine, trimmed_mean, zeros

# median and trimmed mean are by coordinate; the rules after them look at whole updates
Gather = Literal["mean", "median", "trimmed", "krum", "multi_krum", "geometric", "centred"]
SECRET = -1  # in place of the key of noise: drawn from the operating system


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Options of an exchange in which clients upload one thing: a model or a gradient."""

    # limit of the L2 norm of a client's update
    clip: Annotated[Positive | None, LATER] = None
    # z: the server adds Gaussian noise of deviation z clip / m to the mean of m updates
    noise: Annotated[float, Bound(least=0, most=1e6), LATER] = 0.0
    # rules other than "mean" give all clients equal weights
    gather: Annotated[Gather, LATER] = "mean"
    # share of the clients that "trimmed" leaves out at each end
    trim: Annotated[float, Bound(least=0, below=0.5), LATER] = 0.1
    # share of the clients that "krum" and "multi_krum" take to be faulty
    faulty: Annotated[float, Bound(least=0, below=0.5), LATER] = 0.1
    # how far an update may be from the last gathered one, for "centred"
    radius: Annotated[Positive | None, LATER] = None

    def __post_init__(self) -> None:
        if self.noise and self.clip is None:
            raise InputError(
                "noise does not go without clip: only a bounded update can be hidden; give both, as"
                " in clip=1.0, noise=1.1"
            )
        if self.noise and self.gather != "mean":
            raise InputError(
                "noise is for the mean of clipped updates; it does not go with"
                f" gather={self.gather!r}"
            )
        if (self.gather == "centred") != (self.radius is not None):
            raise InputError(
                "gather='centred' and radius go together: radius is how far an update may be from"
                " the last gathered one, as in gather='centred', radius=1.0"
            )

    def cut(self, clients: int) -> int:
        """Return the number of clients to leave out at each end; at least one client remains."""
        most = (clients - 1) // 2
        return most if self.gather == "median" else min(int(self.trim * clients + 1e-9), most)

    def defence(self, clients: int) -> Defence:
        """Return the defence against this number of clients, for rules that look at vectors."""
        faulty = int(self.faulty * clients + 1e-9)
        if self.radius is not None:
            return partial(centred_clipping, radius=self.radius)
        if self.gather == "geometric":
            return geometric_median
        return partial(krum if self.gather == "krum" else multi_krum, faulty=faulty)


PLAINLY = Gathering()


def gathered(phase: Phase, how: Gathering) -> Phase:
    """Return the phase with its uploads clipped and aggregated as the options say."""
    if how == PLAINLY:
        return phase
    assert isinstance(phase.client, Fold)
    if how.clip is not None:
        finish = _bounded(phase.client.finish, how.clip, how.noise > 0)
        phase = replace(phase, client=replace(phase.client, finish=finish), clip=how.clip)
    if how.noise:
        return replace(
            phase,
            collect=dict.fromkeys(phase.collect, Collect.MEAN_BY_CLIENTS),
            opens=_with_noise_source(phase),
            server=_noised(phase.server, how),
            noise=how.noise,
        )
    if how.gather == "mean":
        return phase
    phase = replace(phase, collect=dict.fromkeys(phase.collect, Collect.EVERY))
    if how.gather in ("median", "trimmed"):
        return replace(phase, server=_robust(phase.server, how))
    return replace(phase, opens=_with_centre(phase), server=_defended(phase, how))


# --- the client's half


def _bounded(finish: Finish, most: float, hidden: bool) -> Finish:
    """Return `finish` with its upload clipped."""

    def bounded(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = finish(model, sent, carry, memo)
        return clipped(upload, sent, most, hidden), after

    return bounded


def clipped(upload: Groups, sent: Groups, most: float, hidden: bool = False) -> Groups:
    """Return an upload whose difference from the tensors sent has at most the norm `most`.

    A group that was not sent is compared with zero. Counters (whole numbers) do not change. With
    `hidden`, an update that is not finite becomes no update: the server must not learn of it.
    """
    origin = {
        group: sent[group] if group in sent else zeros(tensors) for group, tensors in upload.items()
    }
    moves = [
        t - origin[g][n]
        for g, tensors in upload.items()
        for n, t in tensors.items()
        if t.is_floating_point()
    ]
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(move, dtype=torch.float64) for move in moves])
    )

    def shorten(end: Tensor, start: Tensor) -> Tensor:
        if not end.is_floating_point():
            return end
        shortened = start + (most / norm).to(end.dtype) * (end - start)
        near = torch.where(norm > most, shortened, end)
        return torch.where(norm.isfinite(), near, start) if hidden else near

    return {group: combine(shorten, tensors, origin[group]) for group, tensors in upload.items()}


# --- the server's half


def _robust(server: ServerFn, how: Gathering) -> ServerFn:
    """Return a server that takes trimmed means of every client's uploads."""

    def robust(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        cut = how.cut(len(rates["clients"]))
        means = {group: trimmed_mean(tensors, cut) for group, tensors in collected.items()}
        return server(model, state, means, rates)

    return robust


def _with_centre(phase: Phase) -> Callable[[Model, Groups, World], Groups]:
    """Return `opens` of the phase with a group added: the last gathered update, zero at first."""

    def opens(model: Model, state: Groups, world: World) -> Groups:
        stacked = {
            group: {name: t[None] for name, t in state.get(group, state["params"]).items()}
            for group in phase.collect
        }
        others = phase.opens(model, state, world) if phase.opens else {}
        return {**others, _centre(phase): {"update": torch.zeros_like(updates_of(stacked, {})[0])}}

    return opens


def _centre(phase: Phase) -> str:
    return f"last {phase.name}"


def _defended(phase: Phase, how: Gathering) -> ServerFn:
    """Return a server that gathers every client's updates by a defence."""

    def defended(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        origin = {group: state[group] for group in collected if group in phase.sends}
        last = state[_centre(phase)]["update"]
        update = how.defence(len(rates["clients"]))(updates_of(collected, origin), last)
        together = uploads_of(update, collected, origin)
        return phase.server(model, {**state, _centre(phase): {"update": update}}, together, rates)

    return defended


def _with_noise_source(phase: Phase) -> Callable[[Model, Groups, World], Groups]:
    """Return `opens` of the phase with a group "noise" added: a key and a count of the draws.

    All phases of a method share the group, so no two draws are the same.
    """

    def opens(model: Model, state: Groups, world: World) -> Groups:
        if "buffers" in phase.collect and (shared := sorted(state["buffers"])):
            raise InputError(
                "noise is for parameters only: in the buffers that this network shares"
                f" ({shared[0]}, ...) it could make a variance negative; keep the buffers with the"
                " clients, as in fedbn(...) or ... | local_bn(private='statistics')"
            )
        drawn = {"key": torch.tensor(fold(("noise", *world.key))), "count": torch.tensor(0)}
        return {
            "noise": state.get("noise", drawn),
            **(phase.opens(model, state, world) if phase.opens else {}),
        }

    return opens


def with_secret_noise(state: Groups) -> Groups:
    """Return a state whose noise comes from the operating system from now on.

    Clients that know the seed of a run could redraw and remove noise that follows from it.
    """
    if "noise" not in state:
        return state
    return {**state, "noise": {**state["noise"], "key": torch.tensor(SECRET)}}


def secret_normal(shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return standard normal numbers from the operating system's randomness (Box and Muller)."""
    count = int(np.prod(shape, dtype=np.int64))
    words = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count)
    first, second = ((words >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    numbers: NDArray[np.float64] = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return numbers.reshape(shape)


def _noised(server: ServerFn, how: Gathering) -> ServerFn:
    """Return a server that adds noise to the means before it uses them.

    NumPy draws the noise on the host in float64: the same numbers for every engine and device. With
    the key SECRET it comes from the operating system, and no seed gives it again.
    """
    assert how.clip is not None
    reach = how.noise * how.clip

    def noised(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        ledger, deviation = state["noise"], reach / len(rates["clients"])
        key = int(ledger["key"])
        random = generator(("noise", key, int(ledger["count"])))

        def blur(mean: Tensor) -> Tensor:
            shape = tuple(mean.shape)
            drawn = secret_normal(shape) if key == SECRET else random.standard_normal(shape)
            noise = torch.from_numpy(deviation * np.asarray(drawn))
            return mean + noise.to(mean.device, mean.dtype)

        blurred = {group: combine(blur, tensors) for group, tensors in collected.items()}
        after = {**ledger, "count": ledger["count"] + 1}
        return server(model, {**state, "noise": after}, blurred, rates)

    return noised
