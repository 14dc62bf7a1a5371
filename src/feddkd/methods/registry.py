"""Methods by name, and the reader of their texts."""

from functools import reduce
from operator import or_

from feddkd.method import Method
from feddkd.spec.registry import Registry

METHODS: Registry[Method] = Registry("method", "feddkd.methods")


def parse(text: str) -> Method:
    """The method of a text such as "fedavg(epochs=5, lr=0.1) | dkd(steps=10, lr=0.2)"; `str` gives
    the text back.
    """
    return reduce(or_, METHODS.parse(text))
