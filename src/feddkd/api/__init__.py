"""Functions and values that users call from Python: `simulate`, `run`, `load`, and their results."""
