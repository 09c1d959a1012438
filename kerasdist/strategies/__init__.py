"""The strategies, each a room for a part of distributed training.

Their modules are imported on request: none needs what the others need.
The three classes are here, and what more than one room uses. The rooms:

`sync` is the base of strategies in step, `asynchronous` that of workers that don't wait
for each other; `reduce` has the way of a gradient, `data` that of samples; `placed` has
layers on devices, `native` TensorFlow's own collectives, and `measure` the times of
steps.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kerasdist.strategies.model_parallel import ModelParallelStrategy
    from kerasdist.strategies.parameter_server import ParameterServerStrategy
    from kerasdist.strategies.ring import RingStrategy

__all__ = ["ModelParallelStrategy", "ParameterServerStrategy", "RingStrategy"]

_MODULES = {
    "ModelParallelStrategy": "kerasdist.strategies.model_parallel",
    "ParameterServerStrategy": "kerasdist.strategies.parameter_server",
    "RingStrategy": "kerasdist.strategies.ring",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
