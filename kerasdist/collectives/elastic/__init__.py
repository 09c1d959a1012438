"""A communicator that outlives the loss of a rank.

Each membership epoch of a job (`kerasdist.transport.membership`) is a group of its own,
connected as any other: `membership` is the agreement on its members, `groups` connects
them, `communicator` passes each collective to the present group, and `job` is all of it
together. Data and training aren't here.
"""
