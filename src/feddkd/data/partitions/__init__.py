"""Partitions: rules that divide the examples of a data set among the clients.

Importing this package registers every partition in PARTITIONS and every change in CHANGES.
"""

from feddkd.data.partitions import dirichlet as dirichlet
from feddkd.data.partitions import given as given
from feddkd.data.partitions import kinds as kinds
from feddkd.data.partitions import label_skew as label_skew
from feddkd.data.partitions import sizes as sizes
from feddkd.data.partitions import skews as skews
