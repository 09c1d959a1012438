"""Imports go one way, and each foreign package comes in at one place.

The layers, upper first; a module may import its own layer and those below:

    cli            kerasdist.cli, kerasdist.__main__
    callbacks      kerasdist.callbacks
    facade         kerasdist (its `__init__`): what is below only when asked for
    functions      kerasdist.run_function
    strategies     kerasdist.strategies
    layers         kerasdist.layers
    compression    kerasdist.compression
    keras seam     kerasdist._keras          alone imports keras.src
    tf seam        kerasdist._tf             alone imports tensorflow.python
    mechanism      kerasdist.collectives, .ps, .placement
    transport      kerasdist.transport
    cluster        kerasdist.cluster
    errors         kerasdist.errors

Inside a layer no module and no room (folder) imports one that imports it, type-checking
imports included. From `mechanism` down nothing imports TensorFlow or Keras.
`kerasdist._version` and `._tested` are below everything. `check` finds what breaks this
in a folder; the tests show first that it can.
"""

from __future__ import annotations

import ast
import collections
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from places import ROOT
from workers import output_of

# Lowest first.
LAYERS = [
    ("version", {"kerasdist._version", "kerasdist._tested"}),
    ("errors", {"kerasdist.errors"}),
    ("cluster", {"kerasdist.cluster"}),
    ("transport", {"kerasdist.transport"}),
    (
        "mechanism",
        {"kerasdist.collectives", "kerasdist.parameter_server", "kerasdist.placement"},
    ),
    ("tf seam", {"kerasdist._tf"}),
    ("keras seam", {"kerasdist._keras"}),
    ("compression", {"kerasdist.compression"}),
    ("layers", {"kerasdist.layers"}),
    ("strategies", {"kerasdist.strategies"}),
    ("functions", {"kerasdist.run_function"}),
    ("facade", {"kerasdist"}),
    ("callbacks", {"kerasdist.callbacks"}),
    ("cli", {"kerasdist.cli", "kerasdist.__main__"}),
]
NAMES = [name for name, _ in LAYERS]
FRAMEWORKS = {"tensorflow", "keras"}
# Of a folder: its modules beside `__init__`, and the lines of its docstring.
MOST_MODULES, MOST_LINES = 15, 15
MOST_LINES_OF_A_MODULE = 700
# Where each name of a framework may be imported, and the layer that may.
SEAMS = {"tensorflow.python": "tf seam", "keras.src": "keras seam"}


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        name: Its absolute name.
        line: The line of the import.
        when: `"eager"`; `"lazy"` inside a function; `"types"` for a type checker
            only.
    """

    name: str
    line: int
    when: str


def layer_of(module: str) -> str | None:
    """The layer of a module of ours; None if it is in none."""
    for layer, packages in LAYERS:
        if module in packages:
            return layer
        if layer != "facade" and any(module.startswith(f"{p}.") for p in packages):
            return layer
    return None


def modules_in(root: Path) -> dict[str, Path]:
    """From module name to file, as they are installed from the folder `root`."""
    found = {}
    for folder, package in [("kerasdist", "kerasdist"), ("callbacks", "kerasdist")]:
        for path in sorted((root / folder).rglob("*.py")):
            parts = list(path.relative_to(root).with_suffix("").parts)
            if folder == "callbacks":
                parts.insert(0, package)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


def imports_of(module: str, source: str, *, is_package: bool) -> Iterator[Import]:
    """Every import of a module, also inside functions and `TYPE_CHECKING`.

    `from a import b` yields `a.b`: the caller knows whether that is a module.
    Also `importlib.import_module("a.b")`, `keras.src` and `tf.python` as
    attributes count.
    """
    package = module if is_package else module.rpartition(".")[0]
    aliases: dict[str, str] = {}

    def visit(node: ast.AST, when: str) -> Iterator[Import]:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.asname or "." not in alias.name:
                        aliases[alias.asname or alias.name] = alias.name
                    yield Import(alias.name, node.lineno, when)
            case ast.ImportFrom(module=base, names=names, level=level):
                if level:
                    above = package.split(".")
                    above = above[: len(above) - level + 1]
                    base = ".".join([*above, *filter(None, [base])])
                for alias in names:
                    aliases[alias.asname or alias.name] = f"{base}.{alias.name}"
                    yield Import(f"{base}.{alias.name}", node.lineno, when)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, node.lineno, when)
            case ast.Attribute(value=ast.Name(id=owner), attr=attr):
                name = f"{aliases.get(owner, '')}.{attr}"
                if name in SEAMS:
                    yield Import(name, node.lineno, when)
            case ast.If(test=test) if "TYPE_CHECKING" in ast.dump(test):
                when = "types"
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                when = "lazy"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    yield from visit(ast.parse(source), "eager")


def check(root: Path) -> list[str]:
    """What breaks the rules below `root`, one line each, sorted."""
    modules = modules_in(root)
    faults: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        source = path.read_text(encoding="utf-8")
        found = set(imports_of(module, source, is_package=path.name == "__init__.py"))
        where = path.relative_to(root)
        layer = layer_of(module)
        if layer is None:
            faults.append(f"{where}:1: {module} is in no layer")
            continue
        graph[module] = set()
        for imported in found:
            target = _ours(imported.name, modules)
            if target is not None:
                # Also what only a type checker reads: who understands a module must
                # understand those whose types it names.
                graph[module].add(target)
                fault = _direction(layer, target, imported)
            else:
                fault = _framework(layer, imported)
            if fault:
                faults.append(f"{where}:{imported.line}: {fault}")
        public = path.name == "__init__.py" or module == "kerasdist.errors"
        faults += [f"{where}:{line}: {what}" for line, what in _style(source, public)]
    faults += [f"import cycle: {' > '.join(cycle)}" for cycle in _cycles(graph)]
    between = _between_rooms(graph, modules)
    faults += [f"cycle of rooms: {' > '.join(cycle)}" for cycle in _cycles(between)]
    return sorted(faults)


def _between_rooms(
    graph: dict[str, set[str]], modules: dict[str, Path]
) -> dict[str, set[str]]:
    """Which room imports which; a room and those inside of it aren't compared."""

    def room(module: str) -> str:
        is_package = modules[module].name == "__init__.py"
        return module if is_package else module.rpartition(".")[0]

    between: dict[str, set[str]] = {}
    for module, targets in graph.items():
        mine = room(module)
        for other in (room(target) for target in targets):
            if not f"{mine}.".startswith(f"{other}.") and not f"{other}.".startswith(
                f"{mine}."
            ):
                between.setdefault(mine, set()).add(other)
    return between


def _ours(name: str, modules: dict[str, Path]) -> str | None:
    """The module of ours that an import of `name` loads."""
    if name.partition(".")[0] != "kerasdist":
        return None
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name


def _direction(layer: str, target: str, imported: Import) -> str | None:
    below = layer_of(target)
    if below is None:
        return f"imports {target}, which is in no layer"
    if NAMES.index(below) > NAMES.index(layer):
        return f"{layer} imports {imported.name}, of the layer {below} above it"
    if (
        layer == "facade"
        and imported.when == "eager"
        and below in ("functions", "strategies", "layers", "keras seam", "tf seam")
    ):
        return f"kerasdist imports {imported.name} eagerly, which needs TensorFlow"
    return None


def _framework(layer: str, imported: Import) -> str | None:
    name = imported.name
    if name.partition(".")[0] not in FRAMEWORKS:
        return None
    if NAMES.index(layer) < NAMES.index("tf seam"):
        return f"{layer} imports {name}; it must work without TensorFlow and Keras"
    if layer == "facade" and imported.when == "eager":
        return f"kerasdist imports {name} eagerly"
    for internal, seam in SEAMS.items():
        if f"{name}.".startswith(f"{internal}.") and layer != seam:
            return f"{layer} imports {name}; only the {seam} may"
    return None


def _style(source: str, public: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id == "__all__" and not public:
            yield node.lineno, "`__all__` is for packages: they say what is public"
        if isinstance(node, ast.Assert):
            yield node.lineno, "assert in library code; `python -O` removes it"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"


def _cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """One cycle through each module that begins one, by depth-first search."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> Iterator[list[str]]:
        if module in path:
            yield [*path[path.index(module) :], module]
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                yield from visit(target, [*path, module])
            done.add(module)

    for module in sorted(graph):
        yield from visit(module, [])


def rooms(root: Path) -> list[str]:
    """The folders that are too full, or don't say in a few lines what they hold."""
    faults = []
    for path in modules_in(root).values():
        if path.name != "__init__.py":
            continue
        folder = path.parent.relative_to(root)
        count = sum(1 for each in path.parent.glob("*.py") if each != path)
        if count > MOST_MODULES:
            faults.append(f"{folder} has {count} modules")
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if not doc:
            faults.append(f"{folder} has no docstring")
        elif folder != Path("kerasdist") and len(doc.splitlines()) > MOST_LINES:
            faults.append(
                f"{folder} says what it holds in {len(doc.splitlines())} lines"
            )
    return faults


# The checker finds what it is there for.


@pytest.fixture
def package(tmp_path):
    """Writes files below a folder; `{}` is a package without faults."""

    def write(files: dict[str, str]) -> Path:
        empty = ["__init__", "errors", "cluster", "_tf", "_keras", "_version"]
        empty += [
            f"{name}/__init__"
            for name in ("transport", "collectives", "strategies", "cli")
        ]
        paths = {f"kerasdist/{name}.py": "" for name in empty}
        paths["callbacks/__init__.py"] = ""
        for name, text in {**paths, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        (
            "kerasdist/transport/tcp.py",
            "def f():\n    from ..collectives import ring",
            "2: transport imports kerasdist.collectives.ring, of the layer mechanism",
        ),
        (
            "kerasdist/transport/tcp.py",
            "from kerasdist import RingStrategy",
            "1: transport imports kerasdist.RingStrategy, of the layer facade above",
        ),
        (
            "kerasdist/collectives/ring.py",
            "from kerasdist import _tf",
            "1: mechanism imports kerasdist._tf, of the layer tf seam above it",
        ),
        (
            "kerasdist/_keras.py",
            "if TYPE_CHECKING:\n    from kerasdist.strategies import base",
            "2: keras seam imports kerasdist.strategies.base, of the layer strategies",
        ),
        (
            "kerasdist/strategies/ring.py",
            "import importlib\nimportlib.import_module('kerasdist.callbacks')",
            "2: strategies imports kerasdist.callbacks, of the layer callbacks above",
        ),
        (
            "kerasdist/__init__.py",
            "from kerasdist.strategies import base",
            "1: kerasdist imports kerasdist.strategies.base eagerly, which needs Tens",
        ),
        (
            "kerasdist/cluster.py",
            "def f():\n    import tensorflow.config",
            "2: cluster imports tensorflow.config; it must work without TensorFlow",
        ),
        (
            "kerasdist/strategies/ring.py",
            "from tensorflow.python.framework import ops",
            "1: strategies imports tensorflow.python.framework.ops; only the tf seam",
        ),
        (
            "kerasdist/strategies/ring.py",
            "import tensorflow as tf\ntf.python.ops",
            "2: strategies imports tensorflow.python; only the tf seam may",
        ),
        (
            "callbacks/lr.py",
            "from keras.src import callbacks",
            "1: callbacks imports keras.src.callbacks; only the keras seam may",
        ),
        ("kerasdist/util.py", "", "1: kerasdist.util is in no layer"),
        ("kerasdist/cli/run.py", "__all__ = []", "1: `__all__` is for packages"),
        (
            "kerasdist/cli/run.py",
            "def f(x):\n    assert x",
            "2: assert in library code",
        ),
        (
            "callbacks/lr.py",
            "try:\n    pass\nexcept:\n    pass",
            "3: bare except",
        ),
    ],
)
def test_each_fault_is_found(package, file, source, fault):
    (found,) = check(package({file: source}))
    assert found.startswith(f"{file}:{fault}")


# What it is there for.


def test_the_library_keeps_the_rules():
    assert check(ROOT) == []


def test_it_can_be_imported_without_tensorflow_and_keras():
    script = """if True:
        import sys
        sys.modules["tensorflow"] = sys.modules["keras"] = None
        import kerasdist.placement.plan, kerasdist.run_function.worker, kerasdist.cli
        # Not a folder without `__init__.py`, which could be imported, too.
        print(kerasdist.cli.__file__)
    """
    assert output_of(sys.executable, "-c", script).endswith(".py\n")


def test_the_layers_of_contributing_are_those_that_are_enforced():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    _, _, text = text.partition("## The map of the house")
    text, _, _ = text.partition("## Words")
    rows = re.findall(r"^\|([a-z ]*)\| `([\w/.]+)` \|", text, re.MULTILINE)
    written: dict[str, set[str]] = {}
    layer = ""
    for name, place in rows:
        layer = name.strip() or layer
        parts = place.removesuffix(".py").strip("/").split("/")
        if parts[0] == "callbacks":
            parts.insert(0, "kerasdist")
        written.setdefault(layer, set()).add(
            ".".join(p for p in parts if p[:2] != "__")
        )
    assert written.pop("cli") == {"kerasdist.cli"}
    assert written == {
        name: packages for name, packages in LAYERS if name not in ("version", "cli")
    }
    assert list(written) == [name for name in reversed(NAMES) if name in written]


def test_circles_of_modules_types_and_rooms_are_found(package):
    root = package(
        {
            "kerasdist/layers/__init__.py": "",
            "kerasdist/layers/a.py": "from kerasdist.layers import b",
            "kerasdist/layers/b.py": "if TYPE_CHECKING:\n    from . import a",
            "kerasdist/layers/x/__init__.py": "",
            "kerasdist/layers/x/one.py": "from kerasdist.layers.y import two",
            "kerasdist/layers/x/other.py": "",
            "kerasdist/layers/y/__init__.py": "",
            "kerasdist/layers/y/two.py": "from kerasdist.layers.x import other",
            "kerasdist/cli/run.py": "from kerasdist.cli import doctor",
            "kerasdist/cli/doctor.py": "def f():\n    from . import run",
        }
    )
    assert check(root) == [
        "cycle of rooms: kerasdist.layers.x > kerasdist.layers.y > kerasdist.layers.x",
        "import cycle: kerasdist.cli.doctor > kerasdist.cli.run > kerasdist.cli.doctor",
        "import cycle: kerasdist.layers.a > kerasdist.layers.b > kerasdist.layers.a",
    ]


def test_every_folder_is_a_room_that_says_what_lives_there():
    assert rooms(ROOT) == []


def test_modules_are_not_too_large_and_names_have_one_meaning():
    classes, files = collections.Counter(), collections.Counter()
    for module, path in modules_in(ROOT).items():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= MOST_LINES_OF_A_MODULE, module
        classes.update(re.findall(r"^ *class (\w+)", text, re.MULTILINE))
        files[path.name] += path.name != "__init__.py"
    assert [name for name, count in classes.items() if count > 1] == []
    assert [name for name, count in files.items() if count > 2] == []


def test_a_folder_with_too_much_in_it_or_without_a_word_is_found(package):
    root = package(
        {f"kerasdist/layers/m{i}.py": "" for i in range(16)}
        | {
            "kerasdist/layers/__init__.py": '"""Servers."""',
            "callbacks/__init__.py": "",
        }
    )
    assert "kerasdist/layers has 16 modules" in rooms(root)
    assert "callbacks has no docstring" in rooms(root)
