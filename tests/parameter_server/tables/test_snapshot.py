import os
import signal
import stat
import subprocess
import sys
import zlib

import numpy as np
import pytest

from kerasdist import errors
from kerasdist.parameter_server.snapshots import (
    path_of,
    read_snapshot,
    remove_snapshot,
    write_snapshot,
)
from kerasdist.transport import array_file
from kerasdist.transport.array_file import remove_parts
from pace import bound
from workers import python_env

ARRAYS = [
    np.arange(12, dtype="float32").reshape(3, 4),
    np.arange(5, dtype="int64"),
    np.zeros((0, 3)),
    np.array(2.5),
]


@pytest.fixture
def path(tmp_path):
    return path_of(str(tmp_path / "new" / "folder"), 3)


def test_what_is_written_is_read(path):
    assert read_snapshot(path) is None
    size = write_snapshot(
        path, {"a": [1, None]}, [a.reshape(a.shape or (1,)) for a in ARRAYS]
    )
    assert path.stat().st_size == size
    header, arrays = read_snapshot(path)
    assert header["a"] == [1, None]
    for mine, array in zip(arrays, ARRAYS, strict=True):
        assert mine.dtype == array.dtype
        np.testing.assert_array_equal(mine, array.reshape(mine.shape))
    write_snapshot(path, {"a": 2}, [])
    assert read_snapshot(path) == ({"a": 2, "version": 2, "arrays": []}, [])
    assert os.listdir(path.parent) == ["server-3.snapshot"]
    remove_snapshot(path)
    remove_snapshot(path)
    assert read_snapshot(path) is None


def test_every_damaged_byte_and_every_missing_one_is_noticed(path):
    write_snapshot(path, {"a": 1}, ARRAYS[:2])
    data = path.read_bytes()
    summed = b"PK\x03\x04" + bytes(1000)
    contents = [b"KDST" + bytes(1000), b"", summed, data + b"x"]
    contents.append(summed + zlib.crc32(summed).to_bytes(4, "big"))
    for place in range(0, len(data), 11):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        contents += [damaged, data[:place]]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(
            errors.SnapshotError,
            match=r"^The snapshot .* can't be used: .* `snapshot_dir`",
        ):
            read_snapshot(path)


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_the_one_before(path):
    write_snapshot(path, {"a": 1}, ARRAYS[:2])
    blocked = path / "below a file"
    with pytest.raises(errors.SnapshotError, match=r"^A snapshot can't be written"):
        write_snapshot(blocked, {}, [])
    assert read_snapshot(path)[0]["a"] == 1


def test_who_is_killed_while_it_writes_leaves_the_one_before(path):
    write_snapshot(path, {"n": 1}, ARRAYS[:2])
    script = """if True:
        import os, signal, sys
        from pathlib import Path
        from kerasdist.parameter_server.snapshots import write_snapshot

        # Between what is written and its name.
        os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
        write_snapshot(Path(sys.argv[1]), {"n": 2}, [])
    """
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, env=python_env(), timeout=bound(60), check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_snapshot(path)[0]["n"] == 1
    assert len(list(path.parent.iterdir())) == 2
    remove_parts(path)
    assert list(path.parent.iterdir()) == [path]


def test_a_snapshot_is_its_owners_to_read_and_follows_nobodys_link(path, monkeypatch):
    """Others may write to the folder, and may guess a name."""
    victim = path.parent.parent / "victim"
    path.parent.mkdir(parents=True)
    victim.write_text("precious")
    names = iter(["guessed", "guessed", "other"])
    monkeypatch.setattr(array_file.secrets, "token_hex", lambda size: next(names))
    for link in (f".{path.name}.{os.getpid()}", f".{path.name}.guessed.part"):
        (path.parent / link).symlink_to(victim)
    with pytest.raises(errors.SnapshotError, match="File exists"):
        write_snapshot(path, {}, ARRAYS)
    # The link is somebody else's: it stays.
    with pytest.raises(errors.SnapshotError, match="File exists"):
        write_snapshot(path, {}, ARRAYS)
    write_snapshot(path, {}, ARRAYS)
    assert victim.read_text() == "precious"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
