"""Copies of variables as they were at the beginning of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from kerasdist import _tf


class Shadow:
    """The values that variables had at the beginning of a step, to restore them.

    A value shares its memory with the variable until the variable is overwritten, which
    makes TensorFlow write to other memory instead of the same.
    """

    def __init__(self) -> None:
        # By identity: variables can't be compared. Each with its copy.
        self._kept: dict[int, tuple[Any, Any]] = {}

    def save(self, variables: Sequence[Any]) -> list[Any]:
        """Keep the values, in a step's graph or eagerly.

        Args:
            variables: TensorFlow's variables, each on one device.

        Returns:
            Operations that the step must wait for: one that has failed could have
            overwritten a variable that isn't kept yet.
        """
        operations = []
        for variable in variables:
            if id(variable) not in self._kept:
                kept = _tf.variable_of_any_shape(variable.dtype, variable.device)
                self._kept[id(variable)] = variable, kept
            with tf.device(variable.device):
                kept = self._kept[id(variable)][1]
                done = kept.assign(variable.read_value(), read_value=False)
            if done is not None:
                operations.append(done)
        return operations

    def restore(self, variables: Sequence[Any]) -> None:
        """Give variables the values that `save` has kept, eagerly."""
        for variable in variables:
            with tf.device(variable.device):
                variable.assign(self._kept[id(variable)][1].read_value())
