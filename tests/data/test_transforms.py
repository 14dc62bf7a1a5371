"""Each step against the same thing written out in numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from feddkd import InputError
from feddkd.data.transforms import transform
from feddkd.randomness import fold

KEY = torch.tensor(fold(("test",)))


def images(count: int = 40, channels: int = 3, side: int = 6) -> Tensor:
    pixels = np.random.default_rng(0).integers(
        0, 256, (count, channels, side, side + 1), dtype=np.uint8
    )
    return torch.from_numpy(pixels)


def applied(
    text: str, x: Tensor, key: Tensor | None = None, scale: float = 1.0
) -> np.ndarray[Any, Any]:
    result: Tensor = transform(text, scale)(x, torch.float64, key)
    return result.numpy()


def test_the_empty_transform_only_scales() -> None:
    assert np.array_equal(applied("", images(), KEY, scale=255.0), images().numpy() / 255)
    assert transform("")(images(), torch.float32).dtype == torch.float32


def test_pad_adds_a_border_of_zeros() -> None:
    expected = np.pad(images().numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)))
    assert np.array_equal(applied("pad(pixels=2)", images()), expected)


def test_normalise_takes_one_number_or_one_a_channel() -> None:
    x = images().numpy() / 255
    assert np.allclose(
        applied("normalise(mean=0.2, std=0.4)", images(), scale=255),
        (x - 0.2) / 0.4,
        rtol=0,
        atol=1e-15,
    )
    mean, std = np.array([0.1, 0.2, 0.3]), np.array([1.0, 2.0, 4.0])
    expected = (x - mean[:, None, None]) / std[:, None, None]
    assert np.allclose(
        applied("normalise(mean='0.1,0.2,0.3', std='1, 2, 4')", images(), scale=255),
        expected,
        rtol=0,
        atol=1e-15,
    )


def test_normalise_takes_examples_without_sides() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert np.array_equal(applied("normalise(mean=1, std=2)", x), (x.double().numpy() - 1) / 2)


def test_steps_act_in_the_order_they_are_written() -> None:
    padded_first = applied("pad(pixels=1) | normalise(mean=1, std=1)", images())
    assert (padded_first[:, :, 0] == -1).all()
    assert (applied("normalise(mean=1, std=1) | pad(pixels=1)", images())[:, :, 0] == 0).all()


def test_flip_mirrors_about_half_of_the_images_whole() -> None:
    x = images(count=400)
    flipped = applied("flip()", x, KEY)
    mirrored = [
        np.array_equal(out, plain[:, :, ::-1])
        for out, plain in zip(flipped, x.numpy(), strict=True)
    ]
    kept = [np.array_equal(out, plain) for out, plain in zip(flipped, x.numpy(), strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 150 < sum(mirrored) < 250


def test_steps_of_one_transform_draw_apart() -> None:
    twice = applied("flip() | flip()", images(), KEY)
    assert (
        10
        < sum(
            np.array_equal(out, plain) for out, plain in zip(twice, images().numpy(), strict=True)
        )
        < 30
    )


def test_crop_cuts_a_window_of_the_reflected_image_and_every_window_occurs() -> None:
    x = images(count=900)
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="reflect")
    cut = applied("crop(padding=1)", x, KEY)
    found = []
    for out, whole in zip(cut, padded, strict=True):
        windows = {(i, j): whole[:, i : i + 6, j : j + 7] for i in range(3) for j in range(3)}
        (place,) = [at for at, window in windows.items() if np.array_equal(out, window)]
        found.append(place)
    counts = np.bincount([3 * i + j for i, j in found], minlength=9)
    assert counts.min() > 60  # 100 each on average


@pytest.mark.parametrize("text", ["crop(padding=2)", "flip()", "crop(padding=2) | flip()"])
def test_chance_acts_with_a_key_only_and_is_the_keys_alone(text: str) -> None:
    assert np.array_equal(applied(text, images()), images().numpy())
    first, again, other = (applied(text, images(), key) for key in (KEY, KEY, KEY + 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    "text",
    [
        "pad()",
        "crop(padding=2)",
        "flip()",
        "normalise(mean='1,2,3', std=2)",
        "crop() | flip() | pad()",
    ],
)
def test_all_steps_are_the_same_under_vmap_as_one_by_one(text: str) -> None:
    steps, keys = transform(text, 255.0), torch.stack([KEY, KEY + 1, KEY + 2])
    x = torch.stack([images(8), images(8).flip(0), images(8).flip(1)])
    together = torch.vmap(lambda x, key: steps(x, torch.float32, key))(x, keys)
    assert torch.equal(
        together,
        torch.stack([steps(a, torch.float32, key) for a, key in zip(x, keys, strict=True)]),
    )


@pytest.mark.parametrize(
    ("text", "shape", "says"),
    [
        ("pad()", (5,), "'pad' takes images"),
        ("flip()", (5,), "'flip' takes images"),
        ("crop()", (5, 5), "'crop' takes images"),
        ("crop(padding=6)", (1, 6, 7), "sides above 6"),
        ("normalise(mean='1,2', std=1)", (3, 4, 4), "2 channels; the images have 3"),
    ],
)
def test_examples_of_the_wrong_shape_are_refused_even_in_testing(
    text: str, shape: tuple[int, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        transform(text)(torch.zeros(2, *shape), torch.float32)


@pytest.mark.parametrize(
    "text",
    [
        "normalise(std=0)",
        "normalise(std='1,-1')",
        "normalise(mean='a')",
        "normalise(mean='nan')",
        "normalise(std='inf')",
        "normalise(mean='')",
        "pad(pixels=0)",
        "blur()",
    ],
)
def test_numbers_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        transform(text)
