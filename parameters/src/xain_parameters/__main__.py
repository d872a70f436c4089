"""`python -m xain_parameters`."""

import sys

from xain_parameters.cli import main

if __name__ == "__main__":
    sys.exit(main())
