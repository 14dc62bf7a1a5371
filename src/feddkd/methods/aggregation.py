"""How uploads are bounded and brought together: options of local training and of dkd, each for its
own exchanges.

clip, noise: DP-FedAvg of McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent
language models", ICLR 2018, arXiv:1710.06963; gather: Yin, Chen, Ramchandran, Bartlett,
"Byzantine-robust distributed learning", ICML 2018, arXiv:1803.01498.

    u_k <- u_k min(1, clip / |u_k|);   u = 1/m sum_k u_k + N(0, (noise clip / m)^2),   or the coordinates' median or trimmed mean

u_k is all that a client uploads in an exchange, less what it was sent: the move of its parameters
and buffers, or its gradient. What the numbers guarantee, and what not: docs/privacy.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Collect, Finish, Fold, Phase, ServerFn, World
from feddkd.models.functional import Model
from feddkd.randomness import fold, generator
from feddkd.spec.types import LATER, Bound, Positive
from feddkd.tensors import Groups, Tensors, combine, trimmed_mean, zeros


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Options of an exchange whose clients upload one thing: a model or a gradient."""

    # the most that the L2 norm of a client's update may be
    clip: Annotated[Positive | None, LATER] = None
    # z: the server adds Gaussian noise of deviation z clip / m to the mean of m updates
    noise: Annotated[float, Bound(least=0, most=1e6), LATER] = 0.0
    # median and trimmed mean: by coordinate, all alike
    gather: Annotated[Literal["mean", "median", "trimmed"], LATER] = "mean"
    # share of the clients left out at each end of "trimmed"
    trim: Annotated[float, Bound(least=0, below=0.5), LATER] = 0.1

    def __post_init__(self) -> None:
        if self.noise and self.clip is None:
            raise InputError(
                "noise does not go without clip, as in clip=1.0, noise=1.1: it hides a client whose"
                " part is bounded"
            )
        if self.noise and self.gather != "mean":
            raise InputError(
                "noise is for the mean of bounded updates; it does not go with"
                f" gather={self.gather!r}"
            )

    def cut(self, clients: int) -> int:
        """How many are left out at each end; one or two of them always stay."""
        most = (clients - 1) // 2
        return most if self.gather == "median" else min(int(self.trim * clients + 1e-9), most)


PLAINLY = Gathering()


def gathered(phase: Phase, how: Gathering) -> Phase:
    """A phase of clients' folds with its uploads bounded and brought together in this way."""
    if how == PLAINLY:
        return phase
    assert isinstance(phase.client, Fold)
    if how.clip is not None:
        phase = replace(
            phase,
            client=replace(
                phase.client, finish=_bounded(phase.client.finish, how.clip, how.noise > 0)
            ),
        )
    if how.noise:
        by_clients = dict.fromkeys(phase.collect, Collect.MEAN_BY_CLIENTS)
        return replace(
            phase,
            collect=by_clients,
            opens=_ready(phase),
            server=_noised(phase.server, how),
            noise=how.noise,
        )
    if how.gather != "mean":
        return replace(
            phase,
            collect=dict.fromkeys(phase.collect, Collect.EVERY),
            server=_robust(phase.server, how),
        )
    return phase


# --- the client's half


def _bounded(finish: Finish, most: float, hidden: bool) -> Finish:
    def bounded(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = finish(model, sent, carry, memo)
        return clipped(upload, sent, most, hidden), after

    return bounded


def clipped(upload: Groups, sent: Groups, most: float, hidden: bool = False) -> Groups:
    """An upload with the way from what was sent (from zero, where nothing of the kind was)
    shortened to a norm of `most`.

    Counters pass as they are. `hidden`: an update that is not finite is none at all, since nobody
    may learn of it.
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

    def shorten(there: Tensor, here: Tensor) -> Tensor:
        if not there.is_floating_point():
            return there
        near = torch.where(
            norm > most, here + (most / norm).to(there.dtype) * (there - here), there
        )
        return torch.where(norm.isfinite(), near, here) if hidden else near

    return {group: combine(shorten, tensors, origin[group]) for group, tensors in upload.items()}


# --- the server's half


def _robust(server: ServerFn, how: Gathering) -> ServerFn:
    def robust(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        cut = how.cut(len(rates["clients"]))
        return server(
            model,
            state,
            {group: trimmed_mean(tensors, cut) for group, tensors in collected.items()},
            rates,
        )

    return robust


def _ready(phase: Phase) -> Callable[[Model, Groups, World], Groups]:
    """What the phase opens, and a key for noise with a count of the draws, which phases share: so
    no two are the same.
    """

    def opens(model: Model, state: Groups, world: World) -> Groups:
        if "buffers" in phase.collect and (shared := sorted(state["buffers"])):
            raise InputError(
                f"noise is for parameters: among the buffers that this network shares ({shared[0]},"
                " ...) it may turn a variance negative; keep them with the clients, as in"
                " fedbn(...) or ... | local_bn(private='statistics')"
            )
        drawn = {"key": torch.tensor(fold(("noise", *world.key))), "count": torch.tensor(0)}
        return {
            "noise": state.get("noise", drawn),
            **(phase.opens(model, state, world) if phase.opens else {}),
        }

    return opens


def _noised(server: ServerFn, how: Gathering) -> ServerFn:
    """Drawn on the host, in float64, by a generator that is well tried: the same numbers for every
    engine and device.
    """
    assert how.clip is not None
    reach = how.noise * how.clip

    def noised(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        ledger, deviation = state["noise"], reach / len(rates["clients"])
        source = generator(("noise", int(ledger["key"]), int(ledger["count"])))

        def blur(mean: Tensor) -> Tensor:
            drawn = deviation * np.asarray(source.standard_normal(mean.shape))
            return mean + torch.from_numpy(drawn).to(mean.device, mean.dtype)

        blurred = {group: combine(blur, tensors) for group, tensors in collected.items()}
        return server(
            model, {**state, "noise": {**ledger, "count": ledger["count"] + 1}}, blurred, rates
        )

    return noised
