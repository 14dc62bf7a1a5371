"""Runs experiments on a federation of Flower nodes. No other package imports flwr."""
