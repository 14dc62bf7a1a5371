"""Published data with natural clients or texts: LEAF's FEMNIST and Shakespeare, AG News."""

import csv
import string
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from feddkd.data.examples import Data, Examples, from_arrays
from feddkd.data.sources.client_files import leaf_files
from feddkd.data.sources.file_reading import SourceFiles, expect, reads
from feddkd.data.sources.published import from_files
from feddkd.data.sources.registry import SOURCES, Source
from feddkd.data.tables import from_table
from feddkd.spec.types import Bound

LEAF = "https://github.com/TalwalkarLab/leaf"
CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
TOPICS = ("World", "Sports", "Business", "Sci/Tech")


def _leaf(files: SourceFiles) -> tuple[Any, Any]:
    """Return LEAF's training and test examples as tables."""
    train, test = leaf_files(files.find("train")), leaf_files(files.find("test"))
    return train, test


@SOURCES.register
def leaf_femnist() -> Source:
    """LEAF's FEMNIST: letters and digits of writers, who are the owners."""

    def read(files: SourceFiles) -> Data:
        train, test = _leaf(files)
        data = from_table(
            train, test, x="x", y="y", owner="user", targets="numbers", name="leaf_femnist"
        )
        images = [_images(part) for part in (data.train, data.test)]
        return from_arrays(*images, name=data.name, labels=CHARACTERS, domains=data.domains)

    folders = ("leaf_femnist", "femnist/data", "leaf/data/femnist/data")
    summary = "LEAF's FEMNIST, 62 letters and digits by writer, 28x28 grey; what its scripts wrote"
    return from_files(
        "leaf_femnist", read, folders, ("train/*.json", "test/*.json"), LEAF, "", summary
    )


def _images(part: Examples) -> Examples:
    """Return rows of 784 pixels as images."""
    return replace(part, x=part.x.float().reshape(-1, 1, 28, 28))


@SOURCES.register
def leaf_shakespeare() -> Source:
    """LEAF's Shakespeare: 80 characters and the next one, by role; the roles are the owners."""

    def read(files: SourceFiles) -> Data:
        train, test = _leaf(files)
        return from_table(train, test, x="x", y="y", owner="user", name="leaf_shakespeare")

    folders = ("leaf_shakespeare", "shakespeare/data", "leaf/data/shakespeare/data")
    summary = "LEAF's Shakespeare, 80 characters and the next one, by role; what its scripts wrote"
    return from_files(
        "leaf_shakespeare", read, folders, ("train/*.json", "test/*.json"), LEAF, "", summary
    )


@SOURCES.register
def ag_news(length: Annotated[int, Bound(least=1, most=4096)] = 256) -> Source:
    """AG News: the first `length` characters of a title and a text, and its topic."""

    def read(files: SourceFiles) -> Data:
        train = _news(files.find("train.csv"), 120_000)
        test = _news(files.find("test.csv"), 7_600)
        return from_table(train, test, x="text", y="topic", length=length, name="ag_news")

    origin = "https://github.com/mhjabreel/CharCnn_Keras/tree/master/data/ag_news_csv"
    summary = "AG News, 4 topics, texts as characters, 120,000 + 7,600"
    names = ("train.csv", "test.csv")
    return from_files("ag_news", read, ("ag_news", "ag_news_csv"), names, origin, "", summary)


@reads("AG News's CSV, with a topic, a title and a text in each line")
def _news(path: Path, count: int) -> dict[str, list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    expect(len(rows) == count, f"it has {len(rows)} rows, not {count}")
    topics = [TOPICS[int(topic) - 1] for topic, _, _ in rows]
    return {"topic": topics, "text": [f"{title} {text}" for _, title, text in rows]}
