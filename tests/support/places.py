import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
# Where scripts of tests find `cases` and the helpers.
SCRIPTS_PATH = os.pathsep.join(map(str, (TESTS, SUPPORT)))
