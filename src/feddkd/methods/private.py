"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization
layers", arXiv:1912.00818.

    fedavg() | private(names="head.*")      the layer `head` is each client's own, the rest is averaged

A piece to put after any method: the tensors it names stay with their client and are trained there.
`names` lists patterns as in file names, joined by commas: "head.*, *.bias". They mean names in the
network's `state_dict()`; a pattern that fits none of them is an error. Batch norm by kind is
`local_bn`.
"""

from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.methods.registry import METHODS


@METHODS.register
def private(*, names: str = "head.*") -> Method:
    """Whatever comes before it, with the tensors of these names kept at each client: w = (w',
    w_k^own).
    """
    patterns = frozenset(name.strip() for name in names.split(",") if name.strip())
    if not patterns:
        raise InputError(
            "method 'private': names must list the tensors that stay with their client, as in"
            " 'head.*'"
        )
    return Method((), private_patterns=patterns)
