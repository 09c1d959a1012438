"""The chief's standard error: quiet at the start, then the launcher's own."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.timeout(90)

NOISE = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to "
)
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


@pytest.fixture(autouse=True)
def _no_level(launcher):
    launcher.env.pop("TF_CPP_MIN_LOG_LEVEL", None)


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
