"""`--json`: one JSON document on standard output, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from kerasdist._version import __version__
from kerasdist.cli.parser import UsageError


@contextlib.contextmanager
def json_document(command: str) -> Iterator[dict[str, Any]]:
    """Print one JSON document on standard output after the block.

    What is printed inside the block, by a user's script or by libraries, goes to
    standard error. An exception that ends the block is described in the document, and
    raised: messages on standard error and the exit code are those without `--json`.

    Args:
        command: The name of the command, for the document.

    Yields:
        The document, with the keys that all documents have: the command adds its own,
        and sets "ok".
    """
    document: dict[str, Any] = {
        "command": command,
        "kerasdist": __version__,
        "ok": False,
        "error": None,
    }
    try:
        with output_to_errors():
            yield document
    except BaseException as error:
        document["ok"] = False
        text = error.message if isinstance(error, UsageError) else str(error)
        document["error"] = {"type": type(error).__name__, "message": text}
        raise
    finally:
        # A number that JSON doesn't have is a fault here, not in who reads it.
        print(json.dumps(document, indent=2, allow_nan=False), flush=True)


@contextlib.contextmanager
def output_to_errors() -> Iterator[None]:
    """Redirect standard output to standard error, also that of libraries in C."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)
