"""What the methods say about themselves: paper, formula, options, what is sent and kept."""
