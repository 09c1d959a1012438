"""The packages of kerasdist. Everything else about it is in pyproject.toml."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    # callbacks/ stands beside the package and is installed inside it.
    packages=[
        *find_packages(include=["kerasdist", "kerasdist.*"]),
        "kerasdist.callbacks",
    ],
    package_dir={"kerasdist.callbacks": "callbacks"},
    package_data={"kerasdist": ["py.typed", "*.pyi"]},
)
