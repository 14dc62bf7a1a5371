"""Several labels: which of the ten digits are in a picture of two?"""

import numpy as np
import torch
from sklearn.datasets import load_digits

from feddkd.extend import Data, Examples, from_arrays


def pairs(count: int = 2000) -> Data:
    """Return pictures of two handwritten digits, 8 x 16 pixels, with a mark for each digit in it.

    The domain of a picture is its left digit, so that partition = "domains()" gives each client
    pictures that begin alike.
    """
    pictures, digits = load_digits(return_X_y=True)
    random = np.random.default_rng(0)

    def drawn(first: int, last: int, count: int) -> Examples:
        two = random.integers(first, last, (count, 2))
        left, right = pictures[two].reshape(count, 2, 8, 8).swapaxes(0, 1)
        x = np.concatenate([left, right], 2)
        y = np.zeros((count, 10), np.int64)
        np.put_along_axis(y, digits[two], 1, 1)
        return Examples(
            torch.from_numpy(x.reshape(count, -1) / 16),
            torch.from_numpy(y),
            torch.from_numpy(digits[two[:, 0]]),
        )

    return from_arrays(
        drawn(0, 1300, count),
        drawn(1300, 1797, 500),
        class_labels=False,
        domains=list("0123456789"),
    )
