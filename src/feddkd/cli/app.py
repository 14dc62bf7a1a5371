"""The `feddkd` command. A command's module is imported when the command is called."""

import errno
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from feddkd.cli.streams import prepare_streams
from feddkd.errors import ClientError, InputError, RunError
from feddkd.version import __version__

if TYPE_CHECKING:
    import click


class CommandPlace(NamedTuple):
    """The place of a command, which is a function or a group of commands in a module."""

    module: str
    name: str
    help: str  # its line in the list of commands


COMMANDS = {
    "demo": CommandPlace(
        "demo", "demo", "Compare five methods on handwritten digits, in a minute; show the report."
    ),
    "run": CommandPlace(
        "run",
        "run",
        "Run the experiments of a file: one run for each combination of its [sweep].",
    ),
    "resume": CommandPlace(
        "resume", "resume", "Continue runs that were cut short, each from its last checkpoint."
    ),
    "report": CommandPlace(
        "report", "report", "Show a table of runs; write a page, figures and tables about them."
    ),
    "ls": CommandPlace("ls", "listing", "List the runs under a folder, one line for each run."),
    "check": CommandPlace(
        "check", "check", "Check the files of runs for damage; repair what can be repaired."
    ),
    "compare": CommandPlace(
        "compare", "compare", "Compare two experiments key by key, and their results."
    ),
    "controls": CommandPlace(
        "controls",
        "controls_command",
        "Write the controls of an experiment with DKD: equal costs, other teachers.",
    ),
    "watch": CommandPlace("watch", "watch", "Show the report of a running job in a browser."),
    "predict": CommandPlace(
        "predict", "predict_command", "Use the model of a finished run on new examples."
    ),
    "methods": CommandPlace(
        "methods", "methods", "List the methods with their papers, options, and what they send."
    ),
    "bench": CommandPlace("bench", "bench", "Measure an engine against the plain loop."),
    "cache": CommandPlace("cache", "cache", "Show or empty the cache of fast strategies."),
    "data": CommandPlace(
        "data", "data_app", "Look at data sources and at how they are divided among clients."
    ),
    "paper": CommandPlace(
        "paper", "paper_app", "Compare the paper's tables with our records; run what is missing."
    ),
    "flower": CommandPlace(
        "flower",
        "flower_app",
        "Run experiments on a federation of Flower nodes (needs feddkd[flower]).",
    ),
}
# errors of a path that the user gave
WRONG_PATHS = "ENOENT EACCES EPERM EEXIST ENOTDIR EISDIR EROFS ENAMETOOLONG ELOOP"


def load_command(name: str) -> "click.Command":
    """Import a command's module and return the command."""
    place = COMMANDS[name]
    found = getattr(import_module(f"feddkd.cli.{place.module}"), place.name)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        alone.command(name)(found)
        found = alone
    return typer.main.get_command(found)


class LazyGroup(TyperGroup):
    """A group that lists its commands without importing them."""

    def resolve_command(self, ctx: "click.Context", args: list[str]) -> Any:
        """Return the name, the imported command and the remaining words of a command line."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), rest


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Federated learning by decentralised knowledge distillation.\n\n"
    "Write an experiment as a TOML file, `feddkd run` it, `feddkd report` the results.",
)


def _listed() -> None:
    """Stand for a command that is not imported."""


for _name, _place in COMMANDS.items():
    app.command(_name, help=_place.help)(_listed)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show:
        print(f"feddkd {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; a user's mistake is one line on standard error and exit status 2."""
    prepare_streams()
    try:
        sys.exit(app(standalone_mode=False, prog_name="feddkd"))
    except InputError as error:
        _fail(str(error))
    except (ClientError, RunError) as error:
        _fail(str(error), status=1)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", status=130)
    except OSError as error:  # a wrong path, or else a full disk, a closed pipe
        wrong = errno.errorcode.get(error.errno or 0) in WRONG_PATHS.split()
        _fail(str(error), status=2 if wrong else 1)
    except Exception as error:
        _fail_otherwise(error)


def _fail_otherwise(error: Exception) -> None:
    """Report a usage error, a halted run or too little memory; raise any other error again."""
    # typer's usage errors have this method, and no public class
    if hasattr(error, "format_message"):
        _fail(error.format_message())
    from feddkd.engines.memory import ran_out
    from feddkd.runs.signals import Halted

    if isinstance(error, Halted):
        _fail(str(error), status=error.status)
    if ran_out(error):
        _fail(f"memory ran out: {str(error)[:200]}", status=1)
    raise error


def _fail(message: str, status: int = 2) -> None:
    if message:  # empty after a command line without a command, which shows the help
        print("feddkd: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)
