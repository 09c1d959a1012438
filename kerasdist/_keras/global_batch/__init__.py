"""The numbers of the global batch, in steps that see one replica's rows.

Losses, gradients, metrics and what layers keep are those of one process, whatever the
replicas' parts of the rows are.
"""
