"""A federated method: a sequence of exchanges, as an immutable value.

In an exchange the server sends named tensors to a cohort of clients, each client computes on its
own data and uploads tensors, and the server folds the uploads into its state. A `Phase` is one kind
of exchange, a `Method` is a tuple of phases, and `a | b` runs b's phases after a's. All functions
of a phase are pure: they do not change their arguments, do not call `.item()` and do not branch on
a tensor, so an engine may loop, vmap, compile or capture them.
"""

from feddkd.method.client import Batch as Batch
from feddkd.method.client import Finish as Finish
from feddkd.method.client import Fold as Fold
from feddkd.method.client import Gradient as Gradient
from feddkd.method.client import Loss as Loss
from feddkd.method.client import Targets as Targets
from feddkd.method.client import own_model as own_model
from feddkd.method.client import own_tensors as own_tensors
from feddkd.method.client import probe_of as probe_of
from feddkd.method.client import uploads as uploads
from feddkd.method.codec import Codec as Codec
from feddkd.method.codec import Parts as Parts
from feddkd.method.method import Method as Method
from feddkd.method.method import Private as Private
from feddkd.method.method import matching as matching
from feddkd.method.phases import NOTHING as NOTHING
from feddkd.method.phases import NOWHERE as NOWHERE
from feddkd.method.phases import Collect as Collect
from feddkd.method.phases import Exchange as Exchange
from feddkd.method.phases import Fact as Fact
from feddkd.method.phases import Part as Part
from feddkd.method.phases import Phase as Phase
from feddkd.method.phases import ServerFn as ServerFn
from feddkd.method.phases import World as World
from feddkd.method.phases import probing as probing
