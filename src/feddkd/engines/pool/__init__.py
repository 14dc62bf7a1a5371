"""The engine that deals clients to worker processes, one for each core."""
