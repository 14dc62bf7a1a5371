"""Federated learning by decentralised knowledge distillation.

A name is imported when it is first used, so that importing the package alone takes no torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from feddkd.old_paths import install as _install_old_paths
from feddkd.version import __version__ as __version__

if TYPE_CHECKING:
    from feddkd.api.divided import divide as divide
    from feddkd.api.records import load as load
    from feddkd.api.result import Result as Result
    from feddkd.api.run import run as run
    from feddkd.api.simulate import simulate as simulate
    from feddkd.data.tables import from_table as from_table
    from feddkd.data.versions import redrawn as redrawn
    from feddkd.errors import ClientError as ClientError
    from feddkd.errors import DivergedError as DivergedError
    from feddkd.errors import InputError as InputError
    from feddkd.errors import NobodyAnsweredError as NobodyAnsweredError
    from feddkd.experiment import Experiment as Experiment
    from feddkd.methods import METHODS as METHODS
    from feddkd.methods import astraea as astraea
    from feddkd.methods import centralised as centralised
    from feddkd.methods import data_sharing as data_sharing
    from feddkd.methods import dkd as dkd
    from feddkd.methods import fedacg as fedacg
    from feddkd.methods import fedadagrad as fedadagrad
    from feddkd.methods import fedadam as fedadam
    from feddkd.methods import fedavg as fedavg
    from feddkd.methods import fedavgm as fedavgm
    from feddkd.methods import fedbn as fedbn
    from feddkd.methods import fedcm as fedcm
    from feddkd.methods import feddf as feddf
    from feddkd.methods import feddistill as feddistill
    from feddkd.methods import feddistill_plus as feddistill_plus
    from feddkd.methods import feddyn as feddyn
    from feddkd.methods import feded as feded
    from feddkd.methods import fedexp as fedexp
    from feddkd.methods import fedgamma as fedgamma
    from feddkd.methods import fedgen as fedgen
    from feddkd.methods import fedgkd as fedgkd
    from feddkd.methods import fedlesam as fedlesam
    from feddkd.methods import fedma as fedma
    from feddkd.methods import fedmax as fedmax
    from feddkd.methods import fednova as fednova
    from feddkd.methods import fedntd as fedntd
    from feddkd.methods import fedprox as fedprox
    from feddkd.methods import fedsam as fedsam
    from feddkd.methods import fedsmoo as fedsmoo
    from feddkd.methods import fedspeed as fedspeed
    from feddkd.methods import fedyogi as fedyogi
    from feddkd.methods import local_bn as local_bn
    from feddkd.methods import local_only as local_only
    from feddkd.methods import mofedsam as mofedsam
    from feddkd.methods import moon as moon
    from feddkd.methods import parse as parse
    from feddkd.methods import private as private
    from feddkd.methods import scaffold as scaffold
    from feddkd.methods import server_adagrad as server_adagrad
    from feddkd.methods import server_adam as server_adam
    from feddkd.methods import server_momentum as server_momentum
    from feddkd.methods import server_optimiser as server_optimiser
    from feddkd.methods import server_yogi as server_yogi
    from feddkd.models.functional import functional as functional
    from feddkd.tasks.task import Task as Task

_install_old_paths()

__all__ = [
    "METHODS", "ClientError", "DivergedError", "Experiment", "InputError", "NobodyAnsweredError",
    "Result", "Task", "__version__", "astraea", "centralised", "data_sharing", "divide", "dkd",
    "fedacg", "fedadagrad", "fedadam", "fedavg", "fedavgm", "fedbn", "fedcm", "feddf", "feddistill",
    "feddistill_plus", "feddyn", "feded", "fedexp", "fedgamma", "fedgen", "fedgkd", "fedlesam",
    "fedma", "fedmax", "fednova", "fedntd", "fedprox", "fedsam", "fedsmoo", "fedspeed", "fedyogi",
    "from_table", "functional", "load", "local_bn", "local_only", "mofedsam", "moon", "parse",
    "private", "redrawn", "run", "scaffold", "server_adagrad", "server_adam", "server_momentum",
    "server_optimiser", "server_yogi", "simulate",
]  # fmt: skip
# module -> the names that it has
_PLACES = {
    "feddkd.api.divided": ["divide"],
    "feddkd.api.records": ["load"],
    "feddkd.api.result": ["Result"],
    "feddkd.api.run": ["run"],
    "feddkd.api.simulate": ["simulate"],
    "feddkd.data.tables": ["from_table"],
    "feddkd.data.versions": ["redrawn"],
    "feddkd.errors": ["ClientError", "DivergedError", "InputError", "NobodyAnsweredError"],
    "feddkd.experiment": ["Experiment"],
    "feddkd.models.functional": ["functional"],
    "feddkd.tasks.task": ["Task"],
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, and return it."""
        if name in __all__:
            value = getattr(import_module(_MODULES.get(name, "feddkd.methods")), name)
            globals()[name] = value
            return value
        if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
