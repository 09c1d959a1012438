"""A process's role in its job: its task, its place on its host, and its leaving.

Every strategy has it, with or without replicas. How the workers are connected, and what
they compute, isn't known here.
"""

from __future__ import annotations

__all__: list[str] = []
