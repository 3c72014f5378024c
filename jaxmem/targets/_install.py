"""Where XLA's compiler for absent GPUs is kept, and how it gets there.

The wheels hold a PJRT plugin. In site-packages JAX takes any such plugin for a GPU backend, tries
it at the first use of any backend, and prints a traceback on a machine without a GPU; a folder of
their own keeps them out of everyone's way, and lets CUDA 12 and 13 stand side by side.
"""

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

from jaxmem._errors import JaxmemError

_NVCC = {12: "nvidia-cuda-nvcc-cu12>=12.8,<13", 13: "nvidia-cuda-nvcc>=13,<14"}
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


def cache_folder() -> pathlib.Path:
    """Where jaxmem keeps compilers and compiled results: ``JAXMEM_CACHE``, or the user's cache."""
    chosen = os.environ.get("JAXMEM_CACHE")
    if chosen:
        return pathlib.Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "jaxmem"


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
    version = _jaxlib_version()
    places = [_folder(cuda)]
    try:
        installed = importlib.metadata.distribution(f"jax-cuda{cuda}-pjrt")
        if installed.version == version:
            places.append(pathlib.Path(str(installed.locate_file(""))))
    except importlib.metadata.PackageNotFoundError:
        pass
    for place in places:
        plugin = place / "jax_plugins" / f"xla_cuda{cuda}" / "xla_cuda_plugin.so"
        if plugin.exists():
            toolkit = place / _TOOLKIT[cuda]
            return Compiler(plugin, place, toolkit if toolkit.exists() else None, version, cuda)
    command = shlex.join(["python", *_pip(cuda, _folder(cuda))])
    raise JaxmemError(
        f"Compiling for a GPU that is not in the machine needs XLA's CUDA {cuda} compiler for "
        f"jaxlib {version}, and it is not installed. Run\n"
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
    if folder.exists():
        return folder
    if importlib.util.find_spec("pip") is None:
        raise JaxmemError(
            "Installing the compiler needs pip, and this environment has none. Run "
            "pip install 'jaxmem[gpu-compiler]' (or uv pip install pip) first."
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = pathlib.Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
        staging.chmod(0o755)  # a cache may be shared
    except OSError as error:
        raise JaxmemError(
            f"The compiler cannot be put into {folder.parent} ({error}). Set JAXMEM_CACHE to a "
            "folder that can be written."
        ) from error
    command = [sys.executable, *_pip(cuda, staging), "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(command, text=True, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-12:])
            raise JaxmemError(
                f"pip could not install the compiler:\n{tail}\n(the command was "
                f"{shlex.join(command)})"
            )
        try:
            staging.rename(folder)  # in one move: another process may be installing it too
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder
