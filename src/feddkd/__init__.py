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
    from feddkd.methods import apfl as apfl
    from feddkd.methods import aso_fed as aso_fed
    from feddkd.methods import astraea as astraea
    from feddkd.methods import ccvr as ccvr
    from feddkd.methods import centralised as centralised
    from feddkd.methods import data_sharing as data_sharing
    from feddkd.methods import ditto as ditto
    from feddkd.methods import dkd as dkd
    from feddkd.methods import fedacg as fedacg
    from feddkd.methods import fedadagrad as fedadagrad
    from feddkd.methods import fedadam as fedadam
    from feddkd.methods import fedala as fedala
    from feddkd.methods import fedamp as fedamp
    from feddkd.methods import fedavg as fedavg
    from feddkd.methods import fedavgm as fedavgm
    from feddkd.methods import fedbabu as fedbabu
    from feddkd.methods import fedbn as fedbn
    from feddkd.methods import fedcm as fedcm
    from feddkd.methods import feddecorr as feddecorr
    from feddkd.methods import feddf as feddf
    from feddkd.methods import feddistill as feddistill
    from feddkd.methods import feddistill_plus as feddistill_plus
    from feddkd.methods import feddyn as feddyn
    from feddkd.methods import feded as feded
    from feddkd.methods import fedex_lora as fedex_lora
    from feddkd.methods import fedexp as fedexp
    from feddkd.methods import fedfish as fedfish
    from feddkd.methods import fedfomo as fedfomo
    from feddkd.methods import fedgamma as fedgamma
    from feddkd.methods import fedgen as fedgen
    from feddkd.methods import fedgkd as fedgkd
    from feddkd.methods import fedlc as fedlc
    from feddkd.methods import fedlesam as fedlesam
    from feddkd.methods import fedma as fedma
    from feddkd.methods import fedmax as fedmax
    from feddkd.methods import fednova as fednova
    from feddkd.methods import fedntd as fedntd
    from feddkd.methods import fedper as fedper
    from feddkd.methods import fedproto as fedproto
    from feddkd.methods import fedprox as fedprox
    from feddkd.methods import fedrep as fedrep
    from feddkd.methods import fedrod as fedrod
    from feddkd.methods import fedrs as fedrs
    from feddkd.methods import fedsam as fedsam
    from feddkd.methods import fedsmoo as fedsmoo
    from feddkd.methods import fedspeed as fedspeed
    from feddkd.methods import fedyogi as fedyogi
    from feddkd.methods import fine_tune as fine_tune
    from feddkd.methods import lg_fedavg as lg_fedavg
    from feddkd.methods import local_bn as local_bn
    from feddkd.methods import local_only as local_only
    from feddkd.methods import mix2fld as mix2fld
    from feddkd.methods import mofedsam as mofedsam
    from feddkd.methods import moon as moon
    from feddkd.methods import parse as parse
    from feddkd.methods import per_fedavg as per_fedavg
    from feddkd.methods import pfedme as pfedme
    from feddkd.methods import private as private
    from feddkd.methods import quantise as quantise
    from feddkd.methods import regmean as regmean
    from feddkd.methods import scaffold as scaffold
    from feddkd.methods import server_adagrad as server_adagrad
    from feddkd.methods import server_adam as server_adam
    from feddkd.methods import server_momentum as server_momentum
    from feddkd.methods import server_optimiser as server_optimiser
    from feddkd.methods import server_yogi as server_yogi
    from feddkd.methods import topk as topk
    from feddkd.models.adapters import lora as lora
    from feddkd.models.functional import functional as functional
    from feddkd.tasks.task import Task as Task

_install_old_paths()

__all__ = [
    "METHODS", "ClientError", "DivergedError", "Experiment", "InputError", "NobodyAnsweredError",
    "Result", "Task", "__version__", "apfl", "aso_fed", "astraea", "ccvr", "centralised",
    "data_sharing", "ditto", "divide", "dkd", "fedacg", "fedadagrad", "fedadam", "fedala", "fedamp",
    "fedavg", "fedavgm", "fedbabu", "fedbn", "fedcm", "feddecorr", "feddf", "feddistill",
    "feddistill_plus", "feddyn", "feded", "fedex_lora", "fedexp", "fedfish", "fedfomo", "fedgamma",
    "fedgen", "fedgkd", "fedlc", "fedlesam", "fedma", "fedmax", "fednova", "fedntd", "fedper",
    "fedproto", "fedprox", "fedrep", "fedrod", "fedrs", "fedsam", "fedsmoo", "fedspeed", "fedyogi",
    "fine_tune", "from_table", "functional", "lg_fedavg", "load", "local_bn", "local_only", "lora",
    "mix2fld", "mofedsam", "moon", "parse", "per_fedavg", "pfedme", "private", "quantise",
    "redrawn", "regmean", "run", "scaffold", "server_adagrad", "server_adam", "server_momentum",
    "server_optimiser", "server_yogi", "simulate", "topk",
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
    "feddkd.models.adapters": ["lora"],
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
