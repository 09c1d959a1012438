"""`python -m kerasdist` is the command `kerasdist`."""

from __future__ import annotations

import sys

from kerasdist.cli import main

if __name__ == "__main__":
    sys.exit(main())
