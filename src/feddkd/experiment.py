"""An experiment: everything that decides a run's numbers, and nothing else.

A frozen value, loaded from TOML; a `[sweep]` table makes a list of them. Engine, device and folders
are not part of it.
"""

import hashlib
import itertools
import json
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from feddkd.data.partitions.registry import PARTITIONS, Partition
from feddkd.data.sources.python_source import find_source
from feddkd.data.sources.registry import Source
from feddkd.data.transforms import transform
from feddkd.errors import InputError, choices
from feddkd.method import Method
from feddkd.methods import parse
from feddkd.models.python_model import find_architecture
from feddkd.models.registry import Architecture
from feddkd.models.weight_files import file_digest
from feddkd.rounds.availability import OnDivergence, Tolerance, tolerance
from feddkd.rounds.evaluation import Protocol, find_protocol
from feddkd.rounds.loop import cohort_size
from feddkd.spec.python_file import names_file
from feddkd.spec.types import Bound, Chance, Count, Share, Whole, checked

USUAL = {
    "availability": "always()",
    "min_clients": 1,
    "on_divergence": "drop",
    "shuffle": True,
    "initial": None,
    "client_validation": "shared",
}
Fraction = typing.Annotated[float, Bound(least=0, below=1)]


@dataclass(frozen=True)
class Experiment:
    """The description of a run. Texts are written as in Python: name(option=value, ...).

    `model` and `data` may also name a function in a Python file: "FILE.py:function" or
    "FILE.py:function(option=value)". Paths are relative to the working directory, as in `initial`.
    The file's sha256 is part of the digest; what the file imports is not. Making an experiment only
    reads the file. Running the experiment runs the file, with all rights of the user: run an
    experiment that names a file only if you trust the file.
    """

    method: str
    data: str = "digits"
    partition: str = "dirichlet(alpha=0.1)"
    model: str = "mlp"
    clients: Count = 10  # K
    cohort: Count | Share = 1.0  # a fraction of the clients, or a number of them
    rounds: Count = 10  # T
    seed: Whole = 0  # decides initial weights, split, cohorts and batches
    # decides validation set and partition in place of `seed`, to share them between seeds
    split_seed: Whole | None = None
    validation: Fraction = 0.1  # share of the training set held out, class by class
    # share of the clients' part that the server holds instead, for methods that use public data
    public: Fraction = 0.0
    # share of the training set given to the clients; all the rest unless said
    training: Share | None = None
    transform: str | None = None  # in place of the one that goes with the data
    evaluation: Literal["auto", "global", "client_mean", "client_pooled"] = "auto"
    # mini-batches are drawn; or else read in stored order, every round going on where one before it
    # ended; or drawn in DKD alone
    shuffle: bool | Literal["distillation"] = True
    dtype: Literal["float32", "float64"] = "float32"
    # a safetensors file with the weights to start from; the seed draws them unless said
    initial: str | None = None
    initial_sha256: str | None = None  # of that file: read off it unless said
    availability: str = "always()"  # who does not answer when
    min_clients: Count = 1  # with fewer left a round ends there
    on_divergence: OnDivergence = "drop"  # what becomes of a client whose numbers are not finite
    # log the theory's quantities in every round; changes no number of the run
    diagnostics: bool = False
    # test accuracy whose price is reported; changes no number of the run
    target: Share | None = None
    # of the epsilon that methods with noise report; changes no number of the run
    delta: Chance | None = None
    name: str = ""  # a label for tables; changes no number of the run

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(Experiment, include_extras=True)
        for item in fields(self):
            object.__setattr__(
                self, item.name, checked(getattr(self, item.name), hints[item.name], item.name)
            )
        if (self.initial is None) != (self.initial_sha256 is None):
            object.__setattr__(self, "initial_sha256", file_digest(self.initial))
        cohort_size(self.cohort, self.clients, self.min_clients)
        self.canonical  # noqa: B018  # so that every text is read, and complained of, now

    def length(self, until: int | None) -> int:
        """Its rounds, where no more of them are wanted than so many."""
        return self.rounds if until is None else min(until, self.rounds)

    @cached_property
    def parsed_method(self) -> Method:
        method = parse(self.method)
        method.check_order()
        return (
            method if self.shuffle is True else method.in_stored_order(distilling=not self.shuffle)
        )

    @cached_property
    def parsed_data(self) -> Source:
        return find_source(self.data)

    @cached_property
    def parsed_partition(self) -> Partition:
        return PARTITIONS.one(self.partition)

    @cached_property
    def architecture(self) -> Architecture:
        return find_architecture(self.model)

    @cached_property
    def tolerance(self) -> Tolerance:
        return tolerance(self.availability, self.min_clients, self.on_divergence)

    @property
    def runs_a_file(self) -> bool:
        """Whether running the experiment runs a Python file that it names."""
        return names_file(self.model) or names_file(self.data)

    @property
    def transform_text(self) -> str:
        return self.parsed_data.transform if self.transform is None else self.transform

    @property
    def protocol(self) -> Protocol:
        return find_protocol(self.evaluation, self.parsed_method, self.parsed_partition.own_tests)

    @property
    def canonical(self) -> dict[str, Any]:
        """The experiment with nothing left to choose: the same for the same experiment, however it
        was spelled.
        """
        return {
            "method": self.parsed_method.canonical,
            "data": self.parsed_data.canonical,
            "partition": self.parsed_partition.canonical,
            "model": self.architecture.canonical,
            "clients": self.clients,
            "cohort": cohort_size(self.cohort, self.clients),
            "rounds": self.rounds,
            "seed": self.seed,
            "split_seed": self.seed if self.split_seed is None else self.split_seed,
            "validation": self.validation,
            "training": round(1 - self.validation, 12) if self.training is None else self.training,
            "public": self.public,
            "transform": transform(self.transform_text).canonical,
            "evaluation": self.protocol.name.lower(),
            "dtype": self.dtype,
            **{key: value for key, value in self._later.items() if value != USUAL[key]},
        }

    @property
    def _later(self) -> dict[str, Any]:
        """Keys that came later than others: left out of digests where they are as usual, so that
        digests last.
        """
        return {
            "availability": self.tolerance.availability.canonical,
            "min_clients": self.min_clients,
            "on_divergence": self.on_divergence,
            "shuffle": self.shuffle,
            "initial": self.initial_sha256,
            # until this key came, clients with tests of their own were validated on everybody's
            # examples
            "client_validation": "own"
            if self.parsed_partition.own_tests and self.validation
            else "shared",
        }

    @cached_property
    def digest(self) -> str:
        return _digest(self.canonical)

    @property
    def family(self) -> str:
        """A digest without the seed: what is averaged over seeds."""
        return _digest(
            {
                key: value
                for key, value in self.canonical.items()
                if key not in ("seed", "split_seed")
            }
        )

    def as_dict(self) -> dict[str, Any]:
        """As it was spelled, without the keys that are not set: what `Experiment(**...)` takes."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def _digest(canonical: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()


KEYS = tuple(item.name for item in fields(Experiment))


def load(path: Path, settings: Sequence[str] = ()) -> list[Experiment]:
    """The experiments of a TOML file, in the order of its sweep, with `key=value` settings laid
    over it.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the experiment {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    try:
        return expand(overlaid(table, settings))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def expand(table: Mapping[str, Any]) -> list[Experiment]:
    """One experiment for each combination of the values under [sweep], the last key varying
    fastest.
    """
    plain = {key: value for key, value in table.items() if key != "sweep"}
    sweep = table.get("sweep", {})
    if not isinstance(sweep, dict):
        raise InputError("sweep must be a table of key = [values]")
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"sweep.{key} must be a list with at least one value, not {values!r}")
        if key in plain:
            raise InputError(f"{key!r} is given both for itself and under sweep")
    combinations = itertools.product(*sweep.values())
    experiments = [
        _experiment({**plain, **dict(zip(sweep, values, strict=True))}) for values in combinations
    ]
    if len({experiment.digest for experiment in experiments}) < len(experiments):
        raise InputError(
            "sweep holds the same experiment twice: its values must differ in what changes a number"
        )
    return experiments


def _experiment(table: Mapping[str, Any]) -> Experiment:
    for key in table:
        if key not in KEYS:
            raise InputError(f"unknown key {key!r}; there are: {choices((*KEYS, 'sweep'))}")
    if "method" not in table:
        raise InputError("the key 'method' is missing, as in method = \"fedavg() | dkd()\"")
    return Experiment(**table)


def overlaid(table: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A table with `key=value` settings in place; a value is read as TOML, or else as the text it
    is.
    """
    result = {
        key: dict(value) if isinstance(value, dict) else value for key, value in table.items()
    }
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"a setting is written key=value, not {setting!r}")
        swept = key.removeprefix("sweep.")
        result.pop(swept, None)
        sweep = result.setdefault("sweep", {})
        if not isinstance(sweep, dict):
            raise InputError("sweep must be a table of key = [values]")
        sweep.pop(swept, None)
        (result if key == swept else sweep)[swept] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
