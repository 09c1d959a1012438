"""The strategies: what a user puts around a Keras script.

They are imported when they are asked for: none needs what the others need.
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
