"""Tests of a report's page: its content follows from the records, and it needs no other file."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from damaged import unseal
from feddkd import Experiment, InputError
from feddkd.models.functional import functional
from feddkd.reports.curves import band, gain, on_test, spent
from feddkd.reports.heterogeneity import heterogeneity
from feddkd.reports.html.chart_data import figures
from feddkd.reports.html.page import html, write
from feddkd.reports.html.verdicts import ranked, verdicts
from feddkd.reports.statistics import paired
from feddkd.rounds.evaluation import Evaluation, Protocol
from feddkd.rounds.metrics import ACCURACY
from feddkd.runs.prepare import prepare
from feddkd.runs.record import Record, find, folder_name
from feddkd.runs.runner import execute
from feddkd.simulation import Simulation
from made_up import make
from playing import job_of
from small import clients, federation

VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "track",
    "wbr",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods on three seeds, made up."""
    out = tmp_path_factory.mktemp("made")
    make(out, methods=3, seeds=3, rounds=8)
    return out


class Elements(HTMLParser):
    """Every element with its attributes, and how deep the page is at its end."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.depth = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.depth += tag not in VOID

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1


def shown(page: str) -> Any:
    """The numbers in a page."""
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def altered(record: Record, **experiment: Any) -> Record:
    manifest = {**record.manifest, "experiment": {**record.manifest["experiment"], **experiment}}
    return Record(record.folder, manifest, record.history, record.timings)


# --- what a run leaves for it


def test_a_run_keeps_who_holds_what_and_what_its_final_model_confuses(tmp_path: Path) -> None:
    keys = {
        "partition": "classes(per_client=2)",
        "model": "mlp(hidden='8')",
        "clients": 5,
        "rounds": 2,
    }
    experiment = Experiment(method="fedavg(epochs=1) | dkd(steps=1)", **keys)  # type: ignore[arg-type]
    execute([experiment], out=tmp_path, engine="serial")
    (record,) = find(tmp_path)
    assert record.partition is not None
    assert record.confusion is not None
    assert [sum(row) for row in record.partition.counts] == record.manifest["partition"]["sizes"]
    assert all(sum(count > 0 for count in row) == 2 for row in record.partition.counts)
    prepared = prepare(experiment, None)
    model, test = prepared.model, prepared.federation.test
    params, buffers = model.split(load_file(record.folder / "final.safetensors"))
    seen = prepared.federation.transform(prepared.federation.x[test], torch.float32)
    taken = model(params, buffers, seen, mode="eval").logits.argmax(-1)
    expected = np.zeros((10, 10), int)
    np.add.at(expected, (prepared.federation.y[test].numpy(), taken.numpy()), 1)
    assert record.confusion.counts == expected.tolist()


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_models_with_private_layers_are_counted_with_the_layers_of_each_client(engine: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)).double()
    model, data = functional(net), federation(clients())
    start = model.split(net.state_dict())
    job = job_of(
        model,
        "fedbn(epochs=1, batch_size=8)",
        [data],
        [start],
        [0],
        rounds=2,
        cohort=2,
        evaluation=Evaluation(Protocol.CLIENT_POOLED),
    )
    with Simulation(
        job, engine, options={"strategy": "vmap"} if engine == "batched" else {}
    ) as simulation:
        *_, last = simulation.rounds()
        found = simulation.confusions()
    counts = np.array(found[0])
    assert counts.sum() == 3 * len(data.test)
    assert np.trace(counts) / counts.sum() == pytest.approx(last[0]["test_accuracy"], abs=1e-12)


# --- the numbers


def test_a_band_is_mean_and_deviation_as_far_as_all_seeds_have_come(made: Path) -> None:
    group = [record for record in find(made) if record.label == "fedavg(lr=0.3) | dkd()"]
    short = [
        Record(group[0].folder, group[0].manifest, group[0].history[:5], group[0].timings),
        *group[1:],
    ]
    found, x = band(short, on_test(ACCURACY)), spent(short)
    assert found is not None
    values = np.array(
        [[100 * record.history[t]["test_accuracy"] for record in short] for t in range(5)]
    )
    assert found.mean == pytest.approx(values.mean(1))
    assert found.std == pytest.approx(values.std(1))
    assert x["communications"].tolist() == [11, 22, 33, 44, 55]
    assert x["seconds"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def test_the_gain_of_dkd_is_there_only_where_there_is_dkd_and_has_holes_where_it_rested(
    made: Path,
) -> None:
    records = find(made)
    plain = [record for record in records if record.label == "fedavg(lr=0.3)"]
    assert band(plain, gain(ACCURACY)) is None
    record = next(record for record in records if "dkd" in record.label)
    rested = [
        {key: v for key, v in record.history[0].items() if key != "average_test_accuracy"},
        *record.history[1:],
    ]
    found = band([Record(record.folder, record.manifest, rested, record.timings)], gain(ACCURACY))
    assert found is not None
    assert math.isnan(found.mean[0])
    assert found.mean[1:] == pytest.approx(2.0)


def test_heterogeneity_of_clients_that_are_alike_and_of_clients_that_share_nothing() -> None:
    alike = heterogeneity([[3, 6], [1, 2], [5, 10]])
    assert (alike["total variation"], alike["Jensen-Shannon"]) == pytest.approx((0, 0), abs=1e-12)
    apart = heterogeneity((7 * np.eye(4, dtype=int)).tolist())
    assert apart["total variation"] == pytest.approx(1 - 1 / 4)
    assert apart["classes a client"] == 1
    assert apart["sizes' coefficient of variation"] == 0


@given(
    st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=6).filter(
        lambda rows: np.sum(rows) > 0
    )
)
def test_distances_lie_between_nothing_and_one_also_with_clients_that_hold_nothing(
    counts: list[list[int]],
) -> None:
    found = heterogeneity(counts)
    assert all(-1e-12 <= found[name] <= 1 + 1e-12 for name in ("total variation", "Jensen-Shannon"))


# --- the story


def test_the_most_accurate_method_wins_and_the_paired_test_says_whether_by_chance(
    made: Path,
) -> None:
    records = ranked(find(made))
    (verdict,) = verdicts(records)
    means: dict[str, dict[int, float]] = {}
    for record in records:
        best = max(record.history, key=lambda row: row["validation_accuracy"])
        means.setdefault(record.label, {})[record.manifest["canonical"]["seed"]] = (
            100 * best["test_accuracy"]
        )
    first, second = sorted(means, key=lambda label: -np.mean(list(means[label].values())))[:2]
    test = paired(means[first], means[second])
    assert test is not None
    assert test.t_p is not None
    assert verdict.lead.group[0].label == first == records[0].label
    assert f"{test.difference.mean:.2f} points ahead" in verdict.sentence
    assert f"p = {test.t_p:.2g}" in verdict.certainty
    assert ("not significant" in verdict.certainty) == (test.t_p >= 0.05)
    assert len(verdict.against) == 2


def test_with_too_few_seeds_nothing_is_called_significant(made: Path) -> None:
    (verdict,) = verdicts(
        [record for record in find(made) if record.manifest["canonical"]["seed"] < 2]
    )
    assert verdict.certainty.startswith("Too few seeds")


def test_runs_of_different_tasks_are_not_held_against_each_other(made: Path) -> None:
    records = find(made)
    other = [
        Record(
            r.folder,
            {
                **r.manifest,
                "canonical": {**r.manifest["canonical"], "clients": 7},
                "family": r.label,
            },
            r.history,
            [],
        )
        for r in records
    ]
    found = verdicts([*records, *other])
    assert [verdict.task for verdict in found] == ["clients 20", "clients 7"]
    assert [len(verdict.against) for verdict in found] == [2, 2]


# --- the page


def test_the_page_needs_nothing_but_itself(made: Path) -> None:
    page = html(find(made))
    elements = Elements(page)
    assert elements.depth == 0
    for tag, attributes in elements.found:
        assert not {"src", "action", "srcset"} & set(attributes)
        assert tag not in ("iframe", "object", "img", "base")
        assert (attributes.get("href") or "#").startswith(("#", "data:"))
    policy = next(a["content"] for tag, a in elements.found if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_what_comes_out_of_a_record_cannot_become_part_of_the_page(made: Path) -> None:
    evil = '</script><script>document.title="caught"</script><img src=x onerror=alert(1)>'
    records = [
        altered(record, name=evil) if "steps=5" in record.label else record for record in find(made)
    ]
    page, plain = html(records), html(find(made))
    assert [tag for tag, _ in Elements(page).found] == [tag for tag, _ in Elements(plain).found]
    assert evil in [method["label"] for method in shown(page)["methods"]]


def test_numbers_that_are_not_finite_are_holes(made: Path) -> None:
    records = find(made)
    records[0].history[2]["diagnostics"]["L1"] = None
    names = {method["label"]: method for method in shown(html(records))["methods"]}
    holes = [label for label, method in names.items() if method["L1"]["mean"][2] is None]
    assert len(holes) == 1


def test_older_records_make_a_page_all_the_same(tmp_path: Path) -> None:
    make(tmp_path, methods=1, seeds=1, rounds=2)
    (record,) = find(tmp_path)
    unseal(record.folder)
    for name in ("partition.json", "confusion.json", "timings.jsonl"):
        (record.folder / name).unlink()
    rows = [
        {k: v for k, v in row.items() if k not in ("diagnostics", "test_client_accuracy")}
        for row in record.history
    ]
    (record.folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = shown(html(find(tmp_path)))
    assert (found["partitions"], found["confusions"], found["clients"], found["theory"]) == (
        [],
        [],
        [],
        {},
    )
    assert list(found["axes"]) == ["round", "communications", "local_steps", "megabytes"]


def test_damaged_counts_are_complained_of_by_name(tmp_path: Path) -> None:
    make(tmp_path, methods=1, seeds=1, rounds=2)
    (file,) = tmp_path.rglob("confusion.json")
    file.write_text("{")
    with pytest.raises(InputError, match=r"confusion\.json"):
        html(find(tmp_path))


def test_the_page_tells_how_it_was_made(made: Path) -> None:
    page, record = html(find(made)), find(made)[0]
    for text in (
        record.manifest["digest"][:12],
        record.manifest["versions"]["torch"],
        record.folder.name,
    ):
        assert text in page
    assert re.search(r"<pre[^>]*>feddkd", page)


def test_a_page_that_cannot_be_written_is_an_error_of_one_line(made: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write the page"):
        write(find(made), tmp_path / "nowhere" / "report.html")


def test_pictures_of_clients_leave_rounds_out_rather_than_grow_without_bound(made: Path) -> None:
    record = next(record for record in find(made) if "dkd" in record.label)
    long = Record(record.folder, record.manifest, record.history * 100, record.timings)
    (picture,) = figures([long])["clients"]
    assert all(
        len(row) == len(picture["rounds"]) <= 100
        for table in picture["tables"].values()
        for row in table
    )
    assert folder_name(record.experiment) == record.folder.name
