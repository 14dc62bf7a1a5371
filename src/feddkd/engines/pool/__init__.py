"""The engine that distributes clients to worker processes, one for each core."""
