"""An allocator that is loaded before the C library's: `--malloc`.

glibc gives the memory of large tensors back to the system when they are dropped and
takes it again in the next step, page by page. jemalloc, tcmalloc and mimalloc keep
it. What is gained depends on the model: `benchmarks/fit`.
"""

from __future__ import annotations

import ctypes.util
import os
from pathlib import Path

ALLOCATORS = ("jemalloc", "tcmalloc_minimal", "tcmalloc", "mimalloc")


def find_allocator() -> str | None:
    """Return the file name of an installed allocator, as the loader finds it."""
    for name in ALLOCATORS:
        found = ctypes.util.find_library(name)
        if found is not None:
            return found
    return None


def preloading(library: str, environ: dict[str, str]) -> dict[str, str]:
    """Return the variables that make the loader load `library` first.

    Args:
        library: A path, or a name that the loader finds.
        environ: What is set already: other libraries are loaded after it.
    """
    if os.sep in library:
        library = str(Path(library).resolve())
    others = environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library}:{others}" if others else library}
