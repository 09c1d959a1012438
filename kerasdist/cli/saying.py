"""What `kerasdist run` says itself."""

from __future__ import annotations

import contextlib
import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Tell the user something on standard error, whoever still reads that."""
    with contextlib.suppress(OSError):
        print(f"kerasdist run: {text}", file=sys.stderr, flush=True)
