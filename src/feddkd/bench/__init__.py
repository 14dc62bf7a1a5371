"""Measures how fast an engine is on jobs of a fixed size with random data.

Each job is also measured as a plain loop over clients in the same run.
"""

from feddkd.bench.jobs import JOBS as JOBS
from feddkd.bench.jobs import sized as sized
from feddkd.bench.measure import Bench as Bench
from feddkd.bench.setting import setting as setting
from feddkd.bench.table import document as document
from feddkd.bench.table import page as page
