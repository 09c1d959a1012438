"""How samples are divided: over the workers, their replicas, and an epoch's steps.

Whether the workers' data are the same, and what is done if not, is in
`strategies.chief_data`.
"""
