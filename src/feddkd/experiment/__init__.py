"""Experiments: all that decides a run's numbers, and nothing else.

An experiment is a frozen value, loaded from TOML; a `[sweep]` table makes a list of them. Engine,
device and folders are not part of it.
"""

from feddkd.experiment.description import KEYS as KEYS
from feddkd.experiment.description import USUAL as USUAL
from feddkd.experiment.description import Experiment as Experiment
from feddkd.experiment.files import expand as expand
from feddkd.experiment.files import load as load
from feddkd.experiment.files import overlaid as overlaid
from feddkd.experiment.files import write as write
