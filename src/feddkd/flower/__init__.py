"""The same experiments on a real federation: what a node answers, Flower's two apps, certificates and keys, processes.

Besides the engine itself, in `engines/flower`, this is the only room that imports flwr.
"""
