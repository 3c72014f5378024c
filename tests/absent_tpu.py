"""Tests that need XLA's compiler for TPUs say so, and are skipped where it is not installed."""

import pytest

import jaxmem
from jaxmem.targets.tpu.install import find_compiler


def _is_installed() -> bool:
    try:
        return find_compiler().exists()
    except jaxmem.JaxmemError:
        return False


needs_libtpu = pytest.mark.skipif(
    not _is_installed(), reason="libtpu is not installed: python -m jaxmem install-compiler --tpu"
)
