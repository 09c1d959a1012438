"""docs/files.md says what each writer of Keras does on several workers.

A callback or a function that a new Keras brings fails here until it has been looked at.
"""

import inspect
import re
import types

import keras

from kerasdist._keras.training.callbacks import may_stop
from places import ROOT

PAGE = ROOT / "docs" / "files.md"

# They read, or their argument isn't a file of theirs.
READ = {
    *("Model.load_weights", "keras.distribution.DataParallel.get_tensor_layout"),
    *("keras.backend.get_uid", "keras.distribution.ModelParallel.get_tensor_layout"),
    *("keras.layers.TFSMLayer.__init__", "keras.models.load_model"),
    *("keras.preprocessing.image.load_img", "keras.saving.load_weights"),
    *(
        "keras.saving.KerasFileEditor.__init__",
        "keras.saving.KerasFileEditor.add_object",
    ),
    "keras.preprocessing.image_dataset_from_directory",
    "keras.preprocessing.text_dataset_from_directory",
    "keras.utils.audio_dataset_from_directory",
}
PATH = re.compile(
    r"(^|_)(path|filepath|file|fname|filename|dir|directory|folder|url|store|root)$"
    r"|^prefix$"
)


def table(heading):
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
    return [name for row in rows[2:] for name in re.findall(r"`([^`]+)`", row)]


def with_paths():
    """Public functions and methods of Keras that take a path, by their public names."""
    found = {}

    def look(name, function):
        function = getattr(function, "__func__", function)
        if not callable(function) or not hasattr(function, "__qualname__"):
            return
        try:
            names = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return
        if any(PATH.search(each) for each in names):
            key = getattr(function, "__module__", ""), function.__qualname__
            found.setdefault(key, name)

    def walk(module, name):
        for attribute in sorted(set(vars(module))):
            value = getattr(module, attribute)
            full = f"{name}.{attribute}"
            if attribute.startswith("_"):
                continue
            if isinstance(value, types.ModuleType):
                if value.__name__.startswith("keras.") and ".src" not in value.__name__:
                    walk(value, full)
            elif inspect.isclass(value):
                for method in sorted(dir(value)):
                    if method == "__init__" or not method.startswith("_"):
                        look(f"{full}.{method}", inspect.getattr_static(value, method))
            else:
                look(full, value)

    walk(keras, "keras")
    return {
        name
        for (module, _), name in found.items()
        if module.startswith("keras.") and not name.startswith("keras.callbacks.")
    }


def test_every_callback_of_keras_was_looked_at():
    public = [
        name
        for name in dir(keras.callbacks)
        if inspect.isclass(getattr(keras.callbacks, name))
    ]
    assert table("Keras's callbacks") == sorted(public, key=str.lower)


def test_everything_in_keras_that_takes_a_path_was_looked_at():
    known = [*table("What writes files"), *READ]
    unknown = []
    for name in sorted(with_paths()):
        # A method stands in the table once, whichever subclass overrides it.
        owner_and_name = ".".join(name.split(".")[-2:])
        last = name.rsplit(".", 1)[-1]
        if last in ("save_own_variables", "load_own_variables", "load_assets"):
            continue
        if last == "save_assets" or name.startswith("keras.datasets."):
            continue
        alias = name.replace("keras.models.save_model", "keras.saving.save_model")
        alias = alias.replace("preprocessing.image.save_img", "utils.save_img")
        if alias not in known and owner_and_name not in known:
            unknown.append(name)
    assert unknown == []


def test_a_lambda_may_stop_the_training_after_a_batch():
    """It is an attribute of the callback: a stop on one rank wasn't agreed on."""
    assert may_stop(keras.callbacks.LambdaCallback(on_train_batch_end=print))
    assert not may_stop(keras.callbacks.LambdaCallback(on_epoch_end=print))
    assert may_stop(keras.callbacks.TerminateOnNaN())
