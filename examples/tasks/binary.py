"""Binary: is a breast tumour benign? Thirty numbers measured in a picture of its cells."""

from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

from feddkd.extend import Data, from_arrays


def tumours() -> Data:
    """Return 419 training and 150 test tumours; label 1 is benign."""
    x, y = load_breast_cancer(return_X_y=True)
    x = scale(x)
    names = ("malignant", "benign")
    return from_arrays((x[:419], y[:419]), (x[419:], y[419:]), labels=names)
