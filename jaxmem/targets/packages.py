"""Compilers as Python packages in folders of their own.

In site-packages JAX takes any compiler's plugin for a backend, tries it at the first use of any
backend, and prints a traceback on a machine without the device; a folder of their own keeps them
out of everyone's way, and lets several versions stand side by side.
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

_PART = ".part"
_STALE = 86400  # seconds: no installation takes so long


def jaxlib_version() -> str:
    return importlib.metadata.version("jaxlib")


def unreadable(error: OSError) -> str:
    """What to say where the folder of compilers cannot be read."""
    return (
        f"The folder of jaxmem's compilers cannot be read ({error}). Set JAXMEM_CACHE to one that "
        "can be.\n"
    )


@dataclasses.dataclass(frozen=True)
class Packages:
    """What pip installs for a compiler, once for each version of jaxlib and Python."""

    name: str
    requirements: tuple[str, ...]

    @property
    def folder(self) -> pathlib.Path:
        """Where they are, or will be."""
        python = "py{}{}".format(*sys.version_info)
        return cache_folder() / "compilers" / f"{self.name}-{jaxlib_version()}-{python}"

    def pip(self, folder: pathlib.Path) -> list[str]:
        """The command that puts them into a folder, after Python's name."""
        return ["-m", "pip", "install", "--target", str(folder), *self.requirements]

    def how(self) -> str:
        """The command, for a message."""
        return shlex.join(["python", *self.pip(self.folder)])

    def install(self) -> pathlib.Path:
        """Installs them if they are not there, and returns the folder.

        Raises:
            JaxmemError: pip is missing or failed, with its last lines.
        """
        folder = self.folder
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
                    self._install(folder)
        except OSError as error:
            raise JaxmemError(
                f"The compiler cannot be put into {folder.parent} ({error}). Set JAXMEM_CACHE to a "
                "folder that can be written."
            ) from error
        return folder

    def _install(self, folder: pathlib.Path) -> None:
        """Into a folder beside it, which gets its name when it is whole."""
        _tidy(folder.parent)
        staging = pathlib.Path(tempfile.mkdtemp(_PART, folder.name, folder.parent))
        staging.chmod(0o755)  # a cache may be shared
        command = [sys.executable, *self.pip(staging), "--quiet", "--disable-pip-version-check"]
        try:
            done = subprocess.run(
                command, text=True, stderr=subprocess.STDOUT, stdout=subprocess.PIPE
            )
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
