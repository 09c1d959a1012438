"""Connections between the processes of a job, and what is sent over them.

The modules here move bytes, by sockets and shared memory. Their format is in
`framing`; connections are made in `rendezvous`; the end of a process is
detected in `liveness`; `log` writes lines without blocking. Reductions are in
`kerasdist.collectives`.
"""
