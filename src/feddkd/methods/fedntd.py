"""FedNTD: Lee, Jeong, Shin, Bae, Yun, "Preservation of the global knowledge by not-true
distillation in federated learning", NeurIPS 2022, arXiv:2106.03097.

    local loss = CE + beta T^2 KL( softmax(z_t / T) || softmax(z / T) )
    both softmax over the classes that are not the label

z_t are the logits of the model that was sent, in evaluation mode; the published code does not set
the mode of its copy. The default T = 1 is that of the published experiments; the default of the
code's class is 3.
"""

from functools import partial

from torch import Tensor

from feddkd.method import Batch, Method, own_model
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, hold_private, local_training
from feddkd.methods.losses import CLASSES, not_true_distillation
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative, Positive
from feddkd.tensors import Groups, Tensors


@METHODS.register
def fedntd(
    local: Local, gathering: Gathering, *, beta: NonNegative = 1.0, temperature: Positive = 1.0
) -> Method:
    """FedAvg with distillation among the other classes: loss = CE + beta T^2 KL(z_t/T || z/T)."""
    term = partial(_term, beta, temperature)
    variant = Variant(terms=(term,), begin=hold_private, requires=CLASSES)
    return local_training(local, variant, gathering)


def _term(
    beta: float,
    temperature: float,
    model: Model,
    w: Tensors,
    sent: Groups,
    carry: Groups,
    output: Output,
    batch: Batch,
) -> Tensor:
    teacher = model(*own_model(model, sent, carry), batch.x, mode="eval", key=batch.key).logits
    return beta * not_true_distillation(teacher, output.logits, batch, temperature)
