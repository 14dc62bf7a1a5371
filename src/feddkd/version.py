"""The version. The build reads this file, so it imports no torch."""

__version__ = "0.1.0"
