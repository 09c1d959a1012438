"""What every Python process of the tests begins with; its folder is in PYTHONPATH.

Keras and TensorFlow import scikit-learn, matplotlib and IPython where these are
installed, as they are here for examples and pictures: half of what the import takes.
Those two don't find them. A script that imports them does.
"""

import gc
import sys
from collections.abc import Sequence

_EXTRAS = {"IPython", "matplotlib", "pandas", "sklearn"}
_IMPORTERS = {"keras", "tensorflow"}


class _WithoutExtras:
    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None):
        if name in _EXTRAS:
            frame = sys._getframe(1)
            while frame and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            importer = str(frame.f_globals.get("__name__")) if frame else ""
            if importer.partition(".")[0] in _IMPORTERS:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, _WithoutExtras())
# Graphs that are traced are many objects that live on: fewer collections find them.
gc.set_threshold(10_000, 20, 20)
