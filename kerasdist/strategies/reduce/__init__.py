"""The way of a gradient from a replica to all workers, and back.

Also the state that workers must have in common (`initial_state`, `consensus`). Arrays
are reduced by `kerasdist.collectives`.
"""
