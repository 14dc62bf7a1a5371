"""Regression: how far diabetes has progressed after a year, from ten numbers of a patient."""

from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale

from feddkd.extend import Data, from_arrays


def patients() -> Data:
    """Return 342 training and 100 test patients; all columns and the target are standardised."""
    x, y = load_diabetes(return_X_y=True)
    x, y = scale(x), scale(y)
    return from_arrays((x[:342], y[:342]), (x[342:], y[342:]), class_labels=False)
