"""The registry of methods, and the parser of their text."""

from functools import reduce
from operator import or_

from feddkd.method import Method
from feddkd.spec.registry import Registry

METHODS: Registry[Method] = Registry("method", "feddkd.methods")


def parse(text: str) -> Method:
    """Return the method for a text such as "fedavg(epochs=5, lr=0.1) | dkd(steps=10, lr=0.2)".

    `str(method)` returns the text.
    """
    return reduce(or_, METHODS.parse(text))
