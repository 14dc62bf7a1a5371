"""`Experiment`: the description of a run, its canonical form and its digest."""

import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

from feddkd.data.partitions.registry import Partition, find_partition
from feddkd.data.sources.python_source import find_source
from feddkd.data.sources.registry import Source
from feddkd.data.transforms import transform
from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.methods import parse
from feddkd.models.python_model import find_architecture
from feddkd.models.registry import Architecture
from feddkd.models.weight_files import file_digest
from feddkd.randomness import Key
from feddkd.rounds.attacks import Attack, find_attack
from feddkd.rounds.availability import OnDivergence, Tolerance, tolerance
from feddkd.rounds.evaluation import Evaluation, Protocol, find_protocol
from feddkd.rounds.loop import cohort_size
from feddkd.rounds.metrics import Metric, check_target, find_metrics
from feddkd.rounds.selection import Selection, find_selection
from feddkd.spec.python_file import names_file
from feddkd.spec.types import Bound, Chance, Count, Share, Whole, checked
from feddkd.tasks.lookup import find_task, task_digest_text
from feddkd.tasks.task import Task, check_offers

USUAL = {
    "availability": "always()",
    "selection": "uniform()",
    "attack": "none()",
    "min_clients": 1,
    "on_divergence": "drop",
    "shuffle": True,
    "initial": None,
    "client_validation": "shared",
    "task": "classification()",
    "client_tests": "auto",
    "evaluate_every": 1,
    "evaluate_clients": 1.0,
}
# not written with their default: older files lack them
NEW_KEYS = (
    *("task", "client_tests", "selection", "attack"),
    *("evaluate_every", "evaluate_clients"),
)
LONGEST_NAME = 1000
Fraction = typing.Annotated[float, Bound(least=0, below=1)]


@dataclass(frozen=True)
class Experiment:
    """The description of a run. Texts are written as in Python: name(option=value, ...).

    `model`, `data` and `task` may also name a function in a Python file: "FILE.py:function" or
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
    # share of the clients' part that the server holds instead, for methods that need public data
    public: Fraction = 0.0
    # share of the training set given to the clients; all the rest by default
    training: Share | None = None
    # "own": each client has test and validation examples like its training examples. "auto": it has
    # them if the partition divides the test set, too
    client_tests: Literal["auto", "own"] = "auto"
    transform: str | None = None  # replaces the transform of the data source
    evaluation: Literal["auto", "global", "client_mean", "client_pooled"] = "auto"
    # of this many rounds one is evaluated; the first and the last always are
    evaluate_every: Count = 1
    # how many clients, or which share, are evaluated where clients are: the same in all rounds
    evaluate_clients: Count | Share = 1.0
    # True: mini-batches are drawn. False: they are read in stored order, and a round continues
    # where the round before it ended. "distillation": they are drawn in DKD alone
    shuffle: bool | Literal["distillation"] = True
    dtype: Literal["float32", "float64"] = "float32"
    # a safetensors file with the first weights; by default the seed draws them
    initial: str | None = None
    initial_sha256: str | None = None  # the sha256 of that file; by default computed from it
    availability: str = "always()"  # which clients do not answer
    selection: str = "uniform()"  # which clients are in a cohort
    attack: str = "none()"  # what malicious clients do
    min_clients: Count = 1  # with fewer clients left, a round ends
    on_divergence: OnDivergence = "drop"  # if a client's numbers are not finite
    # log the theory's quantities in every round; changes no number of the run
    diagnostics: bool = False
    # the metrics that rows hold, the headline first (by default accuracy and loss); changes no
    # number of the run
    metrics: Sequence[str] | None = None
    # what is learned, or FILE.py:function; a function in a file is called when the data are ready
    task: str = "classification"
    # value of the headline metric on the test set, or of a named one ("rmse <= 0.3"), whose cost
    # is reported; changes no number of the run
    target: float | str | None = None
    # of the epsilon that methods with noise report; changes no number of the run
    delta: Chance | None = None
    name: str = ""  # a label for tables; changes no number of the run

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(Experiment, include_extras=True)
        if self.metrics is not None:
            names = tuple(metric.name for metric in find_metrics(self.metrics))
            object.__setattr__(self, "metrics", names)
        for item in (item for item in fields(self) if item.name != "metrics"):
            value = checked(getattr(self, item.name), hints[item.name], item.name)
            object.__setattr__(self, item.name, value)
        if len(self.name) > LONGEST_NAME:
            raise InputError(
                f"name has {len(self.name)} characters; it is a label, of {LONGEST_NAME} at most"
            )
        if (self.initial is None) != (self.initial_sha256 is None):
            object.__setattr__(self, "initial_sha256", file_digest(self.initial))
        cohort = cohort_size(self.cohort, self.clients, self.min_clients)
        self.parsed_selection.check_fits(self.parsed_method, self.clients, cohort)
        self.canonical  # noqa: B018  # reads every text, and raises the errors in them now
        if not names_file(self.task):  # a file is not run before the experiment is
            check_target(self.target, self.measured)
            self.parsed_method.check_task(self.parsed_task)
            self.parsed_attack.check_fits(self.parsed_method, self.parsed_task, self.clients)
            if self.diagnostics:
                check_offers(self.parsed_task, frozenset({"classes"}), "diagnostics")

    def length(self, until: int | None) -> int:
        """Return how many rounds to play if the run stops after round `until`."""
        return self.rounds if until is None else min(until, self.rounds)

    @cached_property
    def parsed_method(self) -> Method:
        """The method as a value, with attacked uploads if there is an attack on them."""
        method = self.parsed_attack.on(parse(self.method))
        method.check_order()
        if self.shuffle is True:
            return method
        return method.in_stored_order(distilling=not self.shuffle)

    @cached_property
    def parsed_data(self) -> Source:
        """The data source as a value."""
        return find_source(self.data)

    @cached_property
    def parsed_partition(self) -> Partition:
        """The partition as a value."""
        return find_partition(self.partition)

    @cached_property
    def architecture(self) -> Architecture:
        """The network's architecture as a value."""
        return find_architecture(self.model)

    @cached_property
    def parsed_task(self) -> Task:
        """The task as a value; a Python file that it names is run."""
        return find_task(self.task)

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics that rows hold: those that are asked for, or those of the task."""
        return find_metrics(self.parsed_task.metrics if self.metrics is None else self.metrics)

    @cached_property
    def tolerance(self) -> Tolerance:
        """The treatment of clients that fail."""
        return tolerance(self.availability, self.min_clients, self.on_divergence)

    @cached_property
    def parsed_attack(self) -> Attack:
        """The attack of malicious clients as a value."""
        return find_attack(self.attack)

    @cached_property
    def parsed_selection(self) -> Selection:
        """The selection of cohorts as a value."""
        return find_selection(self.selection)

    @property
    def split_key(self) -> Key:
        """The key of the draws of validation set and partition."""
        return (self.seed if self.split_seed is None else self.split_seed,)

    @property
    def judging(self) -> Evaluation:
        """The evaluation as a value: models, metrics, rounds and clients."""
        every, clients = self.evaluate_every, self.evaluate_clients
        return Evaluation(self.protocol, self.measured, every, clients)

    @property
    def transform_text(self) -> str:
        """The transform's text: the experiment's, or else that of the data source."""
        return self.parsed_data.transform if self.transform is None else self.transform

    @property
    def protocol(self) -> Protocol:
        """The rule by which accuracy is measured."""
        own_tests = self.parsed_partition.own_tests or self.client_tests == "own"
        return find_protocol(self.evaluation, self.parsed_method, own_tests)

    @property
    def canonical(self) -> dict[str, Any]:
        """The experiment with all defaults filled in: the same for all its spellings."""
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
        """Keys that were added later than others. Digests leave them out if they have their usual
        value, so that old digests stay valid.
        """
        validates_apart = self.parsed_partition.own_tests and self.validation
        return {
            "availability": self.tolerance.availability.canonical,
            "selection": self.parsed_selection.canonical,
            "attack": self.parsed_attack.canonical,
            "min_clients": self.min_clients,
            "on_divergence": self.on_divergence,
            "shuffle": self.shuffle,
            "initial": self.initial_sha256,
            # before this key, clients with separate tests were validated on the shared examples
            "client_validation": "own" if validates_apart else "shared",
            "task": task_digest_text(self.task),
            "client_tests": self.client_tests,
            "evaluate_every": self.evaluate_every,
            "evaluate_clients": self.evaluate_clients,
        }

    @cached_property
    def digest(self) -> str:
        """The sha256 of the canonical form."""
        return _digest(self.canonical)

    @property
    def family(self) -> str:
        """The digest without the seed. Results are averaged over a family."""
        seeds = ("seed", "split_seed")
        return _digest({key: value for key, value in self.canonical.items() if key not in seeds})

    def as_dict(self) -> dict[str, Any]:
        """Return the keys with their written values, without those that are None, and without new
        keys that have their default.
        """
        usual = {item.name: item.default for item in fields(self) if item.name in NEW_KEYS}
        written = asdict(self).items()
        return {k: value for k, value in written if value is not None and value != usual.get(k)}


def _digest(canonical: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()


KEYS = tuple(item.name for item in fields(Experiment))
