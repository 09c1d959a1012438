import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import kerasdist._version
from places import ROOT
from workers import ended, python_env

VERSION = kerasdist._version.__version__
PURE = f"kerasdist-{VERSION}-py3-none-any.whl"
KERNELS = "kerasdist/collectives/_kernels.abi3.so"
# Which file would be imported, without the import of TensorFlow.
FIND = """
import importlib.util
print(importlib.util.find_spec("kerasdist.callbacks").origin)
"""


def run(*command, cwd, **env):
    # Without PYTHONPATH: what is imported must be what was installed.
    env = {k: v for k, v in python_env(env).items() if k != "PYTHONPATH"}
    done = ended(*command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def install(folder, *what, cwd):
    """Creates a virtual environment, installs into it, returns its bin folder.

    TensorFlow and the rest come from the environment of the tests: a `.pth` file
    names its folder. Editable installs of that environment don't come along,
    because `.pth` files aren't read in a folder that a `.pth` file has added.
    """
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", script, cwd=folder).strip())
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "tests.pth").write_text("\n".join(sorted(paths)) + "\n")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        # Also where the tests' environment has kerasdist already.
        *("--ignore-installed", "--no-deps", "--no-index", "--no-build-isolation"),
        *what,
        cwd=cwd,
    )
    return folder / "bin"


@pytest.fixture(scope="module")
def tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know what belongs to the repository")
    # A checkout of somebody else's is refused by git unless told otherwise.
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    return [path for path in run(*command, cwd=ROOT).split("\0") if path]


@pytest.fixture(scope="module")
def source(tracked, tmp_path_factory):
    """A copy of what is tracked, and of nothing else."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def dist(source, tmp_path_factory):
    """The folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    # No isolation: setuptools is installed with the test extra, and pinned.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    run(*build, cwd=source)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("venv")
    return install(folder, str(wheel), cwd=folder)


def test_the_wheel_holds_the_packages_and_nothing_else(wheel, tracked):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    # One file for all versions of Python.
    assert (KERNELS in names) == ("-cp311-abi3-" in wheel.name) == (wheel.name != PURE)
    names.discard(KERNELS)
    info = f"kerasdist-{VERSION}.dist-info"

    assert {name.partition("/")[0] for name in names} == {"kerasdist", info}
    assert any(name.endswith("/LICENSE") for name in names if name.startswith(info))
    expected = {path for path in tracked if path.startswith("kerasdist/")}
    expected |= {f"kerasdist/{p}" for p in tracked if p.startswith("callbacks/")}
    assert {name for name in names if not name.startswith(info)} == {
        path for path in expected if path.endswith((".py", ".pyi", "/py.typed"))
    }
    assert {"kerasdist/py.typed", "kerasdist/__init__.pyi"} <= names
    assert "kerasdist/callbacks/__init__.py" in names


def test_without_a_compiler_the_wheel_is_pure(source, tmp_path):
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel"]
    run(*build, "--outdir", str(tmp_path), cwd=source, CC=str(tmp_path / "missing"))
    with zipfile.ZipFile(tmp_path / PURE) as archive:
        assert "kerasdist/collectives/fused_buffer.py" in archive.namelist()
        assert not any(name.endswith(".so") for name in archive.namelist())


def test_the_metadata_is_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"kerasdist-{VERSION}.dist-info/METADATA").decode()
    headers, _, description = text.partition("\n\n")

    assert {
        f"Version: {VERSION}",
        "Requires-Python: >=3.11",
        "Requires-Dist: tensorflow>=2.18",
        "Requires-Dist: keras>=3.14",
        "Classifier: Typing :: Typed",
        "Provides-Extra: demo",
        "Description-Content-Type: text/markdown",
    } <= set(headers.splitlines())
    assert re.search(r"^License(-Expression)?: Apache-2\.0$", headers, re.MULTILINE)
    assert description.strip() == (ROOT / "README.md").read_text().strip()


@pytest.mark.soak
def test_the_package_index_accepts_both(dist):
    files = sorted(str(path) for path in dist.iterdir())
    assert len(files) == 2
    text = run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=dist)
    assert text.count("PASSED") == 2


def test_the_sdist_holds_the_documents(dist):
    with tarfile.open(dist / f"kerasdist-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    documents = {"CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md"}
    assert names >= {*documents, "callbacks/__init__.py", "pyproject.toml", "setup.py"}


def test_the_installed_wheel_is_found_and_runs(installed, tmp_path):
    # Without TensorFlow, whose import takes longer than all else here.
    script = FIND + "import kerasdist as k; print(k.__file__, k.__version__)"
    shown = run(str(installed / "python"), "-c", script, cwd=tmp_path)
    callbacks, package, version = shown.split()
    assert version == VERSION
    for path in (callbacks, package):
        assert path.startswith(str(installed.parent))
    assert "usage: kerasdist" in run(
        str(installed / "kerasdist"), "--help", cwd=tmp_path
    )


@pytest.mark.soak
def test_all_of_the_installed_wheel_is_imported(installed, tmp_path):
    script = """if True:
        import kerasdist, kerasdist.callbacks
        print(kerasdist.__version__, kerasdist.RingStrategy.__name__)
        print(kerasdist.__file__, kerasdist.callbacks.__file__)
    """
    shown = run(str(installed / "python"), "-c", script, cwd=tmp_path).split()
    assert shown[:2] == [VERSION, "RingStrategy"]
    assert all(path.startswith(str(installed.parent)) for path in shown[2:])


@pytest.mark.soak
def test_an_editable_install_finds_the_callbacks(source, tmp_path):
    folder = install(tmp_path / "venv", "--editable", ".", cwd=source)
    found = run(str(folder / "python"), "-c", FIND, cwd=tmp_path).strip()
    assert Path(found).samefile(source / "callbacks" / "__init__.py")


@pytest.mark.soak
def test_a_checkouts_folder_finds_the_callbacks_after_plain_install(installed, source):
    # `python -c` in a checkout's folder imports the checkout, which has no
    # kerasdist/callbacks.
    found = run(str(installed / "python"), "-c", FIND, cwd=source).strip()
    assert Path(found).samefile(source / "callbacks" / "__init__.py")


def test_the_newest_entry_of_the_changelog_is_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)[0] == VERSION
