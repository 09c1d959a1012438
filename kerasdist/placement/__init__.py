"""Which layers go to which device: costs, cuts and tables, as functions of numbers.

    patterns.py     patterns of layer paths, and the device that each stands for
    costs.py        what each layer costs, and the tensors between layers
    partition.py    the cut with the fastest slowest stage that fits the memory
    plan.py         a plan: from layers to devices
    advice.py       what would fit, when nothing does
    table.py        the tables that are printed

Nothing here knows TensorFlow or Keras.
"""

from __future__ import annotations

__all__: list[str] = []
