# In a checkout type checkers find callbacks/ only beside this package.
from kerasdist import callbacks as callbacks  # type: ignore[attr-defined, unused-ignore]
from kerasdist import errors as errors
from kerasdist import layers as layers
from kerasdist._keras.unscoped_models import local_training as local_training
from kerasdist._version import TESTED_VERSIONS as TESTED_VERSIONS
from kerasdist._version import __version__ as __version__
from kerasdist.collectives.communicator import Communicator as Communicator
from kerasdist.compression import Factors as Factors
from kerasdist.compression import PowerSGD as PowerSGD
from kerasdist.compression import TopK as TopK
from kerasdist.errors import KerasDistError as KerasDistError
from kerasdist.errors import WorkerLost as WorkerLost
from kerasdist.placement.plan import Plan as Plan
from kerasdist.run_function.run import predict as predict
from kerasdist.run_function.run import run as run
from kerasdist.strategies.distribution import (
    enable_keras_distribution as enable_keras_distribution,
)
from kerasdist.strategies.local_steps import LocalSteps as LocalSteps
from kerasdist.strategies.model_parallel import (
    ModelParallelStrategy as ModelParallelStrategy,
)
from kerasdist.strategies.model_parallel import plan as plan
from kerasdist.strategies.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from kerasdist.strategies.placed.report import PlacementReport as PlacementReport
from kerasdist.strategies.ring import RingStrategy as RingStrategy
