"""Strict JAX for every test: CPU only, float64, no silent promotion of dtypes or ranks."""

import gc
import itertools
import os
import pathlib
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# A user's calibration would change predicted times, and so the plans: none is found in here.
os.environ["JAXMEM_CALIBRATIONS"] = f"{tempfile.gettempdir()}/jaxmem-tests-{os.getpid()}"

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Programs of the tests run for microseconds on the CPU and compile for seconds, which is a third
# less without LLVM's optimisations, and half as much again without the emitters of fusions that XLA
# made for speed (in jax below 0.11: later ones have no such flag). XLA's own optimisations, and
# compilations for targets, are as ever: the flag is gone once it is read.
jax.config.update("jax_disable_most_optimizations", True)
if jax.__version_info__ < (0, 11):
    flags = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{flags or ''} --xla_cpu_use_fusion_emitters=false"
    jax.jit(lambda: 0)()
    os.environ.pop("XLA_FLAGS") if flags is None else os.environ.update(XLA_FLAGS=flags)
# A thirtieth of their time went into looking for garbage among all that JAX keeps.
gc.set_threshold(20_000, 10, 10)


CALIBRATIONS = pathlib.Path(os.environ["JAXMEM_CALIBRATIONS"])
_tests = itertools.count()


@pytest.fixture(autouse=True)
def calibrations(monkeypatch):
    """Where a test's own calibrations are kept: another's do not change its times."""
    folder = CALIBRATIONS / str(next(_tests))
    monkeypatch.setenv("JAXMEM_CALIBRATIONS", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


# Of the 65,530 mappings of memory that Linux lets a process have (vm.max_map_count). Each program
# that is compiled for the CPU takes some: a worker that has run a thousand tests crashed in the
# compiler. Chosen: at half, programs are compiled again for nothing; a test was seen to take 6,100.
MOST_MAPPINGS = 30_000
_MAPPINGS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def mappings(calibrations):
    """Forgets the compiled programs of earlier tests before there are too many; it looks after
    every tenth test."""
    yield
    looks = int(calibrations.name) % 10 == 9 and _MAPPINGS.exists()
    if looks and _MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def key():
    return jax.random.key(0)
