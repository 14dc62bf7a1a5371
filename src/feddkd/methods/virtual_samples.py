"""Mini-batches of samples that the server makes itself."""

from torch import Tensor

from feddkd.randomness import uniform
from feddkd.tensors import Tensors, combine

DRAWS = 2000  # stream of random numbers in a step; dropout and augmentation use those below


def draw_samples(samples: Tensors, size: int, key: Tensor) -> dict[str, Tensor]:
    """Return `size` samples, drawn with replacement; the labels are samples["y"]."""
    rows = (uniform(key, (size,), DRAWS).double() * len(samples["y"])).long()
    return combine(lambda tensor: tensor[rows], samples)
