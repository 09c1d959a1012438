"""What every Python process of the tests begins with; its folder is in PYTHONPATH.

Keras imports scikit-learn, matplotlib and IPython where they are installed, as they are
here for examples: a third of its import. It doesn't find them; scripts do.
"""

import gc
import sys


class _WithoutExtras:
    def find_spec(self, name, path=None, target=None):
        if name in ("IPython", "matplotlib", "pandas", "sklearn"):
            frame = sys._getframe(1)
            while frame.f_back and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            importer = str(frame.f_globals.get("__name__"))
            if importer.startswith(("keras.", "tensorflow.")):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _WithoutExtras())
# Graphs that are traced are many objects that live on: fewer collections find them.
gc.set_threshold(50_000, 20, 20)
