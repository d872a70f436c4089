"""`python -m xain_coordinator`."""

import sys

from xain_coordinator.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
