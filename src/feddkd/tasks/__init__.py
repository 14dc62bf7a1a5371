"""Tasks: what is learned from examples. One file for each kind of target."""
