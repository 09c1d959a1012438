"""Division of samples among the workers, their replicas, and an epoch's steps.

Whether the workers' data are the same, and the choice if not, is in
`strategies.chief_data`.
"""
