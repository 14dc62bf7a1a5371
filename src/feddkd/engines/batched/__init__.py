"""The engine that computes all clients of a cohort, and several seeds, as one program."""
