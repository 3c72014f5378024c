"""XLA's compiler for absent GPUs: where it is, and how it gets there."""

import dataclasses
import importlib.metadata
import pathlib

from jaxmem.ground.errors import JaxmemError
from jaxmem.targets.packages import Packages, jaxlib_version, unreadable

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


def _packages(cuda: int) -> Packages:
    plugin = f"jax-cuda{cuda}-plugin=={jaxlib_version()}"  # brings its pjrt
    return Packages(f"cuda{cuda}", (plugin, _NVCC[cuda]))


def find_compiler(cuda: int) -> Compiler:
    """The compiler for targets of that CUDA version.

    jaxmem's own folder comes first, then a plugin of JAX's version that is installed beside JAX.

    Raises:
        JaxmemError: there is none; the message gives the command that installs it.
    """
    version, why = jaxlib_version(), ""
    packages = _packages(cuda)
    places = [packages.folder]
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
            why = unreadable(error)
    raise JaxmemError(
        f"{why}Compiling for a GPU that is not in the machine needs XLA's CUDA {cuda} "
        f"compiler for jaxlib {version}, and it is not installed. Run\n"
        f"    python -m jaxmem install-compiler --cuda {cuda}\n"
        f"which runs (pip install 'jaxmem[gpu-compiler]' gives it the pip it needs)\n"
        f"    {packages.how()}\n"
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
    return _packages(cuda).install()
