"""Division of samples among the workers, their replicas, and an epoch's steps.

Also the comparison of the workers' data, and the chief's on all workers if they differ.
"""
