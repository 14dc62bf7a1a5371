"""Run the command line with `python -m feddkd.cli`."""

from feddkd.cli.app import main

main()
