"""Tables as data: columns, owners, labels that are texts, sequences, files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import feddkd
from feddkd.data.sources import SOURCES
from feddkd.errors import InputError

ROWS = 60
PATIENTS: dict[str, Any] = {
    "age": np.arange(ROWS) % 7 + 30.0,
    "pulse": np.arange(ROWS) * 3 % 11,
    "ill": ["yes", "no", "perhaps"] * (ROWS // 3),
    "dose": np.linspace(0.1, 2.0, ROWS),
    "hospital": ["A", "B", "C", "D"] * (ROWS // 4),
}


def test_columns_become_a_matrix_with_mean_0_and_deviation_1() -> None:
    data = feddkd.from_table(PATIENTS, x=["age", "pulse"], y="ill", owner="hospital")
    assert data.train.x.dtype == torch.float32
    torch.testing.assert_close(data.train.x.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.train.x.std(0, correction=0), torch.ones(2))
    assert len(data.train) + len(data.test) == ROWS
    assert data.domains == ("A", "B", "C", "D")


def test_labels_that_are_texts_are_numbered_in_order() -> None:
    data = feddkd.from_table(PATIENTS, x="pulse", y="ill", standardise=False)
    assert data.labels == ("no", "perhaps", "yes")
    rows = {(float(p), w) for p, w in zip(PATIENTS["pulse"], PATIENTS["ill"], strict=True)}
    found = zip(data.train.x[:, 0].tolist(), data.train.y.tolist(), strict=True)
    assert {(pulse, data.labels[label]) for pulse, label in found} <= rows


@pytest.mark.parametrize(
    ("y", "targets", "dtype", "shape", "classes"),
    [
        ("dose", "auto", torch.float32, (), 0),
        ("pulse", "auto", torch.int64, (), 11),
        ("pulse", "numbers", torch.int64, (), 0),
        (["dose", "age"], "auto", torch.float32, (2,), 0),
        ("dose, age", "auto", torch.float32, (2,), 0),
    ],
)
def test_targets_are_classes_or_numbers(
    y: Any, targets: Any, dtype: torch.dtype, shape: tuple[int, ...], classes: int
) -> None:
    data = feddkd.from_table(PATIENTS, x="age", y=y, targets=targets)
    assert (data.train.y.dtype, data.train.y.shape[1:]) == (dtype, torch.Size(shape))
    assert data.classes == classes


def test_a_second_table_is_the_test_set_and_shares_the_numbers_of_labels() -> None:
    one = {"a": [0.0, 1.0], "label": ["x", "z"]}
    other = {"a": [2.0], "label": ["y"]}
    data = feddkd.from_table(one, other, y="label")
    assert (data.train.y.tolist(), data.test.y.tolist()) == ([0, 2], [1])


def test_owners_become_clients_that_learn_side_by_side() -> None:
    data = feddkd.from_table(PATIENTS, x=["age", "pulse"], y="ill", owner="hospital")
    divided = feddkd.divide(data, "owners()", clients=4, client_tests="own", validation=0.2)
    domains = np.concatenate([part.domain for part in (data.train, data.test)])
    assert divided.own_test is not None
    for client, (train, test) in enumerate(zip(divided.train, divided.own_test, strict=True)):
        assert set(domains[train]) == set(domains[test]) == {client}
    result = feddkd.simulate(
        model=nn.Linear(2, 3),
        clients=divided,
        method="fedavg(epochs=1)",
        engine="serial",
        progress=False,
    )
    assert 0 <= result.history[-1]["test_accuracy"] <= 1


def test_a_divided_source_has_the_numbers_of_an_experiment() -> None:
    from feddkd.experiment import Experiment
    from feddkd.runs.prepare import prepare

    experiment = Experiment("fedavg()", partition="quantity()", clients=3, seed=4)
    wanted = prepare(experiment, None).federation
    found = feddkd.divide("digits", "quantity()", 3, seed=4)
    assert [part.tolist() for part in found.train] == [part.tolist() for part in wanted.train]
    assert found.validation.tolist() == wanted.validation.tolist()


def test_sequences_of_different_lengths_get_a_mask() -> None:
    table = {"steps": [[1, 2, 3], [4], [5, 6]] * 4, "label": [0, 1, 1] * 4}
    data = feddkd.from_table(table, 0.25, y="label")
    assert data.train.x["sequence"].shape == data.train.x["mask"].shape
    lengths = data.train.x["mask"].sum(1).tolist()
    firsts = data.train.x["sequence"][:, 0].tolist()
    assert set(zip(firsts, lengths, strict=True)) == {(1, 3), (4, 1), (5, 2)}
    assert not data.train.x["sequence"][~data.train.x["mask"]].any()


def test_several_sequences_share_their_mask() -> None:
    lengths = [1 + n % 3 for n in range(12)]
    table: dict[str, Any] = {
        "ids": [[5] * n for n in lengths],
        "segments": [[2] * n for n in lengths],
        "weight": [0.5] * 12,
        "label": [0, 1] * 6,
    }
    x = feddkd.from_table(table, 0.25, y="label").train.x
    assert set(x) == {"ids", "segments", "weight", "mask"}
    assert torch.equal(x["ids"], 5 * x["mask"])
    assert torch.equal(x["segments"], 2 * x["mask"])
    named = {"input_ids": table["ids"], "attention_mask": [[1] * n for n in lengths]}
    given = feddkd.from_table({**named, "label": table["label"]}, 0.25, y="label").train.x
    assert set(given) == {"input_ids", "attention_mask"}
    assert torch.equal(given["input_ids"], 5 * given["attention_mask"])
    other = {**table, "segments": table["segments"][::-1]}
    with pytest.raises(InputError, match="ids, segments"):
        feddkd.from_table(other, 0.25, y="label")


@pytest.mark.parametrize("has_mask", [True, False])
def test_items_that_are_dicts_of_sequences_get_one_length_and_a_mask(has_mask: bool) -> None:
    def rows(*lengths: int) -> list[tuple[dict[str, torch.Tensor], int]]:
        mask = {"attention_mask": torch.ones(5, dtype=torch.int64)} if has_mask else {}
        return [
            (
                {"ids": torch.full((n,), 7), "place": torch.ones(5), **cut(mask, n)},
                n % 2,
            )
            for n in lengths
        ]

    def cut(parts: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
        return {name: part[:length] for name, part in parts.items()}

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, ids: torch.Tensor, place: torch.Tensor, **mask: torch.Tensor) -> Any:
            (counted,) = mask.values()
            assert ids.shape == counted.shape == (len(ids), 5)
            assert torch.equal(ids, 7 * counted)
            assert place.shape == (len(ids), 5)
            return self.out((self.embed(ids) * counted[..., None]).sum(1))

    result = feddkd.simulate(
        model=Mean,
        clients=[rows(2, 5, 3), rows(3), rows(4, 4)],  # the last two have one length each
        test=rows(1, 2),
        method="fedavg(epochs=1)",
        engine="serial",
        progress=False,
    )
    assert result.history[0]["test_loss"] > 0


def test_clients_whose_sequences_differ_in_length_get_one_length() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, sequence: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            counted = mask.unsqueeze(-1).to(self.embed.weight.dtype)
            mean = (self.embed(sequence) * counted).sum(1) / counted.sum(1)
            out: torch.Tensor = self.out(mean)
            return out

    def rows(*lengths: int) -> list[tuple[torch.Tensor, int]]:
        return [(torch.arange(n) % 9, n % 2) for n in lengths]

    results = [
        feddkd.simulate(
            model=Mean,
            clients=[rows(2, 5, 3), rows(7, 1), rows(4, 4)],
            test=rows(6, 2),
            method="fedavg(epochs=2) | dkd(steps=2)",
            engine=engine,
            dtype="float64",
            progress=False,
        )
        for engine in ("serial", "batched")
    ]
    assert results[0].history[0]["test_loss"] == pytest.approx(
        results[1].history[0]["test_loss"], abs=1e-12
    )


def test_a_column_of_texts_becomes_rows_of_characters() -> None:
    table = {"words": ["abba", "cab", "a"] * 4, "kind": ["pop", "taxi", "letter"] * 4}
    data = feddkd.from_table(table, 0.25, y="kind", length=3)
    assert {tuple(row) for row in data.train.x.tolist()} == {(1, 2, 2), (3, 1, 2), (1, 0, 0)}
    assert "'abc'" in data.note


def test_without_targets_the_next_character_is_the_target() -> None:
    data = feddkd.from_table(
        {"text": ["abcab", "cc"] * 10, "who": [1, 2] * 10}, owner="who", length=3
    )
    assert data.labels == ("", "a", "b", "c")
    rows = {
        (tuple(x), tuple(y))
        for x, y in zip(data.train.x.tolist(), data.train.y.tolist(), strict=True)
    }
    assert rows == {
        ((1, 2, 3), (2, 3, 1)),
        ((1, 0, 0), (2, -100, -100)),
        ((3, 0, 0), (3, -100, -100)),
    }


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"y": "il"}, "'ill'"),
        ({"y": "ill", "x": "agee"}, "'age'"),
        ({"y": "ill", "owner": "hopital"}, "'hospital'"),
        ({"y": "ill", "x": ["age", "hospital"]}, "'hospital'"),
        ({"x": "age"}, "y must name"),
        ({"y": "ill", "x": "age", "test": 1.5}, "1.5"),
        ({"y": "ill", "x": ""}, "x must name"),
        ({"y": "ill", "targets": "number"}, "did you mean 'numbers'"),
        ({"x": "ill", "length": 0}, "length must be >= 1"),
    ],
)
def test_a_wrong_column_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        feddkd.from_table(PATIENTS, **given)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"a": np.array([1.0, np.nan]), "y": [0, 1]}, "'a' has nan in row 1"),
        ({"a": [1.0, None], "y": [0, 1]}, "'a' has no value in row 1"),
        ({"a": [1.0, 2.0, 3.0], "y": [0, 1]}, "one length"),
        ({"a": [1.0, {}], "y": [0, 1]}, "'a' must hold numbers"),
        ({1: [1.0, 2.0], "1": [0, 1], "y": [0, 1]}, "several columns with the name 1"),
        (7, "int"),
    ],
)
def test_a_wrong_table_is_refused(table: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        feddkd.from_table(table, y="y")


CSV = "age,pulse,ill,hospital\n" + "".join(
    f"{age},{pulse},{ill},{hospital}\n"
    for age, pulse, ill, hospital in zip(
        PATIENTS["age"], PATIENTS["pulse"], PATIENTS["ill"], PATIENTS["hospital"], strict=True
    )
)


def test_a_table_in_a_file_is_the_table_in_memory(tmp_path: Path) -> None:
    (tmp_path / "patients.csv").write_text(CSV)
    text = "table(path='patients.csv', x='age, pulse', y='ill', owner='hospital')"
    read = SOURCES.one(text).load(tmp_path)
    table = {name: PATIENTS[name] for name in ("age", "pulse", "ill", "hospital")}
    assert read.digest == feddkd.from_table(table, x="age,pulse", y="ill", owner="hospital").digest
    assert (read.labels, read.domains) == (("no", "perhaps", "yes"), ("A", "B", "C", "D"))


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.doc").write_text("x")
    (tmp_path / "b.csv").write_text("x,y\n1,2\n3\n")
    with pytest.raises(InputError, match=r"\.parquet.*a\.doc"):
        SOURCES.one("table(path='a.doc', y='y')").load(tmp_path)
    with pytest.raises(InputError, match=r"b\.csv, row 3"):
        SOURCES.one("table(path='b.csv', y='y')").load(tmp_path)


def test_pandas_arrow_and_hugging_face_tables_give_the_same_data(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    frame = pandas.DataFrame(PATIENTS)
    table = arrow.Table.from_pandas(frame)
    saved = datasets.Dataset.from_pandas(frame)
    saved.save_to_disk(str(tmp_path / "saved"))
    parquet.write_table(table, tmp_path / "a.parquet")
    chosen: dict[str, Any] = {"x": ["age", "pulse"], "y": "ill", "owner": "hospital"}
    wanted = feddkd.from_table(PATIENTS, **chosen).digest
    for given in (frame, table, saved):
        assert feddkd.from_table(given, **chosen).digest == wanted
    both = datasets.DatasetDict({"train": saved, "test": saved})
    both.save_to_disk(str(tmp_path / "both"))
    read = SOURCES.one("table(path='both', x='age,pulse', y='ill')").load(tmp_path)
    assert (len(read.train), len(read.test)) == (ROWS, ROWS)
    with pytest.raises(InputError, match="train, test"):
        feddkd.from_table(both, **chosen)
    for path in ("saved", "a.parquet"):
        text = f"table(path='{path}', x='age,pulse', y='ill', owner='hospital')"
        assert SOURCES.one(text).load(tmp_path).digest == wanted
    with pytest.raises(InputError, match="from_table"):
        feddkd.simulate(model=nn.Linear(2, 3), clients=[frame], test=frame, method="fedavg()")


def test_a_lazy_frame_is_collected_once() -> None:
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(PATIENTS)
    chosen: dict[str, Any] = {"x": ["age", "pulse"], "y": "ill", "owner": "hospital"}
    wanted = feddkd.from_table(PATIENTS, **chosen).digest
    assert feddkd.from_table(frame.lazy(), **chosen).digest == wanted


def test_pictures_and_named_labels_of_hugging_face_are_read() -> None:
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((4, 5, 3), n, np.uint8)) for n in range(6)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    table = datasets.Dataset.from_dict({"image": pictures, "label": [0, 1] * 3}, features=features)
    data = feddkd.from_table(table, 0.34, y="label")
    assert data.train.x.shape[1:] == (3, 4, 5)
    assert data.labels == ("cat", "dog")
    assert data.train.x[:, 0, 0, 0].remainder(2).tolist() == data.train.y.tolist()
