"""The command line:

feddkd run | resume | report | watch | ls | compare | methods | data | paper | bench | flower.
"""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.bench import bench
from feddkd.cli.compare import compare
from feddkd.cli.console import File, Settings
from feddkd.cli.console import console as _console
from feddkd.cli.data import data_app
from feddkd.cli.flower import flower_app
from feddkd.cli.ls import listing
from feddkd.cli.methods import methods
from feddkd.cli.paper import paper_app
from feddkd.cli.report import report
from feddkd.cli.run_options import OnDivergence, RunOptions, with_run_options
from feddkd.cli.start_runs import run_all
from feddkd.cli.watch import watch
from feddkd.engines.batched.memory import ran_out
from feddkd.errors import ClientError, InputError, RunError
from feddkd.experiment import load
from feddkd.runs.record import find, folder_name
from feddkd.runs.signals import Halted
from feddkd.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Federated learning by decentralised knowledge distillation.\n\n"
    "Write an experiment as a TOML file, `feddkd run` it, `feddkd report` what came out.",
)
app.add_typer(data_app, name="data")
app.add_typer(paper_app, name="paper")
app.add_typer(flower_app, name="flower")

# that a user has given
WRONG_PATHS = "ENOENT EACCES EPERM EEXIST ENOTDIR EISDIR EROFS ENAMETOOLONG ELOOP"


def main() -> None:
    """Entry point: a user's mistake is one line on standard error and exit status 2, never a
    traceback.
    """
    try:
        sys.exit(app(standalone_mode=False, prog_name="feddkd"))
    except InputError as error:
        _fail(str(error))
    except (ClientError, RunError) as error:
        _fail(str(error), status=1)
    except Halted as halted:
        _fail(str(halted), status=halted.status)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", status=130)
    except OSError as error:  # else than a wrong path it is a full disk, a closed pipe
        _fail(
            str(error),
            status=2 if errno.errorcode.get(error.errno or 0) in WRONG_PATHS.split() else 1,
        )
    except Exception as error:
        if ran_out(error):
            _fail(f"memory ran out: {str(error)[:200]}", status=1)
        # typer's usage errors have it, and no public class of their own
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message())


def _fail(message: str, status: int = 2) -> None:
    if message:  # there is none where help was asked for by saying nothing
        print("feddkd: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


@app.command()
@with_run_options
def run(
    file: File,
    options: RunOptions,
    set_: Settings = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are written.")] = Path(
        "runs"
    ),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run again what is finished or was cut short.")
    ] = False,
    on_divergence: OnDivergence = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what would run, on which engine; time, memory, bytes."),
    ] = False,
) -> None:
    """Run the experiments of a file: one run for each combination of its [sweep].

    A file needs one key, `method`, as in

        method = "fedavg(epochs=5, lr=0.1) | dkd(steps=10, lr=0.2)"

    The others have defaults:

    - data = "digits", partition = "dirichlet(alpha=0.1)": see `feddkd data list`
    - model = "mlp(hidden='64')", or femnist_cnn, vgg9, digit_cnn, emnist_cnn, small_cnn
    - initial: a safetensors file with the weights to start from, where the seed shall not draw
      them; initial_sha256: what its sha256 must be
    - clients = 10; cohort = 1.0, the share of them active in a round, or their number; rounds = 10
    - seed = 0 decides everything random; split_seed, if given, validation set and partition in its
      place
    - validation = 0.1, training = all the rest: shares of the training set, class by class; public
      = 0: a share of the clients' part that the server holds for everybody to see, for methods that
      use such data
    - transform: in place of the one that goes with the data, as in "pad(pixels=2) |
      normalise(mean=0.5, std=0.5)"
    - evaluation = "auto", or global, client_mean, client_pooled; dtype = "float32", or float64
    - shuffle = true; false: clients read their examples in stored order, every round going on where
      the one before it ended; "distillation": they do, but DKD draws
    - availability = "always()", or "random(drop=0.1, late=0.05)", "trace(file='faults.csv')": which
      clients do not answer; min_clients = 1: with fewer left a round ends; on_divergence = "drop",
      or stop, continue: what becomes of a client whose numbers are not finite
    - diagnostics = true logs the theory's quantities (L1', L2', their bound, update norms, clients'
      losses) in every round
    - metrics = ["accuracy", "loss"]: what is measured, the headline first; also macro_f1, auc
    - target: a value of the headline metric whose price is reported; delta: of the epsilon that
      methods with noise report; name: a label

    A table [sweep] lists values, as in seed = [0, 1, 2]. Change any key by --set rounds=5, --set
    'method=fedavg(lr=0.3)', --set 'sweep.seed=[0, 1]'.

    Runs that are finished in DIR are left alone, and those that were cut short go on to the same
    numbers. Ctrl-C ends the round and saves; the second one stops at once.
    """
    settings = [
        *(set_ or ()),
        *([] if on_divergence is None else [f"on_divergence={on_divergence}"]),
    ]
    experiments = load(file, settings)
    run_all(experiments, [out] * len(experiments), options, fresh=fresh, dry=dry_run)
    if not options.as_json and not dry_run:
        _console().print(f"written to {out}{os.sep}", soft_wrap=True)


@app.command()
@with_run_options
def resume(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of runs, or folders that hold such."),
    ],
    options: RunOptions,
) -> None:
    """Continue the runs under some folders that were cut short, each from its last checkpoint."""
    found = [record for folder in folders for record in find(folder, begun=True)]
    for record in found:
        if record.experiment.digest != record.manifest["digest"]:
            raise InputError(
                f"cannot resume {record.folder}: a file that its experiment names has changed"
            )
        if record.folder.resolve().name != (name := folder_name(record.experiment)):
            raise InputError(f"cannot resume {record.folder}: rename the folder to {name}")
    run_all(
        [record.experiment for record in found], [record.folder.parent for record in found], options
    )


app.command()(report)
app.command("ls")(listing)
app.command()(compare)
app.command()(watch)
app.command()(methods)
app.command()(bench)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show:
        print(f"feddkd {__version__}")
        raise typer.Exit
