"""Examples: their sources, and how they are divided, transformed and read in mini-batches."""
