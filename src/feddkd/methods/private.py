"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization
layers", arXiv:1912.00818.

    fedavg() | private(names="head.*")      the layer `head` stays at each client

Put it after any method: the tensors it names stay with their client and are trained there. `names`
lists patterns as in file names, with commas between them: "head.*, *.bias"; Python code may also
give a tuple or a list of patterns. They stand for names in the network's `state_dict()`; a pattern
that fits none of them is an error. `local_bn` does the same for batch norm by kind.
"""

from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.methods.registry import METHODS
from feddkd.spec.types import Names


@METHODS.register
def private(*, names: Names = "head.*") -> Method:
    """Keep the tensors of these names at each client: w = (w', w_k^own)."""
    patterns = frozenset(name.strip() for name in names.split(",") if name.strip())
    if not patterns:
        raise InputError(
            "method 'private': names must list the tensors that stay with their client, as in"
            " names='head.*' or names=('head.*', '*.bias')"
        )
    return Method((), private_patterns=patterns)
