"""Experiments on disk: run folders, checkpoints, resuming, forecasts, loggers."""
