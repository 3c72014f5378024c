"""Where XLA's compiler for absent GPUs is kept, and how it gets there.

The wheels hold a PJRT plugin. In site-packages JAX takes any such plugin for a GPU backend, tries
it at the first use of any backend, and prints a traceback on a machine without a GPU; a folder of
their own keeps them out of everyone's way, and lets CUDA 12 and 13 stand side by side.
"""

import dataclasses
import errno
import importlib.metadata
import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import filelock

from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.cache import cache_folder

_NVCC = {12: "nvidia-cuda-nvcc-cu12>=12.8,<13", 13: "nvidia-cuda-nvcc>=13,<14"}
_PART = ".part"
_STALE = 86400  # seconds: no installation takes so long
_TOOLKIT = {12: "nvidia/cuda_nvcc", 13: "nvidia/cu13"}


@dataclasses.dataclass(frozen=True)
class Compiler:
    """An installed compiler: the plugin, the folder that its Python packages are in, and the one
    with libdevice and ptxas (None: XLA's own search)."""

    plugin: pathlib.Path
    packages: pathlib.Path
    toolkit: pathlib.Path | None
    version: str
    cuda: int


def _jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def _folder(cuda: int) -> pathlib.Path:
    python = "py{}{}".format(*sys.version_info)
    return cache_folder() / "compilers" / f"cuda{cuda}-{_jaxlib_version()}-{python}"


def _pip(cuda: int, folder: pathlib.Path) -> list[str]:
    plugin = f"jax-cuda{cuda}-plugin=={_jaxlib_version()}"  # brings its pjrt
    return ["-m", "pip", "install", "--target", str(folder), plugin, _NVCC[cuda]]


def find_compiler(cuda: int) -> Compiler:
    """The compiler for targets of that CUDA version.

    jaxmem's own folder comes first, then a plugin of JAX's version that is installed beside JAX.

    Raises:
        JaxmemError: there is none; the message gives the command that installs it.
    """
    version, unreadable = _jaxlib_version(), ""
    places = [_folder(cuda)]
    try:
        installed = importlib.metadata.distribution(f"jax-cuda{cuda}-pjrt")
        if installed.version == version:
            places.append(pathlib.Path(str(installed.locate_file(""))))
    except importlib.metadata.PackageNotFoundError:
        pass
    for place in places:
        plugin = place / "jax_plugins" / f"xla_cuda{cuda}" / "xla_cuda_plugin.so"
        toolkit = place / _TOOLKIT[cuda]
        try:
            if plugin.exists():
                return Compiler(plugin, place, toolkit if toolkit.exists() else None, version, cuda)
        except OSError as error:
            unreadable = (
                f"The folder of jaxmem's compilers cannot be read ({error}). Set JAXMEM_CACHE to "
                "one that can be.\n"
            )
    command = shlex.join(["python", *_pip(cuda, _folder(cuda))])
    raise JaxmemError(
        f"{unreadable}Compiling for a GPU that is not in the machine needs XLA's CUDA {cuda} "
        f"compiler for jaxlib {version}, and it is not installed. Run\n"
        f"    python -m jaxmem install-compiler --cuda {cuda}\n"
        f"which runs (pip install 'jaxmem[gpu-compiler]' gives it the pip it needs)\n"
        f"    {command}\n"
        "It goes to a folder of its own because JAX would take it for a GPU backend in "
        "site-packages. No GPU and no CUDA toolkit is needed."
    )


def install_compiler(cuda: int = 13) -> pathlib.Path:
    """Installs XLA's compiler for absent GPUs with pip, once for each version of jaxlib.

    Args:
        cuda: 13, or 12 for GPUs below compute capability 7.5 (V100).

    Returns:
        The folder it is in. About 700 MB on disk.

    Raises:
        JaxmemError: pip is missing or failed, with its last lines.
    """
    if cuda not in _NVCC:
        raise JaxmemError(f"There is a compiler for CUDA 12 and for CUDA 13, none for {cuda!r}.")
    folder = _folder(cuda)
    try:
        if folder.exists():
            return folder
        if importlib.util.find_spec("pip") is None:
            raise JaxmemError(
                "Installing the compiler needs pip, and this environment has none. Run "
                "pip install 'jaxmem[gpu-compiler]' (or uv pip install pip) first."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(
            cache_folder() / f"{folder.name}.lock"
        ):  # of several processes one installs it
            if not folder.exists():
                _install(cuda, folder)
    except OSError as error:
        raise JaxmemError(
            f"The compiler cannot be put into {folder.parent} ({error}). Set JAXMEM_CACHE to a "
            "folder that can be written."
        ) from error
    return folder


def _install(cuda: int, folder: pathlib.Path) -> None:
    """Into a folder beside it, which gets its name when it is whole."""
    _tidy(folder.parent)
    staging = pathlib.Path(tempfile.mkdtemp(_PART, folder.name, folder.parent))
    staging.chmod(0o755)  # a cache may be shared
    command = [sys.executable, *_pip(cuda, staging), "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, text=True, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
        if done.returncode:
            raise JaxmemError(
                f"pip could not install the compiler:\n{_reason(done.stdout, folder.parent)}\n"
                f"(the command was {shlex.join(command)})"
            )
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _reason(output: str, folder: pathlib.Path) -> str:
    """Why pip failed: the disk is full, or its last lines without a traceback."""
    if os.strerror(errno.ENOSPC) in output:
        return (
            f"No space left on the disk: it takes about 700 MB in {folder}, and as much in "
            f"{tempfile.gettempdir()} while it is unpacked. Free some, or set JAXMEM_CACHE and "
            "TMPDIR to folders that have it."
        )
    lines = [line for line in output.splitlines() if not line.startswith((" ", "Traceback"))]
    return "\n".join(lines[-12:])


def _tidy(folder: pathlib.Path) -> None:
    """Removes what installations left that were killed."""
    for part in folder.glob(f"*{_PART}"):
        if part.stat().st_mtime < time.time() - _STALE:
            shutil.rmtree(part, ignore_errors=True)
