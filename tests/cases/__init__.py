"""Training jobs that must give the same numbers on any number of workers.

A case is a function that builds a model inside `scope()`, trains it, and returns
numbers: weights, logs, evaluations, predictions. It's an ordinary Keras script: the
same function runs in one plain process and under a strategy.
"""

# Each adds its cases to CASES.
from cases import datasets, gradients, loops, losses, mixing, models  # noqa: F401
from cases.training import CASES as CASES
