import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pace import bound


def wait_until(
    condition: Callable[[], Any], what: object, within: float = 60, every: float = 0.01
) -> None:
    """Looks often whether `condition()` holds; fails after `within` usual seconds."""
    within = bound(within)
    never = threading.Event()
    end = time.monotonic() + within
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"Waited {within} s for {what}.")
        never.wait(every)
