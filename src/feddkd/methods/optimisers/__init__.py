"""Optimisers as pairs of pure functions, for clients and for the server."""

from feddkd.methods.optimisers.adam import adam as adam
from feddkd.methods.optimisers.adam import adamw as adamw
from feddkd.methods.optimisers.adam import lamb as lamb
from feddkd.methods.optimisers.optimiser import Optimiser as Optimiser
from feddkd.methods.optimisers.second_moment import adagrad as adagrad
from feddkd.methods.optimisers.second_moment import adaptive as adaptive
from feddkd.methods.optimisers.second_moment import rmsprop as rmsprop
from feddkd.methods.optimisers.sgd import sgd as sgd
from feddkd.methods.optimisers.table import OPTIMISERS as OPTIMISERS
from feddkd.methods.optimisers.table import OptimiserName as OptimiserName
from feddkd.methods.optimisers.table import optimiser_from as optimiser_from
from feddkd.methods.optimisers.wrappers import clip_norm as clip_norm
from feddkd.methods.optimisers.wrappers import clipped as clipped
from feddkd.methods.optimisers.wrappers import factor_of_step as factor_of_step
from feddkd.methods.optimisers.wrappers import scheduled as scheduled
