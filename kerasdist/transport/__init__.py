"""Connections between the processes of a job, and what is sent over them.

The modules here move bytes: by sockets, shared memory or, in tests, plain memory. What
the bytes mean is in `wire`; how connections begin is in `rendezvous`; how the end of a
process is noticed is in `liveness`; `log` writes lines that nothing may hold up.
Reductions are in `kerasdist.collectives`.
"""

from kerasdist.transport.timeouts import Timeouts

__all__ = ["Timeouts"]
