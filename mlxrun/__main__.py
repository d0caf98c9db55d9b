"""`python -m mlxrun`: the command `mlxrun` of the environment that this Python belongs to."""

import sys

from mlxrun.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
