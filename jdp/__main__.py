"""`python -m jdp`: the same as the command `jdp`."""

import sys

from jdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
