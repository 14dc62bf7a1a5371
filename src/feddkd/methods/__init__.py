"""Methods, one file an algorithm, client half and server half together."""

from feddkd.methods.data_sharing import data_sharing as data_sharing
from feddkd.methods.dkd import dkd as dkd
from feddkd.methods.fedavg import fedavg as fedavg
from feddkd.methods.fedbn import fedbn as fedbn
from feddkd.methods.fedbn import local_bn as local_bn
from feddkd.methods.feddf import feddf as feddf
from feddkd.methods.feded import feded as feded
from feddkd.methods.fedmax import fedmax as fedmax
from feddkd.methods.fedopt import fedadagrad as fedadagrad
from feddkd.methods.fedopt import fedadam as fedadam
from feddkd.methods.fedopt import fedavgm as fedavgm
from feddkd.methods.fedopt import fedyogi as fedyogi
from feddkd.methods.fedprox import fedprox as fedprox
from feddkd.methods.registry import METHODS as METHODS
from feddkd.methods.registry import parse as parse
from feddkd.methods.server import server_adagrad as server_adagrad
from feddkd.methods.server import server_adam as server_adam
from feddkd.methods.server import server_momentum as server_momentum
from feddkd.methods.server import server_yogi as server_yogi
