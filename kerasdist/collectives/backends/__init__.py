"""How a communicator reduces: over a ring, shared memory, both, MPI, or alone.

Each is a `Communicator` that moves and adds up arrays. Checks, numbers and deadlines of
the calls are those of the base class, in `collectives.communicator`.
"""
