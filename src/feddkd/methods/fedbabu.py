"""FedBABU: Oh, Kim, Yun, "FedBABU: toward enhanced representation for federated image
classification", ICLR 2022, arXiv:2106.06042.

    rounds:      b_k <- b_k - lr grad_b f_k(b_k, h_0),   b_{t+1} = sum_k n_k / (sum_i n_i) b_k
    evaluation:  v_k = `tune_epochs` epochs of local training from (b_t, h_0)

The head h_0 keeps its first values in all rounds, the same at every client, and is neither trained
nor sent. Before each evaluation every client fine-tunes the model on its own training examples,
with the options of local training, and is judged by the result; see fine_tune. `tune` says what is
fine-tuned: the whole model, the head alone, or the body alone. `names` lists the tensors of the
head as patterns; by default it is the last linear layer.
"""

from dataclasses import replace

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.fine_tuning import Moved, holding, tuning
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.private import keeping
from feddkd.methods.registry import METHODS
from feddkd.spec.types import Count, Names


@METHODS.register
def fedbabu(
    local: Local,
    gathering: Gathering,
    *,
    tune_epochs: Count = 5,
    tune: Moved = "all",
    names: Names | None = None,
) -> Method:
    """FedAvg of the body with a fixed head; each client fine-tunes before it is evaluated."""
    train = local_training(local, Variant(holds=holding("body", names)), gathering)
    phase = tuning(replace(local, epochs=tune_epochs, steps=None), tune, names)
    return keeping(replace(train, phases=(*train.phases, phase)), names, "head")
