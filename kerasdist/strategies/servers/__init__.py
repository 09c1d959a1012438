"""A parameter-server job around its workers' strategies: arguments, servers, events.

The servers themselves are in `kerasdist.ps`; what workers compute is in `sync` and
`asynchronous`.
"""

from __future__ import annotations

__all__: list[str] = []
