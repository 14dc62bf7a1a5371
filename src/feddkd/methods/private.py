"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization
layers", arXiv:1912.00818.

    w = (w', w_k^own),   only w' is averaged;   w_k^own = the tensors that `names` lists

    fedavg() | private(names="head.*")    each client has its own layer `head`

A piece to put after any method: the tensors it names stay with their client and are trained there.
`names` lists patterns as for file names, separated by commas: "head.*, *.bias"; Python code may
also give a tuple or a list of patterns. They are compared with the names in the network's
`state_dict()`; a pattern that matches none of them is an error. For batch-norm layers there is
`local_bn`. A pattern with a "!" before it lists all tensors but these: names="!head.*" shares the
head alone. `fedper` and `lg_fedavg` are the same without a pattern: they take the last linear
layer.
"""

from dataclasses import replace

from feddkd.errors import InputError
from feddkd.method import Method, Private, matching
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.types import Names


@METHODS.register
def private(*, names: Names = "head.*") -> Method:
    """The method before it, with the named tensors kept at each client: w = (w', w_k^own)."""
    patterns = patterns_in(names)
    if not patterns:
        raise InputError(
            "method 'private': names must list at least one tensor that stays with its client, as"
            " in names='head.*' or names=('head.*', '*.bias')"
        )
    return Method((), private_patterns=patterns)


def patterns_in(names: str) -> frozenset[str]:
    """Return the patterns in a text that separates them by commas."""
    return frozenset(name.strip() for name in names.split(",") if name.strip())


def keeping(method: Method, names: str | None, kind: Private) -> Method:
    """Return the method with private tensors: those with the names, or of a kind if names is None.

    For the kind "body" the names are those of the tensors that are shared.
    """
    if names is None:
        return replace(method, private=frozenset({kind}))
    patterns = patterns_in(names)
    if kind == "body":
        patterns = frozenset(f"!{pattern}" for pattern in patterns)
    return replace(method, private_patterns=patterns)


def head_of(model: Model, names: str | None) -> frozenset[str]:
    """Return the names of the tensors of the head: by default the last linear layer's."""
    return model.head_names if names is None else matching(patterns_in(names), model)
