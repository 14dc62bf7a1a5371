"""An experiment is what changes numbers, however it was spelled."""

import contextlib
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from feddkd import Experiment, InputError
from feddkd.experiment import KEYS, expand, load, overlaid

BASE: dict[str, Any] = {"method": "fedavg() | dkd()"}
SAME: list[dict[str, Any]] = [
    {"method": "fedavg|dkd"},
    {"method": " fedavg( epochs = 5 )\n| dkd(steps=10, lr=.2) "},
    {"method": "fedavg(momentum=0, lr_decay=1) | dkd()"},
    {"data": "digits()"},
    {"partition": "dirichlet( alpha=1e-1, form='plain' )"},
    {"model": "mlp(hidden='64')"},
    {"cohort": 10},
    {"split_seed": 0},
    {"validation": 0.1, "training": 0.9},
    {"transform": "normalise(mean=0.3053, std=0.3760)"},
    {"evaluation": "global"},
    {"dtype": "float32"},
    {"availability": "always()", "min_clients": 1, "on_divergence": "drop", "shuffle": True},
    {"name": "mine"},
    {"target": 0.9},
]
OTHER: list[dict[str, Any]] = [
    {"method": "fedavg() | dkd(steps=9)"},
    {"method": "fedavg()"},
    {"method": "fedprox(mu=0.0) | dkd()"},
    {"data": "generated_digits()"},
    {"partition": "dirichlet(alpha=0.2)"},
    {"model": "mlp(hidden='65')"},
    {"initial": "weights.safetensors", "initial_sha256": "0" * 64},
    {"clients": 11},
    {"cohort": 9},
    {"cohort": 1},
    {"rounds": 11},
    {"seed": 1},
    {"split_seed": 1},
    {"validation": 0.2},
    {"training": 0.5},
    {"public": 0.1},
    {"transform": ""},
    {"transform": "normalise(mean=0.5, std=0.5)"},
    {"evaluation": "client_mean"},
    {"dtype": "float64"},
    {"availability": "random()"},
    {"selection": "by_size()"},
    {"attack": "sign_flip()"},
    {"min_clients": 2},
    {"on_divergence": "stop"},
    {"shuffle": False},
    {"shuffle": "distillation"},
    {"task": "multilabel"},
    {"client_tests": "own"},
    {"evaluate_every": 2},
    {"evaluate_clients": 5},
]


def experiment(**keys: Any) -> Experiment:
    return Experiment(**{**BASE, **keys})


@pytest.mark.parametrize("keys", SAME, ids=str)
def test_one_experiment_has_one_digest_however_it_is_spelled(keys: dict[str, Any]) -> None:
    assert experiment(**keys).digest == experiment().digest


@pytest.mark.parametrize(
    ("shuffle", "drawn"),
    [(True, [True, True]), (False, [False, False]), ("distillation", [False, True])],
)
def test_local_training_and_distillation_draw_or_read_in_stored_order(
    shuffle: bool | str, drawn: list[bool]
) -> None:
    chosen = experiment(method="fedavg() | dkd()", shuffle=shuffle)
    assert [phase.reads.shuffle for phase in chosen.parsed_method.phases] == drawn


@pytest.mark.parametrize("keys", OTHER, ids=str)
def test_whatever_changes_a_number_changes_the_digest(keys: dict[str, Any]) -> None:
    assert experiment(**keys).digest != experiment().digest
    assert (experiment(**keys).family == experiment().family) == (
        set(keys) <= {"seed", "split_seed"}
    )


@given(st.integers(1, 99))
def test_the_rest_of_the_training_set_is_the_same_said_or_unsaid(percent: int) -> None:
    share, rest = percent / 100, (100 - percent) / 100
    assert experiment(validation=share).digest == experiment(validation=share, training=rest).digest


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_cohort_is_the_same_as_a_share_or_as_a_number(clients: int, cohort: int) -> None:
    cohort = min(clients, cohort)
    share, number = (
        experiment(clients=clients, cohort=cohort / clients),
        experiment(clients=clients, cohort=cohort),
    )
    assert share.digest == number.digest


def test_experiments_are_told_apart_by_every_key_but_five() -> None:
    told = {key for keys in OTHER for key in keys}
    assert told == set(KEYS) - {"name", "target", "delta", "diagnostics", "metrics"}


@pytest.mark.parametrize(
    "keys",
    [{}, {"transform": ""}, {"split_seed": 3, "name": "x", "target": 0.5}, {"cohort": 0.3}],
    ids=str,
)
def test_what_is_written_down_is_the_experiment_again(keys: dict[str, Any]) -> None:
    first = experiment(**keys)
    assert Experiment(**first.as_dict()) == first
    assert Experiment(**first.as_dict()).digest == first.digest


def test_evaluation_follows_method_and_partition() -> None:
    assert experiment().canonical["evaluation"] == "global"
    assert experiment(method="fedbn()").canonical["evaluation"] == "client_mean"
    assert experiment(partition="dirichlet(form='fedgen')").canonical["evaluation"] == "client_mean"
    assert (
        experiment(method="fedbn()", evaluation="client_mean").digest
        == experiment(method="fedbn()").digest
    )


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"method": "fedsvg()"}, ["method", "'fedsvg'", "fedavg"]),
        ({"method": "dkd()"}, ["'distil'", "fedavg() | dkd()"]),
        ({"method": 5}, ["method", "a text", "5"]),
        ({"availability": "never()"}, ["availability", "'never'", "always, random, trace"]),
        ({"availability": "random(drop=0.6, late=0.5)"}, ["random", "1.1", "at most"]),
        ({"availability": "random(drop=-1)"}, ["drop", ">= 0 and <= 1"]),
        ({"availability": "trace(file='nowhere.csv')"}, ["trace", "nowhere.csv", "No such file"]),
        ({"min_clients": 0}, ["min_clients", ">= 1"]),
        ({"min_clients": 11}, ["min_clients is 11", "a cohort has 10"]),
        ({"on_divergence": "panic"}, ["on_divergence", "'drop', 'stop', 'continue'"]),
        ({"data": "digitz"}, ["data source", "'digitz'", "digits"]),
        ({"partition": "iid() | iid()"}, ["'iid'", "noise"]),
        ({"model": "mlp(depth=2)"}, ["model", "'depth'", "hidden"]),
        ({"transform": "blur()"}, ["transform", "'blur'", "crop, flip, normalise, pad"]),
        ({"clients": 0}, ["clients", ">= 1", "0"]),
        ({"clients": 2.0}, ["clients", "a whole number", "2.0"]),
        ({"cohort": 11}, ["cohort", "11", "10"]),
        ({"cohort": 1.5}, ["cohort", "<= 1", "1.5"]),
        ({"cohort": math.nan}, ["cohort", "nan"]),
        ({"rounds": True}, ["rounds", "a whole number", "True"]),
        ({"seed": -1}, ["seed", ">= 0", "-1"]),
        ({"seed": 2**64}, ["seed", "64 bits"]),
        ({"validation": 1}, ["validation", "< 1", "1.0"]),
        ({"evaluation": "gobal"}, ["evaluation", "'client_mean'", "'gobal'"]),
        ({"dtype": "float16"}, ["dtype", "'float32', 'float64'", "'float16'"]),
        ({"target": 85}, ["target", "<= 1", "85"]),
    ],
    ids=str,
)
def test_a_wrong_value_is_named_with_its_key_and_what_would_be_right(
    keys: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        experiment(**keys)
    assert all(part in str(caught.value) for part in named), str(caught.value)


def test_variants_replace_keys_and_each_is_swept() -> None:
    table = {
        "method": "fedavg()",
        "rounds": 3,
        "variant": [{"name": "a"}, {"rounds": 5, "method": "fedbn()"}],
        "sweep": {"seed": [0, 1]},
    }
    found = [(one.name, one.method, one.rounds, one.seed) for one in expand(table)]
    assert found == [
        ("a", "fedavg()", 3, 0),
        ("a", "fedavg()", 3, 1),
        ("", "fedbn()", 5, 0),
        ("", "fedbn()", 5, 1),
    ]
    shorter = expand(overlaid(table, ["rounds=2"]))
    assert {one.rounds for one in shorter} == {2}
    assert table["variant"][1]["rounds"] == 5  # type: ignore[index]


def test_a_sweep_makes_all_combinations_the_last_key_fastest() -> None:
    found = expand({"rounds": 3, "sweep": {"method": ["fedavg()", "fedbn()"], "seed": [5, 6, 7]}})
    assert [(e.method, e.seed, e.rounds) for e in found] == [
        (m, s, 3) for m in ("fedavg()", "fedbn()") for s in (5, 6, 7)
    ]


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({}, ["'method'", "missing"]),
        ({"metod": "fedavg()"}, ["'metod'", "method", "sweep"]),
        ({**BASE, "sweep": 3}, ["sweep", "table"]),
        ({**BASE, "sweep": {"seed": 3}}, ["sweep.seed", "list", "3"]),
        ({**BASE, "sweep": {"seed": []}}, ["sweep.seed", "at least one"]),
        ({**BASE, "sweep": {"sede": [1]}}, ["'sede'", "seed"]),
        ({**BASE, "sweep": {"method": ["fedavg()"]}}, ["'method'", "sweep"]),
        ({**BASE, "sweep": {"cohort": [0.5, 5]}}, ["sweep", "twice"]),
        ({**BASE, "sweep": {"name": ["a", "b"]}}, ["sweep", "twice"]),
        ({**BASE, "variant": 3}, ["variant", "[[variant]]"]),
        ({**BASE, "variant": []}, ["variant", "[[variant]]"]),
        ({**BASE, "variant": [{"sede": 1}]}, ["'sede'", "seed"]),
        ({**BASE, "variant": [{"name": "a"}, {"name": "b"}]}, ["variant", "twice"]),
        ({**BASE, "variant": [{"seed": 1}], "sweep": {"seed": [1]}}, ["variant", "sweep"]),
    ],
    ids=str,
)
def test_a_table_that_cannot_be_run_is_refused_in_words(
    table: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(InputError) as caught:
        expand(table)
    assert all(part in str(caught.value) for part in named), str(caught.value)


TABLE = {"method": "fedavg()", "rounds": 3, "sweep": {"seed": [0, 1]}}


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("rounds=5", {**TABLE, "rounds": 5}),
        (" cohort = 0.5 ", {**TABLE, "cohort": 0.5}),
        ("method=fedavg(lr=0.3) | dkd()", {**TABLE, "method": "fedavg(lr=0.3) | dkd()"}),
        ('method="fedbn()"', {**TABLE, "method": "fedbn()"}),
        ("name=a=b", {**TABLE, "name": "a=b"}),
        ("name=", {**TABLE, "name": ""}),
        ("seed=7", {"method": "fedavg()", "rounds": 3, "seed": 7, "sweep": {}}),
        ("sweep.seed=[7, 8]", {**TABLE, "sweep": {"seed": [7, 8]}}),
        (
            "sweep.rounds=[1, 2]",
            {"method": "fedavg()", "sweep": {"seed": [0, 1], "rounds": [1, 2]}},
        ),
        ("sweep={seed = [3]}", {**TABLE, "sweep": {"seed": [3]}}),
    ],
)
def test_a_setting_takes_the_place_of_what_the_file_says(
    setting: str, expected: dict[str, Any]
) -> None:
    before = repr(TABLE)
    assert overlaid(TABLE, [setting]) == expected
    assert repr(TABLE) == before


def test_later_settings_win() -> None:
    assert overlaid(TABLE, ["rounds=5", "rounds=6"])["rounds"] == 6


@pytest.mark.parametrize("setting", ["rounds", "=5", "", " = "])
def test_a_setting_without_key_or_value_is_refused(setting: str) -> None:
    with pytest.raises(InputError, match="key=value"):
        overlaid(TABLE, [setting])


def test_a_file_is_loaded_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text('method = "fedavg()"\n[sweep]\nseed = [0, 1]\n')
    assert [e.seed for e in load(path)] == [0, 1]
    assert [e.seed for e in load(path, ["seed=4"])] == [4]


@pytest.mark.parametrize(
    ("file", "settings", "blamed"),
    [
        ("rounds = 0", [], "e.toml"),
        ("rounds = 0", ["seed=1"], "e.toml"),
        ("rounds = 0", ["rounds=-1"], "--set rounds=-1"),
        ("rounds = 0", ["rounds=1"], None),
        ("rounds = 2", ["seed=1", "rounds=0", "clients=3"], "--set rounds=0"),
        ("rounds = 2", ["rouds=1"], "--set rouds=1"),
        ("rounds = 2", ["rounds"], "--set rounds"),
        ("cohort = 5", ["clients=3"], "--set clients=3"),
        ("clients = 3", ["cohort=2", "sweep.cohort=[5]"], "--set sweep.cohort=[5]"),
        ("rouds = 2", ["rounds=1"], "e.toml"),
    ],
)
def test_an_error_names_the_file_or_the_setting_that_brings_it(
    tmp_path: Path, file: str, settings: list[str], blamed: str | None
) -> None:
    path = tmp_path / "e.toml"
    path.write_text(f'method = "fedavg()"\n{file}\n')
    if blamed is None:
        assert load(path, settings)
        return
    with pytest.raises(InputError) as error:
        load(path, settings)
    assert str(error.value).removeprefix(f"{tmp_path}/").startswith(f"{blamed}: ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"method = ", "is not TOML"),
        (b"method = 'a'\nmethod = 'b'", "is not TOML"),
        (b"\xff\xfe", "cannot read"),
        (b"a = " + b"[" * 5000, "is not TOML"),
        (b"a = " + b"9" * 5000, "is not TOML"),
    ],
    ids=["missing", "cut short", "key twice", "not text", "nested too deep", "number too long"],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes | None, says: str
) -> None:
    path = tmp_path / "e.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        load(path)
    assert str(path) in str(caught.value)


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["fedavg()", "dkd()", "iid()"])
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
)
TABLES = st.dictionaries(
    st.sampled_from([*KEYS, "sweep", "variant", "nonsense"]), VALUES, max_size=6
)
SWEEPS = st.dictionaries(
    st.sampled_from([*KEYS, "sweep", "variant", "nonsense"]),
    st.lists(ATOMS, max_size=2) | ATOMS,
    max_size=3,
)


@given(
    TABLES,
    SWEEPS,
    st.booleans(),
    st.lists(st.text(max_size=20) | st.sampled_from(["sweep.seed=[1]", "seed=3"]), max_size=2),
)
@example({"sweep": 3}, {}, False, ["sweep.seed=[1]"])
@example({}, {}, False, ["seed=" + "[" * 5000])
@example({}, {}, False, ["seed=" + "9" * 5000])
@settings(deadline=None)
def test_random_tables_are_run_or_refused_in_words(
    table: dict[str, Any], sweep: Any, swept: bool, given: list[str]
) -> None:
    table = {"method": "fedavg()", **table, **({"sweep": sweep} if swept else {})}
    with contextlib.suppress(InputError):
        expand(overlaid(table, given))


LINES = st.sampled_from(
    [
        'method = "fedavg()"',
        "[sweep]",
        "seed = [0, 1]",
        "rounds = 2",
        "cohort = 0.5",
        "x.y = 1",
        "[[sweep]]",
        "a = 1979-05-27",
    ]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.lists(LINES | st.text(max_size=15), max_size=5).map("\n".join))
def test_random_files_are_run_or_refused_in_words(tmp_path: Path, content: str) -> None:
    path = tmp_path / "e.toml"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(InputError):
        load(path)


def test_the_demo_is_an_experiment() -> None:
    path = Path(__file__).parents[2] / "src" / "feddkd" / "cli" / "demo.toml"
    table = tomllib.loads(path.read_text())
    sizes = [len(table["variant"]), *(len(values) for values in table["sweep"].values())]
    assert len(load(path)) == math.prod(sizes)
