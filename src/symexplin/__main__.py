"""Run the command line as `python -m symexplin`."""

import sys

from symexplin.cli import main

if __name__ == "__main__":
    sys.exit(main())
