"""The version of kerasdist: the one place where it is written."""

__all__ = ["__version__"]

__version__ = "0.1.0"
