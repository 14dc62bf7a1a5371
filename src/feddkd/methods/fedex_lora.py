"""FedEx-LoRA: Singhal, Ponkshe, Vepakomma, "FedEx-LoRA: exact aggregation for federated and
efficient fine-tuning of large language models", ACL 2025, arXiv:2410.09432.

    A = sum_k n_k/n A_k,   B = sum_k n_k/n B_k
    R <- R + alpha/rank (sum_k n_k/n B_k A_k - B A)

The product of the averaged factors is not the average of the clients' products B_k A_k. FedEx-LoRA
averages the factors, as FedAvg does, and adds what is missing to a residual R of each frozen
weight. So the shared weight is the exact average of the clients' weights. The network is one of
feddkd.lora(net, residual=True). All other tensors are averaged, and so is the whole of a network
without adapters.

R has the shape of the frozen weight. It is sent with every model in full, and clients do not upload
it. The paper sends it as a product of low rank where that is smaller; its clients have equal
weights.
"""

from dataclasses import replace

from torch import Tensor
from torch.func import vmap

from feddkd.errors import InputError
from feddkd.method import Collect, Fold, Method, World
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.registry import METHODS
from feddkd.models.adapters import Adapted, adapters, product
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, combine, without


@METHODS.register
def fedex_lora(local: Local) -> Method:
    """Exact average of adapters: R <- R + alpha/rank (sum_k n_k/n B_k A_k - B A)."""
    method = local_training(
        local, Variant(opens=_check, server=_server, collect={"params": Collect.EVERY})
    )
    (phase,) = method.phases
    assert isinstance(phase.client, Fold)
    return replace(method, phases=(replace(phase, client=_without_residuals(phase.client)),))


def _without_residuals(fold: Fold) -> Fold:
    """Return the client's half without residuals in its upload."""

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = fold.finish(model, sent, carry, memo)
        residuals = {r for _, (_, _, r) in _trained(model)}
        return {**upload, "buffers": without(upload["buffers"], residuals)}, after

    return replace(fold, finish=finish)


def _trained(model: Model) -> list[tuple[Adapted, tuple[str, str, str]]]:
    """Return the adapters with two trained factors, and the names of A, B and R."""
    found = []
    for name, layer in adapters(model.net).items():
        slots = (f"{name}.{part}" for part in ("lora_A.default.weight", "lora_B.default.weight"))
        a, b = (model.tensors.slots[slot] for slot in slots)
        if a in model.param_names:
            found.append((layer, (a, b, f"{name}.residual")))
    return found


def _check(model: Model, state: Groups, world: World) -> Groups:
    trained = _trained(model)
    known = {a for _, (a, _, _) in trained}
    if unknown := sorted(n for n in model.param_names - known if ".lora_A." in n):
        raise InputError(
            f"fedex_lora: {unknown[0]!r} is not of feddkd.lora(net, residual=True), so it has no"
            " residual"
        )
    for layer, (a, b, residual) in trained:
        if layer.residual is None:
            raise InputError(
                f"fedex_lora: an adapter of this network has no {residual!r}: make the network with"
                " feddkd.lora(net, residual=True)"
            )
        for name in (a, b, residual):
            if name not in {**state["params"], **state["buffers"]}:
                raise InputError(
                    f"fedex_lora: clients keep {name!r}, so the average of their products is not"
                    " known: share both factors of each adapter"
                )
    return {}


def _server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Average all tensors, and add to each residual what the average of its factors lacks."""
    n = rates["examples"]

    def mean(stacked: Tensor) -> Tensor:
        share = n.to(stacked.dtype) / n.sum()
        return (share.reshape(-1, *(1,) * (stacked.dim() - 1)) * stacked).sum(0)

    every, params = collected["params"], combine(mean, collected["params"])
    averaged = take_average(model, state, {**collected, "params": params}, rates)
    moved = {}
    for layer, (a, b, residual) in _trained(model):
        lacking = mean(vmap(product)(every[a], every[b])) - product(params[a], params[b])
        moved[residual] = state["buffers"][residual] + layer.scale * lacking
    return {**averaged, "buffers": {**averaged["buffers"], **moved}}
