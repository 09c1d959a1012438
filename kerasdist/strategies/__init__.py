"""The strategies: what a user puts around a Keras script."""

from kerasdist.strategies.ring import RingStrategy

__all__ = ["RingStrategy"]
