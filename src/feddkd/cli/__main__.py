"""Run the command line with `python -m feddkd.cli`."""

from feddkd.cli import main

main()
