"""Which layers go to which device: costs, cuts and tables, as functions of numbers.

Nothing here knows TensorFlow or Keras: costs are measured in `_keras.costs`, and a plan
is carried out in `strategies.placed`.
"""

from __future__ import annotations

__all__: list[str] = []
