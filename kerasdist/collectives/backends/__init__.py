"""The backends of a communicator: ring, shared memory, both, MPI, or one worker.

Each is a `Communicator` that moves and adds up arrays. The base class, in
`collectives.checked`, checks and numbers the calls and keeps their deadlines.
"""
