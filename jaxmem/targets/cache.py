"""Results of compilations, kept on disk and checked when they are read."""

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import pathlib
import tempfile
import time

import platformdirs

from jaxmem.ground.errors import JaxmemError

_FORMAT = "jaxmem result 2"  # a file of another format fails its checksum
_SUFFIX, _PART = ".compiled", ".part"
_KEPT = 1000  # results, 26 kB each in the mean of a cache of ours; chosen
_STALE = 3600  # seconds: a file still unfinished was left by a process that died


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA said of one program: bytes by name, the optimised HLO and, where asked for, its
    buffer assignment and live ranges (``dump``, by name), all texts gzipped."""

    stats: dict[str, int]
    compressed_hlo: bytes = dataclasses.field(repr=False)
    dump: dict[str, bytes] = dataclasses.field(repr=False, default_factory=dict)

    @property
    def hlo(self) -> str:
        """The optimised, scheduled HLO as text."""
        return gzip.decompress(self.compressed_hlo).decode()


def cache_folder() -> pathlib.Path:
    """Where jaxmem keeps compilers and compiled results: ``JAXMEM_CACHE``, or the user's cache.

    Raises:
        JaxmemError: there is no home folder.
    """
    chosen = os.environ.get("JAXMEM_CACHE")
    if chosen:
        return pathlib.Path(chosen)
    try:
        return platformdirs.user_cache_path("jaxmem", appauthor=False)
    except RuntimeError as error:
        raise JaxmemError(
            "There is no home folder to keep XLA's compilers and their results in. Set "
            "JAXMEM_CACHE to a folder that can be written."
        ) from error


def result_path(folder: pathlib.Path, key: str) -> pathlib.Path:
    """Where the result of a program is kept: its checksum is of the name too."""
    return folder / f"{key}{_SUFFIX}"


def read(path: pathlib.Path) -> Compiled | None:
    """The result kept there; None: there is none, or it is unreadable, damaged or another's."""
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if checksum != _checksum(path, content):
        return None
    header, _, rest = content.partition(b"\n")
    fields = json.loads(header)
    parts = {}
    for name, size in fields["parts"]:
        parts[name], rest = rest[:size], rest[size:]
    with contextlib.suppress(OSError):  # of another user's file
        os.utime(path)
    return Compiled(fields["stats"], parts.pop("hlo"), parts)


def write(path: pathlib.Path, compiled: Compiled) -> None:
    """Keeps a result, in place of what is there. A folder that cannot be written, or a full disk,
    costs time and leaves nothing behind."""
    parts = {"hlo": compiled.compressed_hlo, **compiled.dump}
    sizes = [(name, len(part)) for name, part in parts.items()]
    header = json.dumps({"stats": compiled.stats, "parts": sizes}).encode()
    content = header + b"\n" + b"".join(parts.values())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=_PART)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_checksum(path, content) + b"\n" + content)
            os.replace(name, path)
        finally:
            pathlib.Path(name).unlink(missing_ok=True)
        _tidy(path.parent)


def _checksum(path: pathlib.Path, content: bytes) -> bytes:
    about = f"{_FORMAT}\n{path.name}\n".encode()
    return hashlib.sha256(about + content).hexdigest().encode()


def _tidy(folder: pathlib.Path) -> None:
    """Removes what dead processes left half-written, and the results least recently used."""
    for part in folder.glob(f"*{_PART}"):
        if part.stat().st_mtime < time.time() - _STALE:
            part.unlink(missing_ok=True)
    kept = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime)
    for old in kept[:-_KEPT]:
        old.unlink(missing_ok=True)
