"""A paper as data: its printed tables beside our records."""
