import itertools
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kerasdist
from kerasdist._version import range_in_words, was_tested
from kerasdist.strategies.options import warn_of_untested
from places import ROOT
from workers import output_of


@pytest.fixture
def forgetful():
    warn_of_untested.cache_clear()
    yield
    warn_of_untested.cache_clear()


def test_the_oldest_pair_is_that_of_the_metadata():
    metadata = (ROOT / "pyproject.toml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    floors = dict(re.findall(r'"(tensorflow|keras)>=([\d.]+)"', metadata))
    oldest = re.search(r"^OLDEST := (.*)$", makefile, re.MULTILINE)
    assert oldest is not None
    pins = dict(re.findall(r"(tensorflow|keras)[~=]=(\d+\.\d+)\.", oldest[1]))
    assert pins == floors
    assert set(floors) == {"tensorflow", "keras"}
    assert floors == {name: each[0] for name, each in kerasdist.TESTED_VERSIONS.items()}


def test_which_versions_were_tested():
    assert range_in_words("keras") == "3.14 to 3.15"
    for version in ("2.18.0", "2.20.0-rc1", "2.21.9"):
        assert was_tested("tensorflow", version), version
    for version in ("2.17.1", "2.22.0", "2.100.0", "3.0.0", "", "nightly"):
        assert not was_tested("tensorflow", version), version


def test_an_untested_version_is_warned_of_once(forgetful, caplog, monkeypatch):
    """By every strategy."""
    warn_of_untested("keras", "3.15.9")
    monkeypatch.setattr("keras.__version__", "3.99.0.dev1")
    monkeypatch.setattr("tensorflow.__version__", "2.99.0")
    for _ in range(2):
        kerasdist.RingStrategy(cluster={}).close()
    kerasdist.ModelParallelStrategy({}, cluster={})
    first, second = caplog.messages
    assert "Received: tensorflow 2.99.0." in first
    assert "Received: keras 3.99.0.dev1. Tested were 3.14 to 3.15. " in second
    assert second.endswith("`pip install 'keras~=3.15.0'`.")


def test_each_pair_has_an_environment_of_its_own():
    # -n prints the commands, also of targets that are there already (-B); those
    # with $(MAKE) run, and print theirs.
    shown = output_of("make", "-n", "-B", "-C", ROOT, "test-versions", MAKEFLAGS="")
    for name in ("oldest", "newest"):
        assert f'.venv-{name}/bin/python -m pytest -m "not soak"' in shown
    oldest, _, newest = shown.partition("rm -f .venv-newest/.test")
    assert " tensorflow~=" in oldest
    assert "--upgrade --upgrade-strategy eager" in newest
    # What `make test` installs they don't have to.
    assert "constraints.txt" not in shown


def test_each_package_of_an_environment_has_its_version_in_constraints():
    """`make lock` has been run since the last change of dependencies."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    makefile = (ROOT / "Makefile").read_text()
    lists = [
        re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE)[1].split()
        for name in ("VIEWERS", "MANIFESTS", "ENGINES", "LEGACY")
    ]
    texts = itertools.chain(
        metadata["dependencies"], *metadata["optional-dependencies"].values(), *lists
    )
    locked = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            each = Requirement(line)
            if each.marker is None or each.marker.evaluate():
                (version,) = each.specifier
                locked[canonicalize_name(each.name)] = version.version
    for each in map(Requirement, texts):
        name = canonicalize_name(each.name)
        assert name in locked, f"{each} isn't in constraints.txt: run `make lock`"
        assert each.specifier.contains(locked[name]), f"{each}: run `make lock`"
