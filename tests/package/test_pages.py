"""What a page tells a reader to type is run, as it stands there.

Each page has a folder of its own, with a script `train.py`, in which its `bash` blocks
are run in order; its `python` blocks are run after each other in one interpreter, after
what they take as given. Comments of a page say more about the block that follows:

    <!-- not run: REASON -->     it needs what this machine hasn't
    <!-- file: NAME -->          it's a file, which later blocks use
    <!-- printed -->             this text is what the block before it prints; numbers
                                 and what depends on the machine may differ

`make test-pages` runs all pages, `make test` those of `SOME`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pace import bound
from places import ROOT
from workers import python_env

# Of each kind of block what is copied first.
SOME = ("README.md", "docs/tls.md")
MOST_MARKS = 30
FENCE = "`" * 3
BLOCK = re.compile(
    rf"((?:^<!-- [^\n]* -->\n)*)^{FENCE}(\w*)\n(.*?)^{FENCE}$", re.MULTILINE | re.DOTALL
)
PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]

TRAIN = """
import argparse
import os
import keras
import numpy as np
import kerasdist

def build_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=250)
    options = parser.parse_args()
    x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    # Of `kerasdist run --ps`, too.
    has_servers = '"ps"' in os.environ.get("TF_CONFIG", "")
    name = "ParameterServerStrategy" if has_servers else "RingStrategy"
    with getattr(kerasdist, name)().scope():
        model = build_model()
        model.compile(optimizer="adam", loss="mse")
    model.fit(x, y, batch_size=options.batch_size, epochs=options.epochs)
"""
GIVEN = """
import keras
import numpy as np
import tensorflow as tf
import kerasdist

def build_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])

x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")
y = np.arange(1000) % 4
strategy = kerasdist.RingStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.save_weights("pretrained.weights.h5")
"""
ENVIRONMENT = {
    "SM_HOSTS": '["alpha", "beta"]',
    "SM_CURRENT_HOST": "beta",
    **{
        f"{name}_ALLOW_RUN_AS_ROOT{more}": "1"
        for name in ("OMPI", "PRTE")
        for more in ("", "_CONFIRM")
    },
}


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    marks: dict[str, str]  # by their names
    line: int  # of the page

    @property
    def runs(self) -> bool:
        return self.language in ("bash", "python") and "not run" not in self.marks


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in BLOCK.finditer(text):
        pairs = re.findall(r"<!-- ([\w ]+?)(?:: (.*?))? -->", match[1])
        line = text[: match.start()].count("\n") + 1
        found.append(Block(match[2], match[3], dict(pairs), line))
    return found


def run(command: list[str], folder: Path, what: str) -> str:
    """Run a block, which `what` names in messages, in a folder; return its output."""
    path = os.pathsep.join(
        [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    done = subprocess.run(
        command,
        cwd=folder,
        env=python_env({**ENVIRONMENT, "PATH": path, "OPTIMIZED": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=bound(150),
        check=False,
    )
    assert done.returncode == 0, f"{what} ended with {done.returncode}\n{done.stdout}"
    return done.stdout


def pattern_of(line: str) -> str:
    """The expression that a printed line matches: numbers and bars may differ."""
    units = r"(?: ?(?:[um]s|s|[KMG]?B)\b)?"
    words = re.split(rf"[\d.,]*\d[\d.,]*%?{units}|#+", line.strip())
    return r"\s*(?:\S+(?: [um]s| s| [KMG]?B)?)?\s*".join(
        re.escape(word.strip()) for word in words
    )


def check_output(shown: Block, printed: str, page: str) -> None:
    for line in filter(str.strip, shown.text.splitlines()):
        assert re.search(pattern_of(line), printed), (
            f"{page}, line {shown.line}: not printed: {line}\n{printed}"
        )


def prepare(folder: Path, page: str) -> None:
    (folder / "mypackage").mkdir()
    command = folder / "bin" / "kerasdist"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nexec python -m kerasdist "$@"\n')
    command.chmod(0o755)
    for name in ("train.py", "mypackage/train.py"):
        (folder / name).write_text(TRAIN)
    (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks_of(page):
        if "file" in block.marks:
            (folder / block.marks["file"]).write_text(block.text)


def parameters() -> list[object]:
    pages = [page for page in PAGES if any(block.runs for block in blocks_of(page))]
    soak = [] if os.environ.get("PAGES") else [pytest.mark.soak]
    return [pytest.param(p, marks=[] if p in SOME else soak) for p in pages]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", parameters())
def test_what_a_page_tells_to_type(page, tmp_path):
    prepare(tmp_path, page)
    printed = ""
    code = []
    for block in blocks_of(page):
        if "printed" in block.marks:
            check_output(block, printed, page)
        if not block.runs:
            continue
        if block.language == "bash":
            what = f"{page}, line {block.line}:\n{block.text}"
            command = ["bash", "-euo", "pipefail", "-c", block.text]
            printed = run(command, tmp_path, what)
        elif "file" in block.marks:
            continue
        elif block.text.startswith(("import ", "from ")):
            (tmp_path / "block.py").write_text(block.text)
            what = f"{page}, line {block.line}:\n{block.text}"
            run(["python", "block.py"], tmp_path, what)
        else:
            code.append(f"\n# {page}, line {block.line}\n{block.text}")
    if code:
        (tmp_path / "blocks.py").write_text(GIVEN + "".join(code))
        run(["python", "blocks.py"], tmp_path, f"{page}, python")


def not_run() -> list[str]:
    return [
        f"{page}, line {block.line}: {block.marks['not run']}"
        for page in PAGES
        for block in blocks_of(page)
        if "not run" in block.marks
    ]


def test_blocks_that_are_not_run_are_few():
    assert len(not_run()) <= MOST_MARKS
    assert all(line.partition(": ")[2] for line in not_run())


def test_other_words_and_other_exit_codes_are_noticed(tmp_path):
    prepare(tmp_path, "README.md")
    shown = Block("text", "  input    4.5 ms  24.1% ####\n", {}, 1)
    check_output(shown, "  input   12 us   3% ##\n", "a page")
    with pytest.raises(AssertionError, match="not printed"):
        check_output(shown, "  output   12 us   3% ##\n", "a page")
    with pytest.raises(AssertionError, match="ended with 2"):
        run(["bash", "-c", "kerasdist plan"], tmp_path, "it")


if __name__ == "__main__":
    print(f"{len(not_run())} blocks of the pages are not run:", *not_run(), sep="\n  ")
