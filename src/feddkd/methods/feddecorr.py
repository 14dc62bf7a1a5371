"""FedDecorr: Shi, Liang, Zhang, Tan, Bai, "Towards understanding and mitigating dimensional
collapse in heterogeneous federated learning", ICLR 2023, arXiv:2210.00226.

    local loss = CE + beta / d^2 |K|_F^2,   K = correlation matrix of the features on the mini-batch

The features z are the input of the last linear layer, d of them. K is that of z with mean 0 and
variance 1 over the mini-batch, so features that tell the same are pulled apart. The network's
result on an example so depends on the mini-batch, by the loss alone. The formula is the paper's.
Its code leaves out the diagonal and multiplies by the number of examples in the mini-batch, so its
beta of 0.1 with batches of 64 is about 6.4 here.
"""

from functools import partial

from torch import Tensor

from feddkd.errors import InputError
from feddkd.method import Batch, Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.losses import FEATURES
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative
from feddkd.tensors import Groups, Tensors

EPS = 1e-8  # added to variances


@METHODS.register
def feddecorr(local: Local, gathering: Gathering, *, beta: NonNegative = 0.1) -> Method:
    """FedAvg with features that differ: loss = CE + beta/d^2 |corr(z)|_F^2."""
    variant = Variant(terms=(partial(_term, beta),), requires=FEATURES)
    return local_training(local, variant, gathering)


def _term(
    beta: float,
    model: Model,
    w: Tensors,
    sent: Groups,
    carry: Groups,
    output: Output,
    batch: Batch,
) -> Tensor:
    if model.head is None:
        raise InputError(
            "feddecorr reads the input of the last linear layer, and this network has no linear"
            " layer"
        )
    share, z = batch.share.unsqueeze(-1), output.features
    centred = z - (share * z).sum(0)
    z = centred / ((share * centred**2).sum(0) + EPS).sqrt()
    correlation = z.T @ (share * z)
    return beta * correlation.square().mean()
