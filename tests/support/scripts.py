"""What scripts of workers that train begin with: imports, and small functions."""

from __future__ import annotations

__all__ = ["PRELUDE"]

PRELUDE = """
import contextlib, hashlib, json, os, signal, sys, time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import kerasdist

def logical_devices(count):
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * count)

def result(value):
    # In one piece: another thread may say meanwhile that somebody was lost.
    sys.stdout.write("\\nRESULT " + json.dumps(value) + "\\n")
    sys.stdout.flush()

def error_of(call):
    "The kind and the text of what it raises, or None."
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]

def refused(call):
    "The text of what it raises."
    return (error_of(call) or [None, None])[1]
"""
