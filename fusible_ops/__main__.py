"""`python -m fusible_ops` is the command `fusible-ops`."""

import sys

from fusible_ops.cli import main

if __name__ == "__main__":
    sys.exit(main())
