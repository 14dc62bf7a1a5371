"""Methods, one file an algorithm, client half and server half together."""

from feddkd.methods.astraea import astraea as astraea
from feddkd.methods.dkd import dkd as dkd
from feddkd.methods.fedavg import fedavg as fedavg
from feddkd.methods.fedbn import fedbn as fedbn
from feddkd.methods.fedma import fedma as fedma
from feddkd.methods.fedmax import fedmax as fedmax
from feddkd.methods.fedprox import fedprox as fedprox
from feddkd.methods.registry import METHODS as METHODS
from feddkd.methods.registry import parse as parse
