"""The same experiments on a real federation: what a node answers, Flower's two apps, certificates and keys, processes.

Besides `engines/flower.py` and `engines/letters.py` this is the only room that imports flwr.
"""
