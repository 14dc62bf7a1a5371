"""feddkd bench: engines against the plain loop over clients."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from feddkd.bench import JOBS, Bench, document, page, setting, sized
from feddkd.cli.console import AsJson, console
from feddkd.engines.select import find_engine
from feddkd.engines.threads import set_threads
from feddkd.errors import InputError


def bench(
    job: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The job to measure; repeatable; all jobs by default."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="The engine to measure; by default the fastest one.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option(help="A strategy of the engine, if it has several.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="tf32, fp32, bf16 or fp64.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, also of the plain loop.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps in an exchange if steps are timed (J for dkd).")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats; the median counts.")] = 5,
    strategies: Annotated[
        bool,
        typer.Option(
            "--strategies", help="Also measure each strategy alone, and the cost of the choice."
        ),
    ] = False,
    small: Annotated[
        bool, typer.Option("--small", help="Make everything tiny: a smoke test, not a measurement.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the JSON object to a file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure an engine against the plain loop over clients, in the same run, on made-up data.

    Jobs: femnist, vgg9, many-small, mlp, dirichlet, seeds, dkd, and everyday networks: resnet18,
    resnet18-bn, vit-tiny, gpt-mini, lstm, unet, lora; bench/README.md says what each is.
    """
    if threads is not None:
        set_threads(threads)
    chosen = setting(
        engine=engine, device=device, precision=precision, strategy=strategy, repeats=repeats
    )
    if strategies and (
        strategy is not None or not hasattr(find_engine(chosen.engine), "strategies")
    ):
        raise InputError(
            "--strategies compares the strategies of engine 'batched': no other engine has any,"
            " and --strategy chooses one"
        )
    runner = Bench(chosen, sized(device=chosen.device, small=small, steps=steps), strategies)
    entries: list[dict[str, Any]] = []
    for one in [runner.find(name) for name in job or JOBS]:
        if out is not None and not entries:
            # a path that cannot be written is an error before anything is measured
            _write_json(out, document(entries, chosen, small=small))
        console(stderr=True).print(f"{one.name}: {one.what}")
        entries.append(runner.measure(one))
        if out is not None:  # after every job: a run that is stopped keeps what it had
            _write_json(out, document(entries, chosen, small=small))
    console(stderr=as_json).print(page(entries, chosen))
    if as_json:
        print(json.dumps(document(entries, chosen, small=small), default=str))


def _write_json(path: Path, value: Any) -> None:
    try:
        path.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
