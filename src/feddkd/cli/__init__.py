"""The command line: one file for each command."""


def main() -> None:
    """Run the `feddkd` command; what the installed script calls."""
    from feddkd.cli.app import main as run

    run()
