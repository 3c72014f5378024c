"""libtpu, which has XLA's compiler for TPUs: where it is, and how it gets there."""

import contextlib
import importlib.metadata
import pathlib
import re

from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.packages import Packages, jaxlib_version, unreadable

LICENCE = "libtpu comes under the Google Cloud Platform terms of service"
_PLUGIN = "libtpu/libtpu.so"


def _requirement() -> str:
    """The libtpu that this version of JAX is made for, by its metadata."""
    listed = importlib.metadata.requires("jax") or []
    found = (re.match(r"libtpu *\(?([^;)]*)\)?;.*extra == ['\"]tpu['\"]", one) for one in listed)
    return next((f"libtpu{match[1].strip()}" for match in found if match), "libtpu")


def _packages() -> Packages:
    return Packages("tpu", (_requirement(),))


def find_compiler() -> pathlib.Path:
    """The plugin. jaxmem's own folder comes first, then a libtpu that is installed beside JAX.

    Raises:
        JaxmemError: there is none; the message gives the command that installs it.
    """
    why, packages = "", _packages()
    places = [packages.folder]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        places.append(pathlib.Path(str(importlib.metadata.distribution("libtpu").locate_file(""))))
    for place in places:
        try:
            if (place / _PLUGIN).exists():
                return place / _PLUGIN
        except OSError as error:
            why = unreadable(error)
    raise JaxmemError(
        f"{why}Compiling for a TPU that is not in the machine needs libtpu for jaxlib "
        f"{jaxlib_version()}, and it is not installed. Run\n"
        f"    python -m jaxmem install-compiler --tpu\n"
        f"which runs (pip install 'jaxmem[gpu-compiler]' gives it the pip it needs)\n"
        f"    {packages.how()}\n"
        "It goes to a folder of its own because JAX would take it for a TPU backend in "
        f"site-packages. No TPU is needed. {LICENCE}."
    )


def install_compiler() -> pathlib.Path:
    """Installs libtpu with pip, once for each version of jaxlib; about 700 MB on disk."""
    return _packages().install()
