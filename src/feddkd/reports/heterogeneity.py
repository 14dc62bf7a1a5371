"""Differences between clients, computed from their numbers of examples of each class."""

from collections.abc import Sequence

import numpy as np


def heterogeneity(counts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return measures of heterogeneity by name; `counts` has a row for each client.

    The distances are those between a client's distribution of classes and the distribution of all
    examples, mean over clients: 0 if all clients are alike, 1 at most. Jensen-Shannon is the
    divergence, in bits. Of examples without classes only the sizes are compared.
    """
    from scipy.spatial.distance import jensenshannon

    held = np.array(counts, dtype=np.float64)
    sizes = held.sum(1)
    of_sizes = {"sizes' coefficient of variation": float(sizes.std() / sizes.mean())}
    if held.shape[1] == 1:
        return of_sizes
    each = held[sizes > 0] / sizes[sizes > 0, None]
    whole = np.broadcast_to(held.sum(0) / held.sum(), each.shape)
    return {
        "total variation": float(np.abs(each - whole).sum(1).mean() / 2),
        "Jensen-Shannon": float((jensenshannon(each, whole, base=2, axis=1) ** 2).mean()),
        "classes a client": float((held > 0).sum(1).mean()),
        **of_sizes,
    }
