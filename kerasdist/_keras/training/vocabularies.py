"""The check that all workers look up the same words.

A vocabulary that a script makes of a `set` has another order in each process, unless
all have the same PYTHONHASHSEED.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kerasdist._keras.protocols import KerasHooks


def check_vocabularies(trainer: Any, hooks: KerasHooks) -> None:
    """Check the lookup layers before the first step; all workers call it alike.

    Raises:
        ValueError: The workers' vocabularies differ. All workers raise it.
    """
    mine = {
        layer.name: _digest(layer.get_vocabulary())
        for layer in trainer._flatten_layers()
        if callable(getattr(layer, "get_vocabulary", None))
    }
    if not mine:
        return
    texts = hooks.consensus.texts(json.dumps(mine))
    every = {rank: json.loads(text) for rank, text in texts.items()}
    first = every[min(every)]
    layers = sorted({n for each in every.values() for n in each if each != first})
    differing = [
        name
        for name in layers
        if any(e.get(name) != first.get(name) for e in every.values())
    ]
    if differing:
        ranks = [rank for rank, each in sorted(every.items()) if each != first]
        raise ValueError(
            "The workers look up words in different vocabularies. Received: the layers "
            f"{differing} of ranks {ranks} have other words, or another order, than "
            f"rank {min(every)}'s. Give all workers the same list: sort it "
            "(`sorted(set(words))`; the order of a `set` differs between processes). "
            "Or set the environment variable PYTHONHASHSEED to one number on all "
            "workers, as `kerasdist run` does."
        )


def _digest(words: Any) -> str:
    return hashlib.sha256(json.dumps(list(words), default=str).encode()).hexdigest()
