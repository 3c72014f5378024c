"""A step compiled by another Python, or from another folder."""

import os
import pathlib
import subprocess
import sys
from typing import Any

from jaxmem.cli.output import progress
from jaxmem.ground.errors import JaxmemError
from jaxmem.reports import read_report


def estimate_elsewhere(options) -> dict[str, Any]:
    """The report, as plain data, of ``options.before`` in the environment ``options.python`` and
    the folder ``options.directory``.

    Raises:
        JaxmemError: there is no such Python or folder, or the estimate fails there.
    """
    folder = pathlib.Path(options.directory or os.getcwd())
    if not folder.is_dir():
        raise JaxmemError(f"There is no folder {str(folder)!r}.")
    python = _python(options.python)
    command = [python, "-m", "jaxmem", "estimate", options.before, "--json"]
    command += ["--target", options.target, "--count", str(options.count)]
    where = " ".join(filter(None, (options.python, options.directory)))
    with progress(f"compiling {options.before} in {where}"):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise JaxmemError(f"The estimate of {options.before} in {where} fails: {said[0]}")
    return read_report(done.stdout)


def _python(environment: str | None) -> str:
    if environment is None:
        return sys.executable
    path = pathlib.Path(environment)
    found = path / "bin" / "python" if path.is_dir() else path
    if not found.is_file():
        raise JaxmemError(
            f"--python names an environment's folder or its Python; there is no {str(found)!r}."
        )
    return os.path.abspath(found)
