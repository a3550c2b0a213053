"""The whole runtime in simulation: real endpoints, simulated time, network, memory and misfortune.

>>> from tests.support.simulation import run
>>> print(run(seed=1, num_requests=5).summary())
seed 1, 5 requests: ...

Every run is made of its seed alone: the same seed gives the same run.
"""

from tests.support.simulation.laws import Law, Violation
from tests.support.simulation.run import SimulatedRun, run, smaller
from tests.support.simulation.troubles import EVERY_TROUBLE, Trouble

__all__ = ["EVERY_TROUBLE", "Law", "SimulatedRun", "Trouble", "Violation", "run", "smaller"]
