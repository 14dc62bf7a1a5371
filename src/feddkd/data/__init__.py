"""Examples, how they are divided among clients, transformed and read in mini-batches."""
