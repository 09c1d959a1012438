"""What users' scripts and files depend on is what stands in `public_api.txt`.

A change on purpose: `python tests/package/test_public_api.py` writes the file again,
and the diff belongs into the commit and the changelog.
"""

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kerasdist
from kerasdist import callbacks, errors, layers
from kerasdist.callbacks.summaries import PHASES, Figures, scalars
from kerasdist.cli import completion as completion
from kerasdist.cli import doctor as doctor
from kerasdist.cli import env as env
from kerasdist.cli import plan_command as plan
from kerasdist.cli.run import command as run

ROOT = Path(__file__).resolve().parents[2]  # also run as a script
PAGE = Path(__file__).with_name("public_api.txt")
LIBRARY = [p for n in ("kerasdist", "callbacks") for p in (ROOT / n).rglob("*.py")]
# What callbacks have for the library alone.
CALLED_BY_US = {
    *("before_first_step", "never_stops", "on_failure"),
    *("resumed_after", "shares_state"),
}


def public_api() -> str:
    parts = {
        "Python": python_names(),
        "Commands": commands(),
        "Environment variables": environment_variables(),
        "TensorBoard tags": tags(),
        "Formats": formats(),
    }
    return "\n\n".join(
        f"{title}\n{'-' * len(title)}\n" + "\n".join(lines)
        for title, lines in parts.items()
    )


def python_names() -> Iterator[str]:
    for module in (kerasdist, callbacks, errors, layers):
        for name in sorted(module.__all__):
            value = getattr(module, name)
            path = f"{module.__name__}.{name}"
            if inspect.isclass(value):
                yield from _of_class(path, value)
            elif callable(value):
                yield f"{path}{_parameters(value)}"
            else:
                yield path


def _of_class(path: str, owner: type) -> Iterator[str]:
    # Bases that have no public name may change theirs.
    direct = {base for one in owner.__mro__ if _ours(one) for base in one.__bases__}
    bases = ", ".join(
        base.__name__
        for base in owner.__mro__
        if base in direct - {object, owner}
        and (base.__name__ in errors.__all__ or not _ours(base))
    )
    yield f"class {path}({bases}){_parameters(owner)}"
    ours = [base for base in owner.__mro__ if _ours(base)]
    for name in sorted({name for base in ours for name in vars(base)}):
        if name.startswith("_") or name in CALLED_BY_US or hasattr(Exception, name):
            continue
        value = inspect.getattr_static(owner, name)
        value = getattr(value, "__func__", value)
        # What Keras or TensorFlow calls is theirs.
        if any(name in vars(base) for base in owner.__mro__ if base not in ours):
            continue
        shown = "" if isinstance(value, property) else _parameters(value)
        yield f"    {name}{shown}"


def _ours(owner: type) -> bool:
    return owner.__module__.startswith("kerasdist")


def _parameters(value: Any) -> str:
    """Names, kinds and defaults: annotations name modules, which may move."""
    if not callable(value):
        return ""
    try:
        signature = inspect.signature(value)
    except ValueError:  # an exception without a constructor of its own
        return "(*args)"
    bare = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def commands() -> Iterator[str]:
    parser = argparse.ArgumentParser()
    made: Any = parser.add_subparsers()
    for module in (run, doctor, plan, env, completion):
        module.COMMAND.add_to(made)
    for name, command in made.choices.items():
        yield f"kerasdist {name}"
        for action in command._actions:
            given = ", ".join(action.option_strings) or action.dest
            yield (
                f"    {given} nargs={action.nargs} default={action.default!r} "
                f"choices={action.choices and list(action.choices)}"
            )


def environment_variables() -> list[str]:
    found = set()
    for path in LIBRARY:
        found |= set(re.findall(r"KERASDIST_[A-Z_]+", path.read_text("utf-8")))
    return sorted(found)


def tags() -> list[str]:
    found = {
        text
        for path in LIBRARY
        if "callbacks" in path.parts
        for text in _strings(path)
        if re.fullmatch(r"[a-z_]+/([a-z_]+|[a-z_]*[({.].*)", text)
    }
    # All figures that there are, of rank 0 and stage 0, in the runs below the board's.
    figures = Figures(
        **{"workers": 2, "steps": 1.0, "examples_per_second": 1.0, "by_rank": {0: 1.0}},
        **{"step_seconds": 1.0, "phases": dict.fromkeys(PHASES, 1.0), "link": 1.0},
        **{"busy": {0: 1.0}, "slowest": 0, "baseline": 1.0, "staleness": {0: 1}},
        idle=(0.0,),
    )
    for below, values in scalars(figures, 0.1).items():
        found |= {f"{tag} of {below or 'the board'}" for tag in values}
    return sorted(found)


def formats() -> Iterator[str]:
    for path in sorted(LIBRARY, key=lambda path: path.name):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                for target in node.targets:
                    name = getattr(target, "id", "")
                    if re.fullmatch(r"_?(VERSION|MAGIC)", name):
                        yield f"{name.strip('_')} {node.value.value!r}"


def _strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_what_is_public_stays_as_it_is():
    assert public_api() + "\n" == PAGE.read_text("utf-8"), (
        "If that's meant: python tests/package/test_public_api.py"
    )


def test_the_stub_has_the_names_of_the_module():
    stub = ast.parse((ROOT / "kerasdist" / "__init__.pyi").read_text())
    imported = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    assert len(imported) == len(stub.body)
    found = {}
    for each in imported:
        for alias in each.names:
            assert alias.asname == alias.name  # else it isn't a name of the stub
            found[alias.name] = each.module
    assert found.keys() == {*kerasdist.__all__, "callbacks"}
    lazy = kerasdist._LAZY
    assert {name: found[name] for name in lazy} == lazy


if __name__ == "__main__":
    PAGE.write_text(public_api() + "\n", encoding="utf-8")
