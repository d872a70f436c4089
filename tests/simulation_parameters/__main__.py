"""The simulation from the command line; see --help."""

import sys

from simulation_parameters.scenario import from_seed
from simulation_parameters.world import simulate
from support.seeds import main

ABOUT = "Simulate the parameter server with faults drawn from seeds."

if __name__ == "__main__":
    sys.exit(main("simulation_parameters", ABOUT, simulate, from_seed))
