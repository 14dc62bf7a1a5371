"""Metrics: the numbers that are measured of a model on examples.

A metric adds up named sums over examples and makes one number from the sums. Sums of batches and of
clients can be added, so every engine can fold them. A new metric is one `Metric` in the file of its
task: rows, summaries, tables, curves and pages read its declaration.

No module of the package imports torch when it is loaded, so that commands which only read records
start quickly.
"""

from feddkd.rounds.metrics import language as language
from feddkd.rounds.metrics import multilabel as multilabel
from feddkd.rounds.metrics import regression as regression
from feddkd.rounds.metrics import segmentation as segmentation
from feddkd.rounds.metrics.classification import ACCURACY as ACCURACY
from feddkd.rounds.metrics.classification import LOSS as LOSS
from feddkd.rounds.metrics.lookup import DEFAULT as DEFAULT
from feddkd.rounds.metrics.lookup import SUCCESS_KEY as SUCCESS_KEY
from feddkd.rounds.metrics.lookup import find_metrics as find_metrics
from feddkd.rounds.metrics.lookup import headline as headline
from feddkd.rounds.metrics.lookup import metrics_in as metrics_in
from feddkd.rounds.metrics.lookup import shown_in as shown_in
from feddkd.rounds.metrics.metric import METRICS as METRICS
from feddkd.rounds.metrics.metric import Metric as Metric
from feddkd.rounds.metrics.metric import known as known
from feddkd.rounds.metrics.metric import own_facts as own_facts
from feddkd.rounds.metrics.metric import read_own as read_own
from feddkd.rounds.metrics.metric import register as register
from feddkd.rounds.metrics.target import Target as Target
from feddkd.rounds.metrics.target import check_target as check_target
from feddkd.rounds.metrics.target import read_target as read_target
