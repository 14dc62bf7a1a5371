"""A paper's tables beside our records: what was printed, which runs stand behind each cell, and how they compare."""
