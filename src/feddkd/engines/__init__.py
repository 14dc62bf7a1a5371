"""Where clients compute: one after another, as one program, or in several processes."""
