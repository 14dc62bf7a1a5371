"""`Job` (what is simulated) and `Simulation` (a job on an engine).

Every part of the package that simulates rounds does so by a `Simulation`.
"""

from feddkd.simulation.first_state import begin as begin
from feddkd.simulation.job import DTYPES as DTYPES
from feddkd.simulation.job import Job as Job
from feddkd.simulation.job import Start as Start
from feddkd.simulation.simulation import Simulation as Simulation
from feddkd.simulation.simulation import Snapshot as Snapshot
