"""`make test-versions` tests the versions that setup.py declares."""

from __future__ import annotations

import os
import re
import subprocess

from places import ROOT


def test_the_oldest_pair_is_that_of_setup():
    setup = (ROOT / "setup.py").read_text()
    makefile = (ROOT / "Makefile").read_text()
    floors = dict(re.findall(r'"(tensorflow|keras)>=([\d.]+)"', setup))
    oldest = re.search(r"^OLDEST := (.*)$", makefile, re.MULTILINE)
    assert oldest is not None
    pins = dict(re.findall(r"(tensorflow|keras)[~=]=(\d+\.\d+)\.", oldest[1]))
    assert pins == floors
    assert set(floors) == {"tensorflow", "keras"}


def test_each_pair_has_an_environment_of_its_own():
    # -n prints the commands, also of targets that are there already (-B); those
    # with $(MAKE) run, and print theirs.
    run = subprocess.run(
        ["make", "-n", "-B", "test-versions"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "MAKEFLAGS"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in ("oldest", "newest"):
        assert f'.venv-{name}/bin/python -m pytest -m "not soak"' in run.stdout
    oldest, _, newest = run.stdout.partition("rm -f .venv-newest/.test")
    assert " tensorflow~=" in oldest
    assert "--upgrade tensorflow keras" in newest
