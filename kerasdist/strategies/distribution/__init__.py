"""`keras.distribution` on TensorFlow: which strategy a distribution stands for.

    mesh    the devices of a distribution's mesh, by worker; what can't be used
    owner   the strategy of each distribution, and its scope
    enable  the public function

What Keras calls is in `_keras.distribution`.
"""

from __future__ import annotations

__all__: list[str] = []
