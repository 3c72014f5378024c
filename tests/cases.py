"""Which cases of a test are heavy."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases of a test, of which all but the ``fast`` ones are left out by `make test`."""
    fast = list(fast)
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in cases]
