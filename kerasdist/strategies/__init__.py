"""The strategies: what a user puts around a Keras script."""

from kerasdist.strategies.parameter_server import ParameterServerStrategy
from kerasdist.strategies.ring import RingStrategy

__all__ = ["ParameterServerStrategy", "RingStrategy"]
