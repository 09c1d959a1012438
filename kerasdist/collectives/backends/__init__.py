"""How a communicator reduces: over a ring, shared memory, both, MPI, or alone."""
