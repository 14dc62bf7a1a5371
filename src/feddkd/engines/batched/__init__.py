"""The engine that computes a cohort, and several runs at once, as one program over lanes."""
