"""Federated learning by decentralised knowledge distillation."""

from feddkd.errors import ClientError as ClientError
from feddkd.errors import InputError as InputError
from feddkd.errors import NobodyAnsweredError as NobodyAnsweredError
from feddkd.experiment import Experiment as Experiment
from feddkd.methods import METHODS as METHODS
from feddkd.methods import dkd as dkd
from feddkd.methods import fedavg as fedavg
from feddkd.methods import fedbn as fedbn
from feddkd.methods import fedmax as fedmax
from feddkd.methods import fedprox as fedprox
from feddkd.methods import parse as parse
from feddkd.models import functional as functional
from feddkd.simulation import Result as Result
from feddkd.simulation import simulate as simulate
from feddkd.version import __version__ as __version__

__all__ = [
    "METHODS", "ClientError", "Experiment", "InputError", "NobodyAnsweredError", "Result", "__version__", "dkd", "fedavg",
    "fedbn", "fedmax", "fedprox", "functional", "parse", "simulate",
]  # fmt: skip
