"""`python -m xain_participant`."""

import sys

from xain_participant.cli.cli import main

if __name__ == "__main__":
    sys.exit(main())
