"""The data of FedBN's experiment: digits from five domains, one domain for each client."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddkd.data.examples import Data, Examples, from_arrays
from feddkd.data.sources.file_reading import Array
from feddkd.data.sources.registry import DIGITS, SOURCES, Source
from feddkd.errors import InputError, unknown
from feddkd.spec.types import Count

DOMAINS = {
    "mnist": "mnist",
    "svhn": "svhn",
    "usps": "usps",
    "generated": "generated_digits",
    "mnist_m": "mnist_m",
}


@SOURCES.register
def digit_domains(
    domains: str = "mnist,svhn,usps,generated,mnist_m", per_domain: Count = 743
) -> Source:
    """FedBN's digits from up to five domains, with equally many training images of each.

    743, a tenth of USPS, is FedBN's number; a fifth of each domain's images is its test set.
    """
    names = tuple(name.strip() for name in domains.split(","))
    for name in names:
        if name not in DOMAINS:
            raise unknown(f"digit_domains: unknown domain {name!r}", name, DOMAINS)
        if names.count(name) > 1:
            raise InputError(f"digit_domains: the domain {name!r} is given twice")

    def load(root: Path | None) -> Data:
        notes, training, tests = [], [], []
        for index, name in enumerate(names):
            data = SOURCES[DOMAINS[name]]().load(root)
            train, test = _domain(data, index, per_domain)
            training.append(train)
            tests.append(test)
            if data.note:
                notes.append(f"domain {name!r}: {data.note}")
        return from_arrays(
            _joined(training),
            _joined(tests),
            name="digit_domains",
            labels=DIGITS,
            domains=names,
            note="; ".join(notes),
        )

    parts = [SOURCES[DOMAINS[name]]() for name in names]
    files = tuple(file for source in parts for file in source.files)
    origin = "; ".join(source.origin for source in parts)
    summary = (
        "FedBN's digits from up to five domains, 28x28 colour; the domain 'generated' stands in for"
        " SynthDigits"
    )
    return Source(load, files, origin, "normalise(mean=0.5, std=0.5)", summary)


def _domain(data: Data, index: int, count: int) -> tuple[Examples, Examples]:
    """Return a domain's training and test images, split again 80/20 as in FedBN."""
    from sklearn.model_selection import StratifiedShuffleSplit

    x = torch.cat([data.train.x, data.test.x]).numpy()
    y = torch.cat([data.train.y, data.test.y]).numpy()
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0)
    try:
        train, test = next(splitter.split(y, y))
    except ValueError as error:
        raise InputError(
            f"digit_domains: {data.name!r} has too few images of some class: {error}"
        ) from error
    if len(train) < count:
        raise InputError(
            f"digit_domains: per_domain={count}, but {data.name!r} has only {len(train)} training"
            " images"
        )

    def part(chosen: Array) -> Examples:
        domain = torch.full((len(chosen),), index)
        return Examples(_resized(x[chosen]), torch.from_numpy(y[chosen]), domain)

    return part(train[:count]), part(test)


def _resized(x: Array) -> Tensor:
    """Return the images as 28x28 in three channels; PIL resizes each one, bilinearly."""
    from PIL import Image

    if x.shape[-1] != 28:
        images = x[:, 0] if x.shape[1] == 1 else x.transpose(0, 2, 3, 1)
        resized = [
            np.asarray(Image.fromarray(image).resize((28, 28), Image.Resampling.BILINEAR))
            for image in images
        ]
        x = np.stack(resized).reshape(len(x), 28, 28, -1).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(x, (len(x), 3, 28, 28))))


def _joined(parts: Sequence[Examples]) -> Examples:
    domain = torch.cat([part.domain for part in parts if part.domain is not None])
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    return Examples(x, y, domain)
