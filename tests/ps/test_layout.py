"""Layouts: everything is somewhere once, bytes are even, all tasks agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kerasdist import errors
from kerasdist.ps import Layout, Variable
from pace import bound
from places import SUPPORT
from workers import python_env


def random_variables(seed):
    generator = np.random.default_rng(seed)
    found = []
    for number in range(generator.integers(0, 30)):
        shape = tuple(
            int(n) for n in generator.integers(0, 40, size=generator.integers(0, 4))
        )
        if generator.random() < 0.2:
            shape = (int(generator.integers(1000, 20000)), *shape[:1])
        dtype = str(generator.choice(["float16", "float32", "float64"]))
        sparse = bool(shape) and bool(generator.random() < 0.3)
        found.append(
            Variable(name=f"v{number}", shape=shape, dtype=dtype, sparse=sparse)
        )
    return found


def values_of(variables, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.normal(size=v.shape).astype(v.dtype) for v in variables]


@pytest.mark.parametrize("seed", range(40))
def test_every_row_is_on_one_server_and_bytes_are_even(seed):
    variables = random_variables(seed)
    servers = seed % 5 + 1
    layout = Layout(variables, servers)
    for index, variable in enumerate(variables):
        pieces = [p for p in layout.pieces if p.variable == index]
        covered = [row for p in pieces for row in range(p.start, p.stop)]
        assert covered == list(range(variable.rows))
    total = sum(v.rows * v.row_bytes for v in variables)
    loads = layout.server_bytes()
    assert sum(loads) == total
    # A piece is at most a fair share (or what isn't worth cutting, or one row), so
    # nobody has twice as much.
    largest = max([4096, total / servers, *(v.row_bytes for v in variables)])
    assert max(loads) <= total / servers + largest
    for server in range(servers):
        for name, pieces in layout.dense(server).items():
            end = 0
            for piece in pieces:
                assert piece.offset == end
                end += layout.elements(piece)
                assert layout.variables[piece.variable].held == name


def test_a_dominating_variable_is_cut_and_small_ones_are_not():
    variables = [
        Variable(name="embedding", shape=(100_000, 64), sparse=True),
        Variable(name="kernel", shape=(64, 10)),
        Variable(name="bias", shape=(10,)),
    ]
    layout = Layout(variables, 3)
    assert [p.variable for p in layout.pieces].count(0) >= 3
    assert [p.variable for p in layout.pieces[-2:]] == [1, 2]
    loads = layout.server_bytes()
    assert max(loads) < 1.4 * min(loads)


@pytest.mark.parametrize("seed", range(10))
def test_what_is_cut_makes_up_the_variables(seed):
    variables = random_variables(seed + 100)
    values = values_of(variables)
    layout = Layout(variables, seed % 4 + 1)
    whole = [np.full((v.rows, v.row_elements), np.nan, v.held) for v in variables]
    for server in range(layout.servers):
        parts = layout.cut(server, values)
        for pieces in layout.dense(server).values():
            flat = parts.pop(0)
            for piece in pieces:
                part = flat[piece.offset : piece.offset + layout.elements(piece)]
                rows = whole[piece.variable][piece.start : piece.stop]
                rows[...] = part.reshape(rows.shape)
        for piece in layout.sparse(server):
            whole[piece.variable][piece.start : piece.stop] = parts.pop(0)
        assert parts == []
    for array, value, variable in zip(whole, values, variables, strict=True):
        np.testing.assert_array_equal(
            array.reshape(variable.shape), value.astype(variable.held)
        )


def test_all_processes_compute_the_same_layout():
    script = """
import sys
sys.path[:0] = sys.argv[1:]
from test_layout import random_variables
from kerasdist.ps import Layout
for seed in range(5):
    layout = Layout(random_variables(seed), 3)
    print(layout.fingerprint, layout.pieces)
"""
    command = [
        sys.executable,
        "-c",
        script,
        str(Path(__file__).parent),
        str(SUPPORT),
    ]
    printed = {
        subprocess.run(
            command,
            env=python_env({"PYTHONHASHSEED": seed}),
            capture_output=True,
            check=True,
            text=True,
            timeout=bound(60),
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_json_brings_it_to_others_and_differences_are_named():
    variables = random_variables(3)
    layout = Layout(variables, 2)
    other = Layout.from_json(layout.to_json(), 2)
    assert other.fingerprint == layout.fingerprint
    assert other.pieces == layout.pieces
    assert layout.difference(other) == ""
    assert layout.difference(Layout(variables, 3)) == "2 servers, the other 3"
    assert "variables, the other" in layout.difference(Layout(variables[1:], 2))
    changed = [*variables[:-1], Variable(name="other", shape=(3,))]
    assert "'other'" in layout.difference(Layout(changed, 2))
    assert Layout(changed, 2).fingerprint != layout.fingerprint


@pytest.mark.parametrize(
    "value", [None, 3, [[]], [["a", [-1], "float32", False]], [["a", [1], "int8", 0]]]
)
def test_a_damaged_list_of_variables_is_refused(value):
    with pytest.raises(errors.ProtocolError, match=r"^A list of variables is damaged"):
        Layout.from_json(value, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2,), "dtype": "int32"}, "dtype='int32'; expected one of"),
        ({"shape": (-2,)}, r"shape=\(-2,\); expected integers >= 0"),
        ({"shape": (), "sparse": True}, "sparse=True for a scalar"),
    ],
)
def test_variables_are_checked(arguments, message):
    with pytest.raises(ValueError, match=f"^Variable 'a' can't be held.*{message}"):
        Variable(name="a", **arguments)


def test_values_are_checked():
    layout = Layout([Variable(name="a", shape=(2, 3))], 1)
    with pytest.raises(ValueError, match=r"'a': \(3, 2\), expected \(2, 3\)"):
        layout.check([np.zeros((3, 2))])
    with pytest.raises(ValueError, match="0 arrays, expected 1"):
        layout.check([])
    with pytest.raises(ValueError, match=r"^There must be a server"):
        Layout([], 0)
