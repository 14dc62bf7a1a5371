"""check_method:

every method of the registry obeys its laws, and methods broken on purpose are each caught by the
right one.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as mean_cross_entropy

from feddkd import METHODS, InputError, dkd, fedavg
from feddkd.method import Batch, Fold, Method, World
from feddkd.method_docs.metadata import is_piece
from feddkd.methods import parse
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.models.functional import Model, Output
from feddkd.tensors import Groups, Tensors, add
from feddkd.testing import LAWS, LawError, check_method
from feddkd.testing.rehearsal import federation, rehearse

SMALL = Local(epochs=1, batch_size=8)
FIRST = "fedavg(epochs=1, batch_size=8)"


# of 'private': tensors that both small networks have; of 'topk': enough that all tensors move
NAMES = {"private": ["names='*.bias'"], "topk": ["share=0.9"]}


def small(name: str) -> str:
    """A method with small numbers in place of large ones: batches of eight, and two of everything
    else that is counted.
    """
    options = METHODS.options(name)
    counts = {key: value for key, value in options.items() if type(value) is int and value > 2}
    written = ", ".join(
        [*(f"{key}={8 if 'batch' in key else 2}" for key in counts), *NAMES.get(name, ())]
    )
    return f"{FIRST} | {name}({written})" if is_piece(METHODS[name]()) else f"{name}({written})"


# fedavg with a piece behind it, to the last bit (test_methods_server.py): the pieces are checked
SAME = {"fedavgm", "fedadam", "fedyogi", "fedadagrad"}


# in `make test`; `make long` checks all of them
ALWAYS = ("fedavg", "dkd", "scaffold")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long)
        for name in METHODS
        if name not in SAME
    ],
)
def test_every_registered_method_obeys_the_laws(name: str) -> None:
    report = check_method(small(name))
    assert report.checked == tuple(LAWS)
    assert "plain" in report.networks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # a first capture gives warnings
@pytest.mark.parametrize("way", ["loop", "vmap", "graph", "streams"])
@pytest.mark.parametrize("name", list(METHODS))
def test_every_registered_method_agrees_with_serial_on_a_gpu(name: str, way: str) -> None:
    expected = rehearse(small(name), rounds=2)
    options: dict[str, Any] = {"strategy": way, "precision": "fp32"}
    found = rehearse(small(name), engine="batched", device="cuda", rounds=2, **options)
    weights, wanted = found.states[0]["params"], expected.states[0]["params"]
    assert all((weights[key].cpu() - wanted[key]).abs().max() < 1e-12 for key in wanted)
    assert found.rows[0]["test_loss"] == pytest.approx(expected.rows[0]["test_loss"], rel=1e-12)


def test_a_method_without_a_text_is_checked_in_all_but_that() -> None:
    report = check_method(local_training(SMALL))
    assert report.checked == tuple(law for law in LAWS if law != "reads back from its text")
    assert "METHODS.register" in str(report)


# --- methods broken on purpose: what they are, and the law that must notice


def local(**changes: Any) -> Method:
    return local_training(SMALL, Variant(**changes))


def with_client(change: Callable[[Fold], Fold]) -> Method:
    (phase,) = local().phases
    assert isinstance(phase.client, Fold)
    return Method((replace(phase, client=change(phase.client)),))


def counter(model: Model, state: Groups, world: World) -> Groups:
    return {"seen": {"rounds": torch.zeros(())}}


def changes_its_memo() -> Method:
    def part(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        memo["seen"]["rounds"].add_(1)
        return {}, {"seen": memo["seen"]}

    return local(brings=counter, keeps=frozenset({"seen"}), part=part)


def changes_the_servers_state() -> Method:
    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        state["seen"]["rounds"].add_(1)
        return take_average(model, state, collected, rates)

    return local(opens=counter, server=server)


def writes_into_a_mapping() -> Method:
    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        state["params"] = collected["params"]  # type: ignore[index]
        return state

    return local(server=server)


def changes_its_batch() -> Method:
    def fold(client: Fold) -> Fold:
        def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
            batch.x.mul_(2)
            return client.step(model, sent, carry, batch)

        return replace(client, step=step)

    return with_client(fold)


def a_client_draws_from_torch() -> Method:
    return local(
        bend=lambda gradient, sent, carry: {
            name: g * torch.rand(()) for name, g in gradient.items()
        }
    )


def the_server_draws_from_torch() -> Method:
    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        noise = {name: torch.randn_like(w) for name, w in collected["params"].items()}
        return take_average(
            model, state, {**collected, "params": add(collected["params"], noise, 0.01)}, rates
        )

    return local(server=server)


def remembers_earlier_runs() -> Method:
    calls: list[int] = []

    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        calls.append(1)
        params = {name: w * (1 + len(calls) / 1000) for name, w in collected["params"].items()}
        return take_average(model, state, {**collected, "params": params}, rates)

    return local(server=server)


def does_not_care_for_the_seed() -> Method:
    return local(server=lambda model, state, collected, rates: state)


def is_not_what_it_says() -> Method:
    return replace(local(), calls=fedavg(epochs=2, batch_size=8).calls)


def uploads_what_it_does_not_count() -> Method:
    return local(part=lambda model, sent, carry, memo: ({"gradient": carry["params"]}, {}))


def branches_on_a_tensor() -> Method:
    def bend(gradient: Tensors, sent: Groups, carry: Groups) -> Tensors:
        return (
            gradient if next(iter(gradient.values())).abs().max() > 1e9 else add(gradient, gradient)
        )

    return local(bend=bend)


def forgets_the_shares() -> Method:
    """A plain mean over the batch counts padding in."""

    def term(
        model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
    ) -> Tensor:
        return mean_cross_entropy(output.logits, batch.y)

    return local(terms=(term,))


def counts_on_three_clients() -> Method:
    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        first, second, third = (
            collected["all"]["0.weight"]
            if "0.weight" in collected["all"]
            else collected["all"]["1.weight"]
        )
        assert first.shape == second.shape == third.shape
        return take_average(model, state, collected, rates)

    return local(every={"all": "params"}, server=server)


def counts_on_everybody_in_the_second_exchange() -> Method:
    """Asks for as many teachers as there were models: one may have fallen silent in between."""
    first, second = local(every={"all": "params"}).phases[0], dkd(steps=1, batch_size=8).phases[0]

    def remember(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        return {**take_average(model, state, collected, rates), "share": {"share": rates["share"]}}

    def server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
        assert rates["share"] == state["share"]["share"]
        return second.server(model, state, collected, rates)

    return Method((replace(first, server=remember), replace(second, server=server)))


def keeps_its_head_in_a_memo_of_its_own() -> Method:
    """FedPer by hand: heads are trained at the clients, but the evaluation does not know it."""

    def head(model: Model, params: Tensors) -> Tensors:
        return {name: w for name, w in params.items() if name.startswith(f"{model.head}.")}

    (phase,) = local().phases
    client = phase.client
    assert isinstance(client, Fold)

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return client.start(model, {**sent, "params": {**sent["params"], **memo["mine"]}}, memo)

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, after = client.finish(model, sent, carry, memo)
        shared = {**upload["params"], **head(model, sent["params"])}
        return {**upload, "params": shared}, {**after, "mine": head(model, carry["params"])}

    def brings(model: Model, state: Groups, world: World) -> Groups:
        return {"mine": head(model, state["params"])}

    fold = replace(client, start=start, finish=finish)
    return Method((replace(phase, client=fold, keeps=frozenset({"mine"}), brings=brings),))


BROKEN = {
    keeps_its_head_in_a_memo_of_its_own: "reports what it trains",
    changes_its_memo: "mutates nothing",
    changes_the_servers_state: "mutates nothing",
    writes_into_a_mapping: "mutates nothing",
    changes_its_batch: "mutates nothing",
    a_client_draws_from_torch: "respects keys",
    the_server_draws_from_torch: "respects keys",
    remembers_earlier_runs: "respects keys",
    does_not_care_for_the_seed: "respects keys",
    is_not_what_it_says: "reads back from its text",
    uploads_what_it_does_not_count: "reports its bytes",
    branches_on_a_tensor: "agrees on all engines",
    forgets_the_shares: "agrees on all engines",
    counts_on_three_clients: "survives partial cohorts",
    counts_on_everybody_in_the_second_exchange: "survives partial cohorts",
}


@pytest.mark.parametrize("make", BROKEN, ids=lambda make: make.__name__.replace("_", " "))
def test_a_method_that_breaks_a_law_is_caught_by_that_law(make: Callable[[], Method]) -> None:
    with pytest.raises(LawError) as caught:
        check_method(make())
    assert caught.value.law == BROKEN[make], caught.value
    assert BROKEN[make] in str(caught.value)


def test_every_law_has_a_method_that_breaks_it() -> None:
    assert set(BROKEN.values()) == set(LAWS)


def test_what_fails_says_how_to_see_it_again() -> None:
    with pytest.raises(
        LawError,
        match=(
            r"(?s)differs by .*feddkd.testing.rehearse\(method, network='plain', engine='batched'"
        ),
    ):
        check_method(forgets_the_shares())


def test_a_method_that_cannot_run_at_all_is_told_so() -> None:
    with pytest.raises(LawError, match=r"runs: a run fails: .*nowhere") as caught:
        check_method(local(sends=("nowhere",)))
    assert caught.value.law == "runs"


def test_a_network_that_a_method_refuses_is_left_out_with_its_reason() -> None:
    def begin(model: Model, sent: Groups, memo: Groups) -> Groups:
        if model.norm_names:
            raise InputError("this and batch norm do not go together")
        return {}

    report = check_method(local(begin=begin))
    assert report.networks == ("plain",)
    assert report.skipped["network 'batch norm'"] == "this and batch norm do not go together"


def test_a_piece_by_itself_is_refused() -> None:
    with pytest.raises(InputError, match="put a method that trains locally first"):
        check_method("dkd()")


def test_the_rehearsed_federation_has_partial_batches_and_unlike_clients() -> None:
    for width in (2, 3, 8, 10, 64):
        sizes = federation(parse(f"fedavg(batch_size={width})"), 0).sizes
        assert len(set(sizes)) > 2
        assert all(n % width != 1 for n in sizes)  # batch norm cannot train on one example
        assert width < 8 or {n % width > 0 for n in sizes} == {True, False}


def test_it_needs_no_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None; from feddkd.testing import *;"
        " print(len(rehearse('fedavg()', rounds=1).rows))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
