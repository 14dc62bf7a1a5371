"""feddkd predict: use the model of a finished run on new examples."""

import csv
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from torch import Tensor

from feddkd.api.predict import Predictions, predict
from feddkd.data.examples import examples
from feddkd.data.sources.file_reading import reads
from feddkd.data.sources.image_folders import IMAGES, picture
from feddkd.errors import InputError


def predict_command(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run or of a result.")
    ],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA", help="An .npz with x, a .csv of numbers, or a folder with images."
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE.csv", help="Where the predictions are written.")
    ] = Path("predictions.csv"),
    scale: Annotated[
        float | None,
        typer.Option(help="The largest value of a pixel; by default 255 for bytes, else 1."),
    ] = None,
    side: Annotated[int, typer.Option(min=1, help="Images are resized to this side.")] = 32,
    colour: Annotated[bool, typer.Option("--colour", help="Read images in colour.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Write a CSV file with the predicted class of each example, and each class's probability."""
    names, x = _read(data, side, colour)
    _write(out, names, predict(folder, x, scale=scale, device=device))
    print(f"{len(names)} predictions are in {out}")


def _read(path: Path, side: int, colour: bool) -> tuple[list[str], Tensor]:
    """Return the names and the values of examples."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES)
        if not files:
            raise InputError(f"there are no images in {path}")
        x = np.stack([picture(file, side, colour) for file in files])
        names = [str(file.relative_to(path)) for file in files]
    else:
        x = _table(path) if path.suffix == ".csv" else _arrays(path)
        names = [str(number) for number in range(len(x))]
    return names, examples((x, np.zeros(len(x), np.int64))).x


@reads("an .npz file with an array x")
def _arrays(path: Path) -> "np.typing.NDArray[np.float64]":
    with np.load(path, allow_pickle=False) as arrays:
        found: np.typing.NDArray[np.float64] = arrays["x"]
        return found


@reads("a CSV table of numbers with names in its first line")
def _table(path: Path) -> "np.typing.NDArray[np.float32]":
    return np.loadtxt(path, np.float32, delimiter=",", skiprows=1, ndmin=2)


def _write(path: Path, names: list[str], predictions: Predictions) -> None:
    rows = zip(names, predictions.labels, predictions.probabilities.tolist(), strict=True)
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["example", "class", *(f"p({name})" for name in predictions.classes)])
            writer.writerows(
                [name, label, *(f"{p:.6g}" for p in each)] for name, label, each in rows
            )
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
