"""A communicator that outlives the loss of a rank.

Each membership epoch of a job (`epochs`) is a group of its own, connected as any other.
`consensus` and `agreement` decide on its members, `groups` connects them,
`communicator` passes each collective to the present group, and `job` is all of it
together. Data and training aren't here.
"""
