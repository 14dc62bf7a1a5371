"""FedBN's job: digits of five kinds, one kind a client."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from feddkd.data.examples import Data, Examples, from_arrays
from feddkd.data.sources.formats import Array
from feddkd.data.sources.registry import SOURCES, Source
from feddkd.errors import InputError, choices
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
    """FedBN's job: five kinds of digits, as many of each to train on (743 is a tenth of USPS), all
    of the rest to test on.
    """
    names = tuple(name.strip() for name in domains.split(","))
    for name in names:
        if name not in DOMAINS or names.count(name) > 1:
            raise InputError(
                f"digit_domains: {name!r} is unknown or named twice; domains are {choices(DOMAINS)}"
            )

    def load(root: Path | None) -> Data:
        found = [SOURCES[DOMAINS[name]]().load(root) for name in names]
        parts = [_domain(data, index, per_domain) for index, data in enumerate(found)]
        notes = [
            f"domain {name!r}: {data.note}"
            for name, data in zip(names, found, strict=True)
            if data.note
        ]
        train, test = (_joined([part[side] for part in parts]) for side in (0, 1))
        return from_arrays(
            train,
            test,
            name="digit_domains",
            labels=tuple("0123456789"),
            domains=names,
            note="; ".join(notes),
        )

    inner = [SOURCES[DOMAINS[name]]() for name in names]
    files, origin = (
        tuple(file for source in inner for file in source.files),
        "; ".join(source.origin for source in inner),
    )
    summary = (
        "FedBN's digits from up to five domains, 28x28 colour; the domain 'generated' stands in for"
        " SynthDigits"
    )
    return Source(load, files, origin, "normalise(mean=0.5, std=0.5)", summary)


def _domain(data: Data, index: int, count: int) -> tuple[Examples, Examples]:
    """Training and test images pooled and split anew, 80/20, exactly as FedBN does."""
    from sklearn.model_selection import StratifiedShuffleSplit

    x, y = (
        torch.cat([data.train.x, data.test.x]).numpy(),
        torch.cat([data.train.y, data.test.y]).numpy(),
    )
    try:
        train, test = next(
            StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0).split(y, y)
        )
    except ValueError as error:
        raise InputError(
            f"digit_domains: {data.name!r} has too few images of some class: {error}"
        ) from error
    if len(train) < count:
        raise InputError(
            f"digit_domains: per_domain={count}, but {data.name!r} has only {len(train)} images to"
            " train on"
        )

    def part(pick: Array) -> Examples:
        return Examples(_alike(x[pick]), torch.from_numpy(y[pick]), torch.full((len(pick),), index))

    return part(train[:count]), part(test)


def _alike(x: Array) -> Tensor:
    """28x28 in three channels, resized as PIL does: bilinear, each image by itself."""
    from PIL import Image

    if x.shape[-1] != 28:
        flat = x[:, 0] if x.shape[1] == 1 else x.transpose(0, 2, 3, 1)
        resized = [
            np.asarray(Image.fromarray(image).resize((28, 28), Image.Resampling.BILINEAR))
            for image in flat
        ]
        x = np.stack(resized).reshape(len(x), 28, 28, -1).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(np.broadcast_to(x, (len(x), 3, 28, 28))))


def _joined(parts: Sequence[Examples]) -> Examples:
    domain = torch.cat([part.domain for part in parts if part.domain is not None])
    return Examples(
        torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]), domain
    )
