"""Keras callbacks that know about the other workers.

The folder stands beside the package in the repository and is installed as
`kerasdist.callbacks`. It is empty so far: a strategy needs no callback of its
own to train, and Keras's own callbacks work unchanged.
"""

from __future__ import annotations

__all__: list[str] = []
