"""`python -m mlxgen` is the command `mlxgen`."""

import sys

from mlxgen.cli import main

if __name__ == "__main__":
    sys.exit(main())
