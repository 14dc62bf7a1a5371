"""Methods, one file an algorithm, client half and server half together."""

from feddkd.methods.dkd import dkd as dkd
from feddkd.methods.fedavg import fedavg as fedavg
from feddkd.methods.fedbn import fedbn as fedbn
from feddkd.methods.fedbn import local_bn as local_bn
from feddkd.methods.feddistill import feddistill as feddistill
from feddkd.methods.feddistill import feddistill_plus as feddistill_plus
from feddkd.methods.feddyn import feddyn as feddyn
from feddkd.methods.fedgen import fedgen as fedgen
from feddkd.methods.fedgkd import fedgkd as fedgkd
from feddkd.methods.fedmax import fedmax as fedmax
from feddkd.methods.fednova import fednova as fednova
from feddkd.methods.fedntd import fedntd as fedntd
from feddkd.methods.fedprox import fedprox as fedprox
from feddkd.methods.moon import moon as moon
from feddkd.methods.registry import METHODS as METHODS
from feddkd.methods.registry import parse as parse
from feddkd.methods.scaffold import scaffold as scaffold
