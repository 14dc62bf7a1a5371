"""All names that authors of methods, networks, data sets and partitions need.

Import them from here: the other modules of the package are internal and may move between versions.
"""

from feddkd.data.examples import Data as Data
from feddkd.data.examples import Examples as Examples
from feddkd.data.examples import from_arrays as from_arrays
from feddkd.data.partitions.registry import PARTITIONS as PARTITIONS
from feddkd.data.partitions.registry import Partition as Partition
from feddkd.data.partitions.registry import Table as Table
from feddkd.data.sources import SOURCES as SOURCES
from feddkd.data.sources.registry import Source as Source
from feddkd.data.transforms import TRANSFORMS as TRANSFORMS
from feddkd.data.transforms import Step as Step
from feddkd.errors import InputError as InputError
from feddkd.method import Batch as Batch
from feddkd.method import Collect as Collect
from feddkd.method import Fold as Fold
from feddkd.method import Gradient as Gradient
from feddkd.method import Method as Method
from feddkd.method import Phase as Phase
from feddkd.method import World as World
from feddkd.methods.local import Local as Local
from feddkd.methods.local import Variant as Variant
from feddkd.methods.local import local_training as local_training
from feddkd.methods.losses import cross_entropy as cross_entropy
from feddkd.methods.losses import task_divergence as task_divergence
from feddkd.methods.losses import task_loss as task_loss
from feddkd.methods.optimisers import sgd as sgd
from feddkd.methods.registry import METHODS as METHODS
from feddkd.models.functional import Mode as Mode
from feddkd.models.functional import Model as Model
from feddkd.models.functional import Output as Output
from feddkd.models.functional import functional as functional
from feddkd.models.registry import MODELS as MODELS
from feddkd.models.registry import Architecture as Architecture
from feddkd.randomness import Key as Key
from feddkd.randomness import generator as generator
from feddkd.rounds.availability import AVAILABILITIES as AVAILABILITIES
from feddkd.rounds.availability import Availability as Availability
from feddkd.runs.prepare import prepare as prepare
from feddkd.spec.schedules import Rate as Rate
from feddkd.spec.schedules import Repeat as Repeat
from feddkd.spec.types import Bound as Bound
from feddkd.spec.types import Chance as Chance
from feddkd.spec.types import Count as Count
from feddkd.spec.types import NonNegative as NonNegative
from feddkd.spec.types import Positive as Positive
from feddkd.spec.types import Share as Share
from feddkd.spec.types import Whole as Whole
from feddkd.tasks.lookup import TASKS as TASKS
from feddkd.tasks.task import Task as Task
from feddkd.tensors import Groups as Groups
from feddkd.tensors import Tensors as Tensors
from feddkd.tensors import combine as combine
from feddkd.tensors import zeros as zeros
from feddkd.testing import check_method as check_method
