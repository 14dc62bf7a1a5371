"""Run the command line with `python -m feddkd`."""

from feddkd.cli import main

main()
