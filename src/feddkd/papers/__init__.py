"""A paper as data: its printed tables, compared with our records."""
