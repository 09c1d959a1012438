"""The packages of kerasdist. Everything else about it is in pyproject.toml."""

from __future__ import annotations

import sysconfig
import tempfile
from distutils.ccompiler import new_compiler
from distutils.sysconfig import customize_compiler
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.errors import CompileError, PlatformError

# One file for all versions of Python from that of `requires-python` on.
LIMITED_API = "0x030B0000"
TAG = "cp311"
KERNELS = Extension(
    "kerasdist.collectives._kernels",
    ["kerasdist/collectives/_kernels.c"],
    define_macros=[("Py_LIMITED_API", LIMITED_API)],
    # numpy rounds a product before it is added.
    extra_compile_args=["-O3", "-ffp-contract=off"],
    py_limited_api=True,
    optional=True,
)


def can_compile() -> bool:
    """Return whether this machine has a compiler, and the headers of Python."""
    compiler = new_compiler()
    customize_compiler(compiler)
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.c")
        probe.write_text("#include <Python.h>\n")
        include = [sysconfig.get_path("include")]
        try:
            compiler.compile([str(probe)], folder, include_dirs=include)
        except (CompileError, PlatformError):
            return False
    return True


# Without a compiler the wheel is pure: numpy does the same in more time.
compiled = can_compile()
setup(
    # callbacks/ stands beside the package and is installed inside it.
    packages=[
        *find_packages(include=["kerasdist", "kerasdist.*"]),
        "kerasdist.callbacks",
    ],
    package_dir={"kerasdist.callbacks": "callbacks"},
    package_data={"kerasdist": ["py.typed", "*.pyi", "*/*.pyi"]},
    exclude_package_data={"": ["*.c"]},
    ext_modules=[KERNELS] if compiled else [],
    options={"bdist_wheel": {"py_limited_api": TAG}} if compiled else {},
)
