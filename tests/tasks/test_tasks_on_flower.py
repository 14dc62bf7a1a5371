"""Every task on Flower's nodes: the numbers of plain PyTorch, in float64 to 1e-12."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from feddkd.flower.apps import NodeApp, serve
from flower_double import Double, apart, final, rows
from plain_tasks import METHODS
from small_tasks import SMALL, registered
from test_tasks import expected, keys


@pytest.fixture(autouse=True, scope="module")
def names() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind not in ("mse", "mae")])
def test_nodes_compute_what_plain_pytorch_does(kind: str, method: str, tmp_path: Path) -> None:
    written = {f"experiment.{key}": value for key, value in keys(kind, method).items()}
    options = {"out": str(tmp_path), "poll": 0.0, "deadline": 5.0, "join": 5.0}
    serve(Double(NodeApp(), 4), {**written, **options})
    wanted = expected(kind, method, keys(kind, method)["seed"])
    assert apart(final(tmp_path), wanted) < 1e-12
    assert len(rows(tmp_path)) == 2
