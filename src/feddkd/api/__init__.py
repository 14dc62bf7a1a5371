"""The functions for users of Python: `simulate`, `run` and `load`, and the values they return."""
