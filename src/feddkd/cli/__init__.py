"""The command line: one file for each command."""


def main() -> None:
    """Run the `feddkd` command; the installed script calls this function."""
    from feddkd.cli.app import main as run

    run()
