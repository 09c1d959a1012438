"""Train Keras 3 models on more than one device or machine with TensorFlow.

    import kerasdist

    strategy = kerasdist.RingStrategy()      # or ParameterServerStrategy()
    with strategy.scope():
        model = build_model()
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=256)          # batch_size is that of the global batch

    $ kerasdist run -n 4 train.py            # four workers on this machine

    results = kerasdist.run(train, n=4)      # the same from Python, and from a notebook

Imports inside the package go one way, from left to right and down:

    cli > callbacks > functions, strategies > layers > _keras, _tf > server,
        prediction, collectives, placement > transport > cluster > errors

`tests/package/test_layers.py` enforces it. What is right of `_keras` and `_tf` works
without TensorFlow; so does importing this module: strategies, and the callbacks above
it, are loaded when first asked for.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerasdist import errors
from kerasdist._version import TESTED_VERSIONS, __version__
from kerasdist.errors import KerasDistError, WorkerLost
from kerasdist.transport import log as _default_handler

# For readers of the source; type checkers read `__init__.pyi`, because a module with
# `__getattr__` has any name for them.
if TYPE_CHECKING:
    from kerasdist import layers
    from kerasdist._keras.unscoped_models import local_training
    from kerasdist.collectives.communicator import Communicator
    from kerasdist.compression import Factors, PowerSGD, TopK
    from kerasdist.placement.plan import Plan
    from kerasdist.run_function.run import predict, run
    from kerasdist.strategies.distribution import enable_keras_distribution
    from kerasdist.strategies.local_steps import LocalSteps
    from kerasdist.strategies.model_parallel import ModelParallelStrategy, plan
    from kerasdist.strategies.parameter_server import ParameterServerStrategy
    from kerasdist.strategies.placed.report import PlacementReport
    from kerasdist.strategies.ring import RingStrategy

__all__ = [
    "TESTED_VERSIONS",
    "Communicator",
    "Factors",
    "KerasDistError",
    "LocalSteps",
    "ModelParallelStrategy",
    "ParameterServerStrategy",
    "PlacementReport",
    "Plan",
    "PowerSGD",
    "RingStrategy",
    "TopK",
    "WorkerLost",
    "__version__",
    "enable_keras_distribution",
    "errors",
    "layers",
    "local_training",
    "plan",
    "predict",
    "run",
]

_LAZY = {
    "Communicator": "kerasdist.collectives.communicator",
    "Factors": "kerasdist.compression",
    "LocalSteps": "kerasdist.strategies.local_steps",
    "ModelParallelStrategy": "kerasdist.strategies.model_parallel",
    "ParameterServerStrategy": "kerasdist.strategies.parameter_server",
    "PlacementReport": "kerasdist.strategies.placed.report",
    "Plan": "kerasdist.placement.plan",
    "PowerSGD": "kerasdist.compression",
    "RingStrategy": "kerasdist.strategies.ring",
    "TopK": "kerasdist.compression",
    "enable_keras_distribution": "kerasdist.strategies.distribution",
    "local_training": "kerasdist._keras.unscoped_models",
    "plan": "kerasdist.strategies.model_parallel",
    "predict": "kerasdist.run_function.run",
    "run": "kerasdist.run_function.run",
}

# In a checkout callbacks/ stands beside this package. Python that is started in a
# checkout's folder imports the checkout, whatever is installed.
_here = Path(__file__).parent
_beside = _here.parent
_mark = _beside / "callbacks" / "job_view.py"
if not (_here / "callbacks").is_dir() and _mark.is_file():
    __path__.append(str(_beside))


_default_handler.configure()


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "layers"):
        # `kerasdist.callbacks.ScaleLearningRate` needs no import of its own.
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "callbacks", "layers"})
