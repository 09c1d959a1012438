"""Imports go one way, and each foreign package comes in at one place.

The layers are in `LAYERS`; a module may import its own layer and those below. Inside a
layer no module and no room (folder) imports one that imports it, type-checking imports
included. From `mechanism` down nothing imports TensorFlow or Keras. Docstrings and
messages are in plain technical English: a first line is a noun phrase or a verb, no
clause, and processes aren't persons. `check` finds what breaks this in a folder; the
tests show first that it can.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from places import ROOT
from workers import output_of

# Lowest first.
LAYERS = [
    ("version", {"kerasdist._version"}),
    ("errors", {"kerasdist.errors"}),
    ("cluster", {"kerasdist.cluster"}),
    ("transport", {"kerasdist.transport"}),
    (
        "mechanism",
        {"kerasdist.collectives", "kerasdist.parameter_server", "kerasdist.placement"},
    ),
    ("prediction", {"kerasdist.prediction"}),
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
# No docstring begins with one of these.
CLAUSES = {
    *("What", "How", "Who", "Which", "Where", "When", "That"),
    *("By", "From", "Do", "Can"),
}
BANNED = re.compile(
    r"\b(whoever|nobody|somebody|anybody|everybody|anew|needn't|isn't due|so many"
    r"|for want|as ever|(?:has|have|had) come|comes|hears|says|(?:is|are) told"
    # Not an attribute of that name.
    r"|blame[sd]?(?!:))\b",
    re.IGNORECASE,
)
# Where each name of a framework may be imported, and the layer that may.
SEAMS = {"tensorflow.python": "tf seam", "keras.src": "keras seam"}


@dataclass(frozen=True)
class Import:
    name: str
    line: int
    when: str  # "eager"; "lazy" inside a function; "types" for a type checker only


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
        for path in sorted((root / folder).rglob("*.py*")):
            # A stub stands for a compiled module.
            beside = path.suffix == ".pyi" and path.with_suffix(".py").exists()
            if beside or path.suffix == ".pyc":
                continue
            parts = list(path.relative_to(root).with_suffix("").parts)
            if folder == "callbacks":
                parts.insert(0, package)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(module: str, path: Path) -> list[Import]:
    """Every import of a module, also inside functions and `TYPE_CHECKING`.

    `from a import b` becomes `a.b`: the caller knows whether that is a module.
    Also `importlib.import_module("a.b")`, `keras.src` and `tf.python` as
    attributes count.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    aliases: dict[str, str] = {}
    found: list[Import] = []

    def visit(node: ast.AST, when: str) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.asname or "." not in alias.name:
                        aliases[alias.asname or alias.name] = alias.name
                    found.append(Import(alias.name, node.lineno, when))
            case ast.ImportFrom(module=base, names=names, level=level):
                if level:
                    above = package.split(".")
                    above = above[: len(above) - level + 1]
                    base = ".".join([*above, *filter(None, [base])])
                for alias in names:
                    aliases[alias.asname or alias.name] = f"{base}.{alias.name}"
                    found.append(Import(f"{base}.{alias.name}", node.lineno, when))
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                found.append(Import(name, node.lineno, when))
            case ast.Attribute(value=ast.Name(id=owner), attr=attr):
                name = f"{aliases.get(owner, '')}.{attr}"
                if name in SEAMS:
                    found.append(Import(name, node.lineno, when))
            case ast.If(test=test) if "TYPE_CHECKING" in ast.dump(test):
                when = "types"
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                when = "lazy"
        for child in ast.iter_child_nodes(node):
            visit(child, when)

    visit(tree_of(path), "eager")
    return found


def check(root: Path) -> list[str]:
    """What breaks the rules below `root`, one line each, sorted."""
    modules = modules_in(root)
    faults: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = set(imports_of(module, path))
        where = path.relative_to(root)
        layer = layer_of(module)
        if layer is None:
            faults.append(f"{where}:1: {module} is in no layer")
            continue
        graph[module] = set()
        for imported in found:
            target = _ours(imported.name, modules)
            fault = _framework(layer, imported)
            if target is not None:
                # Also what only a type checker reads: who understands a module must
                # understand those whose types it names.
                graph[module].add(target)
                fault = _direction(layer, target, imported)
            if fault:
                faults.append(f"{where}:{imported.line}: {fault}")
        public = path.name == "__init__.py" or module == "kerasdist.errors"
        faults += [f"{where}:{line}: {what}" for line, what in _style(path, public)]
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
        for other in map(room, targets):
            shorter, longer = sorted((f"{mine}.", f"{other}."), key=len)
            if not longer.startswith(shorter):
                between.setdefault(mine, set()).add(other)
    return between


def _ours(name: str, modules: dict[str, Path]) -> str | None:
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


def _style(path: Path, public: bool) -> Iterator[tuple[int, str]]:
    docstrings = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Name(id="__all__") if not public:
                yield node.lineno, "`__all__` is for packages: they say what is public"
            case ast.Expr(value=ast.Constant(value=str(text))):
                docstrings.add(id(node.value))
                if re.split(r"\W", text, maxsplit=1)[0] in CLAUSES:
                    yield node.lineno, f"begins with a clause: {text.splitlines()[0]}"
                for number, line in enumerate(text.splitlines(), node.lineno):
                    if BANNED.search(line):
                        yield number, line.strip()
            # A message has words; keys of requests haven't.
            case ast.Constant(value=str(text)) if " " in text:
                if id(node) not in docstrings and BANNED.search(text):
                    yield node.lineno, text


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
    faults = []
    for path in modules_in(root).values():
        if path.name != "__init__.py":
            continue
        folder = path.parent.relative_to(root)
        count = len(list(path.parent.glob("*.py"))) - 1
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines = len(doc.splitlines())
        if count > MOST_MODULES:
            faults.append(f"{folder} has {count} modules")
        if not lines or (folder != Path("kerasdist") and lines > MOST_LINES):
            faults.append(f"{folder} says what it holds in {lines} lines")
    return faults


# Of a module its source, and the faults in it.
FAULTY = {
    "callbacks/__init__": ("", []),
    **{
        f"kerasdist/{name}": ("", [])
        for name in (
            *("errors", "_tf", "_keras/__init__", "_version", "transport/__init__"),
            *("strategies/__init__", "cli/__init__", "layers/__init__"),
            *("layers/x/__init__", "layers/x/other", "layers/y/__init__"),
        )
    },
    "kerasdist/transport/tcp": (
        "def f():\n  from ..cli import run",
        ["2: transport imports kerasdist.cli.run, of the layer cli above it"],
    ),
    "kerasdist/util": ("", ["1: kerasdist.util is in no layer"]),
    "kerasdist/_keras/a": (
        "if TYPE_CHECKING:\n    from kerasdist.strategies import base",
        ["2: keras seam imports kerasdist.strategies.base, of the layer strategies"],
    ),
    "kerasdist/__init__": (
        "from kerasdist.strategies import base",
        ["1: kerasdist imports kerasdist.strategies.base eagerly, which needs Tensor"],
    ),
    "kerasdist/cluster": (
        "def f():\n    import tensorflow.config",
        ["2: cluster imports tensorflow.config; it must work without TensorFlow"],
    ),
    "kerasdist/strategies/ring": (
        "import importlib\nimportlib.import_module('kerasdist.callbacks')\n"
        "from tensorflow.python.framework import ops\n"
        "import tensorflow as tf\ntf.python.ops",
        [
            "2: strategies imports kerasdist.callbacks, of the layer callbacks above",
            "3: strategies imports tensorflow.python.framework.ops; only the tf seam",
            "5: strategies imports tensorflow.python; only the tf seam may",
        ],
    ),
    "kerasdist/cli/words": (
        '"""What it does.\n\nNobody waits.\n"""\n__all__ = ["comes"]\n'
        'ValueError(f"the server says {x}")',
        [
            "1: begins with a clause: What it does.",
            "3: Nobody waits.",
            "5: `__all__` is for packages",
            "6: the server says",
        ],
    ),
    # Circles of modules, of types, and of rooms.
    "kerasdist/cli/run": ("from kerasdist.cli import doctor", []),
    "kerasdist/cli/doctor": ("def f():\n    from . import run", []),
    "kerasdist/layers/a": ("from kerasdist.layers import b", []),
    "kerasdist/layers/b": ("if TYPE_CHECKING:\n    from . import a", []),
    "kerasdist/layers/x/one": ("from kerasdist.layers.y import two", []),
    "kerasdist/layers/y/two": ("from kerasdist.layers.x import other", []),
    **{f"kerasdist/layers/m{i}": ("", []) for i in range(14)},
}
CIRCLES = [
    "cycle of rooms: kerasdist.layers.x > kerasdist.layers.y > kerasdist.layers.x",
    "import cycle: kerasdist.cli.doctor > kerasdist.cli.run > kerasdist.cli.doctor",
    "import cycle: kerasdist.layers.a > kerasdist.layers.b > kerasdist.layers.a",
]


def test_each_fault_is_found(tmp_path):
    for name, (source, _) in FAULTY.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    found = check(tmp_path)
    assert found[:3] == CIRCLES
    expected = sorted(f"{n}.py:{f}" for n, (_, some) in FAULTY.items() for f in some)
    for line, begin in zip(found[3:], expected, strict=True):
        assert line.startswith(begin)
    assert "kerasdist/layers has 16 modules" in rooms(tmp_path)
    assert "callbacks says what it holds in 0 lines" in rooms(tmp_path)


def test_the_library_keeps_the_rules():
    assert check(ROOT) == []


def test_it_can_be_imported_without_tensorflow_and_keras():
    script = """if True:
        import sys
        sys.modules["tensorflow"] = sys.modules["keras"] = None
        import kerasdist
        print("socket" in sys.modules)
        import kerasdist.placement.plan, kerasdist.run_function.worker, kerasdist.cli
        # Not a folder without `__init__.py`, which could be imported, too.
        print(kerasdist.cli.__file__)
    """
    assert re.fullmatch(r"False\n.*\.py\n", output_of(sys.executable, "-c", script))


def test_a_ring_doesnt_import_what_few_jobs_need():
    modules, todo, found = modules_in(ROOT), {"kerasdist.strategies.ring"}, set()
    while todo:
        found.add(module := todo.pop())
        for one in imports_of(module, modules[module]):
            target = _ours(one.name, modules) if one.when == "eager" else None
            todo |= {target, target and target.rpartition(".")[0]} - {None} - found
    assert len(found) > 80, found
    assert not {name for name in found if re.search("tuning|ives.elastic.", name)}


def test_the_layers_of_contributing_are_those_that_are_enforced():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    text = text.partition("## The map of the house")[2].partition("## Words")[0]
    written: dict[str, set[str]] = {}
    layer = ""
    for name, place in re.findall(r"^\|([a-z ]*)\| `([\w/.]+)` \|", text, re.MULTILINE):
        layer = name.strip() or layer
        module = place.removesuffix(".py").removesuffix("/__init__").strip("/")
        module = f"kerasdist.{module.removeprefix('kerasdist/').replace('/', '.')}"
        written.setdefault(layer, set()).add(module.replace(".kerasdist", ""))
    enforced = dict(LAYERS[1:]) | {"cli": {"kerasdist.cli"}}
    assert list(written.items()) == list(reversed(enforced.items()))


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
