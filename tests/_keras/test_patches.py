"""The tables of what is wrapped in Keras and TensorFlow, and how that is done.

`PYTHONPATH=tests/support python tests/_keras/test_patches.py` writes the tables into
CONTRIBUTING.md.
"""

import inspect
import pickle
import pkgutil
import re

import keras
import pytest
from keras.src.losses import loss
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils
from tensorflow.python.eager import backprop

import kerasdist
from kerasdist import _keras, errors
from kerasdist._keras import patches as of_keras
from kerasdist._tf import patches as of_tensorflow
from kerasdist._tf.patching import Patch, Patcher
from kerasdist._version import range_in_words
from places import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
TABLES = {"kerasdist._keras": of_keras.TABLE, "kerasdist._tf": of_tensorflow.TABLE}
ROWS = [
    pytest.param(package, row, id=row.hook)
    for package, table in TABLES.items()
    for row in table
]


def names(function):
    return list(inspect.signature(function).parameters)


# The tables.


@pytest.mark.parametrize(("package", "row"), ROWS)
def test_a_hook_takes_what_its_targets_are_given(package, row):
    hook = pkgutil.resolve_name(f"{package}.{row.hook}")
    for target in row.targets:
        if row.adds:
            # A method of a class takes itself; a module's function what it wants to.
            methods = target.rpartition(".")[0].rpartition(".")[2][:1].isupper()
            assert len(names(hook)) == 1 or not methods
            continue
        known = [x.strip() for x in target.partition("(")[2].rstrip(")").split(",")]
        more = "..." in known
        given = known[: known.index("...")] if more else known
        inspect.signature(hook).bind(None, *given)
        kinds = {p.kind for p in inspect.signature(hook).parameters.values()}
        # Who hands parameters on without knowing them takes all that there are.
        assert more <= (inspect.Parameter.VAR_KEYWORD in kinds)


# The page.


def page_tables() -> str:
    parts = []
    for name, package in zip(("Keras", "TensorFlow"), TABLES, strict=True):
        lines = [
            f"| of {name} | what the hook does | for | hook |",
            "| --- | --- | --- | --- |",
        ]
        for row in TABLES[package]:
            paths = [target.partition("(")[0] for target in row.targets]
            does = pkgutil.resolve_name(f"{package}.{row.hook}").__doc__
            does = re.sub(r"^Replace .*?: ", "", does.partition("\n")[0].rstrip("."))
            does = does[0].lower() + does[1:]
            lines.append(f"| {_short(paths)} | {does} | {row.feature} | `{row.hook}` |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _short(paths: list[str]) -> str:
    """Functions by class and name; several of one class are put together."""
    grouped: dict[str, list[str]] = {}
    for path in paths:
        *_, owner, name = re.sub(r"\{(.*?),.*?\}", r"\1", path).split(".")
        if name.endswith("="):
            name = f"{name[:-1]} = ..."
        key = f"{owner}." if owner[0].isupper() else ""
        if name not in grouped.setdefault(key, []):
            grouped[key].append(name)
    return "; ".join(
        f"`{key}{found[0]}`"
        if len(found) == 1
        else f"`{key.rstrip('.')}`: " * bool(key) + ", ".join(f"`{n}`" for n in found)
        for key, found in grouped.items()
    )


_MADE = re.compile(r"^\| of Keras \|.*?\n(?=\n[^|])", re.MULTILINE | re.DOTALL)


def test_the_page_has_the_tables():
    found = _MADE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == page_tables(), (
        "run `PYTHONPATH=tests/support python tests/_keras/test_patches.py`"
    )


# What is refused.


def test_a_keras_that_lacks_something_is_refused_in_words(monkeypatch):
    """Once an AttributeError, with Keras half wrapped; a second try wrapped it twice.

    All that doesn't fit is named at once, and nothing has been touched.
    """
    _keras.uninstall()
    of_tensorflow.uninstall()
    call = keras.layers.Layer.__call__
    monkeypatch.delattr(seed_generator.SeedGenerator, "next")
    monkeypatch.setattr(
        compile_utils.CompileLoss, "call", lambda this, y_true, y_pred: None
    )
    monkeypatch.setattr(
        loss, "apply_mask", lambda sample_weight, mask, dtype, reduction, new=0: None
    )
    with pytest.raises(errors.IncompatibleKerasError) as caught:
        kerasdist.RingStrategy(["CPU:0"])
    text = str(caught.value)
    assert f"Received: Keras {keras.__version__}, where " in text
    assert "seed_generator.SeedGenerator.next is missing" in text
    assert "CompileLoss.call has the parameters (this, y_true, y_pred)" in text
    assert (
        "apply_mask has the parameters (sample_weight, mask, dtype, reduction, new), "
        "expected (sample_weight, mask, dtype, reduction)" in text
    )
    assert len(caught.value.faults) == 3
    assert f"Expected Keras {range_in_words('keras')}." in text
    assert keras.layers.Layer.__call__ is call
    monkeypatch.delattr(backprop, "_aggregate_grads")
    with pytest.raises(
        errors.IncompatibleTensorFlowError,
        match=r"_aggregate_grads is missing\. Expected TensorFlow 2\.",
    ):
        of_tensorflow.check()


def test_another_backend_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match=r"^Strategies of .* TensorFlow\. .* 'jax'\. "):
        kerasdist.RingStrategy(["CPU:0"])


# How it's done.


class Owner:
    def __init__(self):
        self._rate = 1

    def method(self, x, *, y=2):
        """Say something."""
        return x, y

    def inherited(self):
        return "original"

    @property
    def rate(self):
        return self._rate

    @rate.setter
    def rate(self, value):
        self._rate = value


class Derived(Owner):
    """It has nothing of its own."""


def outer(original, *args, **kwargs):
    return "outer", original(*args, **kwargs)


def inner(original, *args, **kwargs):
    return "inner", original(*args, **kwargs)


def double(original, owner, value):
    original(owner, 2 * value)


def added(owner):
    return "added"


def row(hook, *targets, **more):
    targets = tuple(f"{__name__}.{target}" for target in targets)
    return Patch(hook=hook, targets=targets, **{"feature": "a", **more})


def patcher(*rows):
    return Patcher(__name__, rows, errors.KerasDistError)


def test_hooks_are_put_around_each_other_in_order_and_taken_out_again():
    before = dict(vars(Owner)), dict(vars(Derived))
    hooks = patcher(
        row("inner", "Owner.method(self, x, *, y)"),
        row("outer", "Owner.method(self, ...)", "Derived.inherited(self)"),
        row("double", "Owner.rate=(self, value)"),
        row("added", "Owner.__float__", feature="b", adds=True),
        row("added", "Owner.inherited", feature="b", adds=True),
    )
    hooks.install("a")
    hooks.install("a")
    owner = Derived()
    assert owner.method(1, y=3) == ("outer", ("inner", (1, 3)))
    assert Owner.method(owner, 1) == ("outer", ("inner", (1, 2)))
    assert super(Derived, owner).method(1) == owner.method(1)
    assert owner.inherited() == ("outer", "original")
    assert Owner().inherited() == "original"
    owner.rate = 2
    assert owner.rate == 4
    assert not hasattr(owner, "__float__")
    hooks.install()
    assert owner.__float__() == "added"
    assert Owner().inherited() == "original"
    hooks.uninstall()
    assert (dict(vars(Owner)), dict(vars(Derived))) == before


def test_what_others_have_replaced_keeps_its_parameters(monkeypatch):
    """Tools that follow experiments wrap `fit`, not all of them with its signature."""

    def hook(original, owner, *args, **kwargs):
        return inspect.signature(original).bind(owner, *args, **kwargs).arguments["x"]

    monkeypatch.setitem(globals(), "hook", hook)

    def replaced(*args, **kwargs):
        return None

    replaced.__module__ = "tracker"
    derived = type("Replaced", (Owner,), {"method": replaced})
    monkeypatch.setitem(globals(), "Replaced", derived)
    hooks = patcher(row("hook", "Replaced.method(self, x, ...)"))
    hooks.install()
    assert derived().method(3, y=4) == 3
    hooks.uninstall()
    monkeypatch.setattr(Owner, "method", replaced)
    hooks = patcher(row("hook", "Owner.method(self, x, ...)"))
    with pytest.raises(errors.KerasDistError) as caught:
        hooks.install()
    assert caught.value.args[0] == [
        f"{__name__}.Owner.method has the parameters (*args, **kwargs), expected "
        "(self, x, ...) (`tracker` has replaced it, and must use `functools.wraps`)"
    ]


class Doubled(keras.layers.Layer):
    """A layer without a constructor of its own."""


def test_what_is_wrapped_looks_as_before_and_can_be_pickled(tmp_path):
    """Once `Layer.__init__` was seen as (*args, **kwargs), without a `self`.

    Keras takes the names of a layer's arguments from there, and failed with "list index
    out of range" where a layer had no constructor of its own; so did whatever saves
    weights, as `BackupAndRestore`: it makes a bare `Layer` to know its attributes.
    """
    _keras.install("placement")
    assert names(keras.layers.Layer.__init__)[0] == "self"
    assert Doubled(name="twice").name == "twice"
    model = keras.Sequential([keras.Input((3,)), Doubled()])
    model.save_weights(tmp_path / "model.weights.h5")
    for function in (keras.Model.fit, keras.layers.Layer.__call__):
        assert pickle.loads(pickle.dumps(function)) is function


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_MADE.sub(lambda found: page_tables(), text), encoding="utf-8")
