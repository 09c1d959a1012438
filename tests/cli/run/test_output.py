import contextlib
import os
import subprocess

import pytest

from kerasdist.cli.run.output import (
    LineTagger,
    RoleLines,
    StartUpLines,
    end_of,
    last_traceback,
)
from pace import bound


def fed(lines, *pieces):
    return b"".join(lines.feed(piece, 0.0) for piece in pieces)


def test_the_tagger():
    """It doesn't care how output is cut, and shows long progress now and then."""
    data = b"a\nb\r\n\n1\r2\r3\n\r    \rx\ny\r  \r\nend"
    for size in (1, 3, 1000):
        tagger = LineTagger(b"[1] ")
        pieces = [data[i : i + size] for i in range(0, len(data), size)]
        result = fed(tagger, *pieces) + tagger.flush()
        assert result == b"[1] a\n[1] b\n[1]\n[1] 3\n[1] x\n[1] end\n"
        assert tagger.flush() == b""
    shown = [tagger.feed(f"\r{second}%".encode(), second) for second in range(13)]
    assert [each for each in shown if each] == [b"[1] 5%\n", b"[1] 10%\n"]
    assert len(LineTagger(b"[1] ").feed(b"x" * 100_000, 0.0)) == 100_005


def test_the_last_traceback_has_its_causes():
    begin = "Traceback (most recent call last):\n"
    first, second, third = (f"{begin}  line\nValueError: {i}\n" for i in range(3))
    during = "\nDuring handling of the above exception, another exception occurred:\n\n"
    direct = (
        "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    chain = f"{first}{during}{second}{direct}{third}"
    assert last_traceback(f"before\n{third}text\n{chain}") == chain.rstrip()
    group = "x\n  + Exception Group Traceback (most recent call last):\n  | y"
    assert last_traceback(group) == group[2:]
    assert last_traceback("no traceback") is None


def test_the_end_of_an_output():
    text = "\n".join(map(str, range(100)))
    assert end_of(text).splitlines() == [str(i) for i in range(80, 100)]
    long = "Traceback (most recent call last):\n" + "x\n" * 1000 + "ValueError: 1"
    lines = end_of(long).splitlines()
    assert len(lines) == 201
    assert lines[100] == "  [... 802 lines]"
    assert lines[-1] == "ValueError: 1"
    assert end_of("") == ""


def test_the_old_chiefs_line_is_ended():
    lines = RoleLines(None, is_chief=True)
    assert fed(lines, b"\r1/10\r", b"2/10") == b"\r1/10\r"
    assert lines.end() == b"2/10\n"
    assert fed(lines, b"more\n") == b""
    assert lines.flush() == lines.end() == b""
    whole = RoleLines(b"[0] ", is_chief=True)
    assert fed(whole, b"all\n") == b"all\n"
    assert whole.end() == b""
    assert fed(whole, b"more\n") == b"[0] more\n"


def test_what_is_kept_has_a_bound():
    lines = RoleLines(None, is_chief=False)
    lines.keep_all()
    fed(lines, *[b"x" * 1000 + b"\n"] * 1000)
    assert len(lines.begin()) <= 64 * 1024


# As TensorFlow 2.16 to 2.21 write them.
STUB = (
    "I0000 00:00:1795460946.405285    7881 cudart_stub.cc:31] Could not find cuda "
    "drivers on your machine, GPU will not be used."
)
INIT = (
    "E0000 00:00:1795460957.021530    7881 cuda_platform.cc:52] failed call to cuInit: "
    "INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)"
)
START = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to "
    "STDERR",
    STUB,
    "I0000 00:00:1795460946.523180    7881 cpu_feature_guard.cc:227] This TensorFlow "
    "binary is optimized to use available CPU instructions in performance-critical "
    "operations.",
    "To enable the following instructions: AVX2 FMA, in other operations, rebuild "
    "TensorFlow with the appropriate compiler flags.",
    "2025-01-01 12:00:00.123456: I tensorflow/core/util/port.cc:153] oneDNN custom "
    "operations are on. You may see slightly different numerical results due to "
    "floating-point round-off errors from different computation orders.",
    "E0000 00:00:1735732800.123456   12345 cuda_fft.cc:477] Unable to register cuFFT "
    "factory: Attempting to register factory for plugin cuFFT when one has already "
    "been registered",
    "W0000 00:00:1735732800.123456   12345 computation_placer.cc:177] computation "
    "placer already registered. Please check linkage and avoid linking the same "
    "target more than once.",
    INIT,
]
# Of a user, and of a GPU that doesn't work.
OTHERS = [
    "hello",
    "WARNING: All log messages are mine",
    "To enable the following instructions: read the page",
    "E0000 00:00:1795460957.021530    7881 cuda_platform.cc:52] failed call to cuInit: "
    "INTERNAL: CUDA error: Failed call to cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: "
    "system has unsupported display driver / cuda driver combination",
    f"my script says: {STUB}",
    f"{STUB} And more.",
    "",
]


def shown(*pieces, environ=None):
    lines = StartUpLines(environ or {})
    found = fed(lines, *(each.encode() for each in pieces)) + lines.flush()
    return found.decode()


def test_only_lines_of_the_start_are_taken_out():
    halves = [half for each in START for half in (each[:40], f"{each[40:]}\n")]
    assert shown(*halves) == ""
    both = [each for pair in zip(START, OTHERS, strict=False) for each in pair]
    left = "".join(f"{each}\n" for each in OTHERS)
    assert shown("".join(f"{each}\n" for each in both)) == left


def test_a_gpu_that_is_not_initialized_is_an_error_where_there_is_a_driver():
    assert shown(f"{INIT}\n") == f"{INIT}\n"
    assert shown(f"{INIT}\n", environ={"CUDA_VISIBLE_DEVICES": "0"}) == f"{INIT}\n"
    assert shown(f"{INIT}\n", environ={"CUDA_VISIBLE_DEVICES": "-1"}) == ""


def test_what_is_no_whole_line_passes_at_once():
    lines = StartUpLines({})
    for piece in (b"name? ", b"bar 1\r", b"W", b"\rWARNING: All log", b"\nI am", b"\n"):
        assert lines.feed(piece, 0.0) == piece
    # The begin of such a line waits for its end, and what isn't one comes whole.
    assert lines.feed(b"WARNING: All log mess", 0.0) == b""
    assert lines.feed(b"enger", 0.0) == b"WARNING: All log messenger"
    assert lines.feed(b" indeed\n", 0.0) == b" indeed\n"
    assert lines.feed(START[0].encode(), 0.0) == b""
    assert lines.flush() == b""
    assert lines.feed(b"I0000 00:00:1", 0.0) == b""
    assert lines.flush() == b"I0000 00:00:1"


def test_a_tag_stands_before_each_line_that_is_left():
    lines = StartUpLines({}, LineTagger(b"[1] "))
    assert lines.feed(f"{STUB}\nhello\nI0000 00".encode(), 0.0) == b"[1] hello\n"
    assert lines.flush() == b"[1] I0000 00\n"


NOISE = START[0].removesuffix("STDERR")
# Writes as TensorFlow does, and creates no strategy.
SCRIPT = f"""
import kerasdist.transport.liveness.launcher_pipe as launcher_stderr
noise = {NOISE!r} + "STDERR\\n"
before = os.fstat(2).st_ino
level = os.environ["TF_CPP_MIN_LOG_LEVEL"]
os.write(2, (noise + f"mine {{rank}}, {{level}}\\n").encode())
size = os.get_terminal_size(2) if os.isatty(2) else None
mark(f"tty-{{rank}}", [os.isatty(2), size])
if rank == 0:
    launcher_stderr.take_stderr()
    launcher_stderr.take_stderr()
    mark("differs", os.fstat(2).st_ino != before)
    os.write(2, b"after\\n" + noise.encode())
print("KERASDIST_STDERR_FD" in os.environ, flush=True)
"""


@pytest.fixture
def launcher(launcher):
    launcher.env.pop("TF_CPP_MIN_LOG_LEVEL", None)
    return launcher


def test_the_start_is_quiet_and_the_rest_is_written_by_the_chief_itself(launcher):
    code, out, err = launcher.run(
        "-n", 2, "--output", "all", "script.py", script=SCRIPT
    )
    assert code == 0
    # What is written after the start isn't looked at any more.
    assert sorted(err.splitlines()) == [NOISE + "STDERR", "after", "mine 0, 1"]
    assert sorted(out.splitlines()) == ["True", "[1] False", "[1] mine 1, 1"]
    assert launcher.wait_for("differs") == ["True"]
    launcher.nothing_runs()


@pytest.mark.parametrize(("option", "level"), [("--tensorflow-log", ""), ("--", "2")])
def test_the_users_level_and_the_option_win(launcher, option, level):
    """An error before any strategy is shown."""
    if level:
        launcher.env["TF_CPP_MIN_LOG_LEVEL"] = level
    script = f"""
        os.write(2, {NOISE!r}.encode() + b"STDERR\\n")
        raise ValueError(os.environ.get("TF_CPP_MIN_LOG_LEVEL", "unset"))
        """
    code, _, err = launcher.run("-n", 1, option, "script.py", script=script)
    assert code == 1
    assert f"\nValueError: {level or 'unset'}\n" in err
    assert (NOISE in err) == (level != "2")


def test_on_a_terminal_it_is_one_with_the_same_size(launcher, terminal):
    opened = terminal("-n", 2, "script.py", script=SCRIPT)
    output = opened.read()
    assert opened.wait() == 0
    assert output.count(NOISE) == 1
    assert "mine 0, 1\r\n" in output
    assert "after\r\n" in output
    first, second = launcher.wait_for("tty-0", "tty-1")
    assert first.startswith("[True, os.terminal_size(")
    assert second == "[False, None]"


@pytest.fixture
def disk(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root can mount a disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    found = subprocess.run(mount, capture_output=True, text=True, timeout=bound(30))
    if found.returncode:
        pytest.skip(f"no disk can be mounted: {found.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=bound(30))


def test_logs_on_a_full_disk(disk, launcher):
    """The worker whose output is lost fails, with the reason; the rest is as usual."""
    script = """
    if rank == 1:
        for _ in range(1000):
            print("x" * 99, flush=True)
    hang()
    """
    options = ("-n", 2, "--log-dir", disk / "logs", "script.py")
    code, _, err = launcher.run(*options, script=script, quick=True)
    assert code == 1
    assert "rank 1 failed with exit code 1" in err
    assert f"the disk of {disk}/logs is full" in err
    launcher.nothing_runs()


def test_no_folder_for_temporary_files(disk, launcher):
    """What the launcher itself notes needs no disk: the error is shown."""
    full = contextlib.suppress(OSError)
    with (disk / "fill").open("wb", buffering=0) as file, full:
        while file.write(bytes(4096)):
            pass
    launcher.env["TMPDIR"] = str(disk)
    code, _, err = launcher.run(
        *("-n", 2, "script.py"),
        script='if rank:\n    raise ValueError("made")\nhang()',
        quick=True,
    )
    assert code == 1
    assert "rank 1 failed with exit code 1" in err
    assert "ValueError: made" in err
