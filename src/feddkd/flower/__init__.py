"""The same experiments on a real federation: what a node answers, Flower's two apps, certificates and keys, processes.

Besides `flower.py`, `letters.py`, `secure.py` and `shares.py` in `engines` this is the only room that imports flwr.
"""
