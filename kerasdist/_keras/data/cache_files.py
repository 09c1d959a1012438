"""Files of `Dataset.cache(filename)`: each rank its own.

Ranks of one folder would write to the same file, which TensorFlow refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

_ranks: list[int] = []


def note_rank(rank: int) -> None:
    """Note this process's rank in the job that it has joined last."""
    _ranks[:] = [rank]


def cache(
    original: Callable[..., Any], dataset: Any, filename: Any = "", name: Any = None
) -> Any:
    """Replace `Dataset.cache`: append the rank to the file's name, but rank 0's."""
    rank = _ranks[0] if _ranks else 0
    if rank and not (isinstance(filename, str) and not filename):
        filename = tf.strings.join([filename, f".rank-{rank}"])
    return original(dataset, filename, name)
