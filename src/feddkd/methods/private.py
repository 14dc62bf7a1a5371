"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization
layers", arXiv:1912.00818.

    w = (w', w_k^own),   only w' is averaged;   w_k^own = the tensors that `names` lists

    fedavg() | private(names="head.*")    each client has its own layer `head`

A piece to put after any method: the tensors it names stay with their client and are trained there.
`names` lists patterns as for file names, separated by commas: "head.*, *.bias"; Python code may
also give a tuple or a list of patterns. They are compared with the names in the network's
`state_dict()`; a pattern that matches none of them is an error. For batch-norm layers there is
`local_bn`.
"""

from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.methods.registry import METHODS
from feddkd.spec.types import Names


@METHODS.register
def private(*, names: Names = "head.*") -> Method:
    """The method before it, with the named tensors kept at each client: w = (w', w_k^own)."""
    patterns = frozenset(name.strip() for name in names.split(",") if name.strip())
    if not patterns:
        raise InputError(
            "method 'private': names must list at least one tensor that stays with its client, as"
            " in names='head.*' or names=('head.*', '*.bias')"
        )
    return Method((), private_patterns=patterns)
