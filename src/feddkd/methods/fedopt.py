"""FedAvgM, FedAdam, FedYogi, FedAdagrad, the usual names of FedAvg with an optimiser at the server:
Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv:2003.00295; FedAvgM: Hsu, Qi,
Brown, arXiv:1909.06335.

    fedavgm(...) = fedavg(...) | server_momentum(...)
    fedadam(...) = fedavg(...) | server_adam(...),   and so on

The formulas are in server_optimisers.py. An option of the server has the prefix `server_` where
clients have an option of the same name. In the paper, clients have equal weights in Algorithm 2 and
weights by examples in the experiments; here they have weights by examples, as in FedAvg.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.fedavg import fedavg
from feddkd.methods.local import Local
from feddkd.methods.registry import METHODS
from feddkd.methods.server_optimisers import (
    server_adagrad,
    server_adam,
    server_momentum,
    server_yogi,
)

CLIENT_OPTIONS = {option.name for option in dataclasses.fields(Local)}


def _fedavg_then(server: Callable[..., Method], name: str, summary: str) -> Callable[..., Method]:
    """Register `fedavg(...) | server(...)` as one method with the options of both."""
    server_names: dict[str, str] = {}  # option of the method -> option of the server
    options = []
    for option in inspect.signature(server).parameters.values():
        prefix = "server_" if option.name in CLIENT_OPTIONS else ""
        options.append(option.replace(name=prefix + option.name))
        server_names[prefix + option.name] = option.name

    def factory(local: Local, gathering: Gathering, **chosen: Any) -> Method:
        server_options = {server_names[key]: value for key, value in chosen.items()}
        return fedavg(**vars(local), **vars(gathering)) | server(**server_options)

    first = list(inspect.signature(factory).parameters.values())[:2]
    parameters = [*first, *options]
    factory.__name__, factory.__doc__ = name, summary
    factory.__annotations__ = {option.name: option.annotation for option in parameters}
    factory.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return METHODS.register(factory)


fedavgm = _fedavg_then(
    server_momentum,
    "fedavgm",
    "FedAvg with momentum at the server: v <- b v + (w_t - wbar), w <- w_t - lr v.",
)
fedadam = _fedavg_then(
    server_adam,
    "fedadam",
    "FedAvg with Adam at the server: g = w_t - wbar, w <- w_t - lr m/(sqrt(v) + tau).",
)
fedyogi = _fedavg_then(
    server_yogi,
    "fedyogi",
    "FedAvg with Yogi at the server: as fedadam, with v <- v - (1-b2) g^2 sign(v - g^2).",
)
fedadagrad = _fedavg_then(
    server_adagrad,
    "fedadagrad",
    "FedAvg with Adagrad at the server: as fedadam, with v <- v + g^2.",
)
