"""Methods, one file an algorithm, client half and server half together."""

from feddkd.methods.dkd import dkd as dkd
from feddkd.methods.fedavg import fedavg as fedavg
from feddkd.methods.fedbn import fedbn as fedbn
from feddkd.methods.feddistill import feddistill as feddistill
from feddkd.methods.feddistill import feddistill_plus as feddistill_plus
from feddkd.methods.fedgen import fedgen as fedgen
from feddkd.methods.fedmax import fedmax as fedmax
from feddkd.methods.fedprox import fedprox as fedprox
from feddkd.methods.registry import METHODS as METHODS
from feddkd.methods.registry import parse as parse
