"""feddkd bench: engines against the plain loop over clients."""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from feddkd.bench import JOBS, Bench, document, page, setting, sized
from feddkd.cli.console import AsJson, console
from feddkd.engines.select import find_engine
from feddkd.errors import InputError


def bench(
    job: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Which job; repeatable; all of them if none."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="The engine to measure; the fastest kind unless said.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="One of the engine's strategies, where it has several.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; a GPU where there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="tf32, fp32, bf16 or fp64.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, of the plain loop too.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps an exchange where steps are timed (J for dkd).")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats; the median counts.")] = 5,
    strategies: Annotated[
        bool,
        typer.Option("--strategies", help="Each strategy alone, too, and what choosing costs."),
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="Everything tiny: a smoke test, no measurement.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the JSON object to a file, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an engine against the plain loop over clients, in the same run, on made-up data.

    Jobs: femnist, vgg9, many-small, mlp, dirichlet, seeds, dkd; bench/README.md says what each is.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    here = setting(
        engine=engine, device=device, precision=precision, strategy=strategy, repeats=repeats
    )
    if strategies and (strategy is not None or not hasattr(find_engine(here.engine), "strategies")):
        raise InputError(
            "--strategies compares the choice of engine 'batched' with its single strategies: no"
            " other engine has any"
        )
    runner = Bench(here, sized(device=here.device, small=small, steps=steps), strategies)
    entries: list[dict[str, Any]] = []
    for one in [runner.find(name) for name in job or JOBS]:
        if out is not None and not entries:
            # complain before anything is measured
            _write_json(out, document(entries, here, small=small))
        console(stderr=True).print(f"{one.name}: {one.what}")
        entries.append(runner.measure(one))
        if out is not None:  # after every job: a run that is stopped keeps what it had
            _write_json(out, document(entries, here, small=small))
    console(stderr=as_json).print(page(entries, here))
    if as_json:
        print(json.dumps(document(entries, here, small=small), default=str))


def _write_json(path: Path, value: Any) -> None:
    try:
        path.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
