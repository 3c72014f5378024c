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

_FORMAT = "jaxmem result 3"  # a file of another format fails its checksum
_SUFFIX, _PART = ".compiled", ".part"
# Bytes of all results; the heavy tests leave 40 MB, a ResNet50 step 0.5 MB. Chosen.
_MOST = 500 * 2**20
_STALE = 3600  # seconds: a file still unfinished was left by a process that died


@dataclasses.dataclass(frozen=True)
class CachedProgram:
    """What XLA said of one program.

    Attributes:
        texts: the optimised, scheduled program (``hlo``), where its buffers lie
            (``buffer-assignment``) and when they live (``live-range``), gzipped.
        stats: bytes by name of its memory analysis; None: the compilation was stopped when the
            texts were there.
    """

    texts: dict[str, bytes] = dataclasses.field(repr=False)
    stats: dict[str, int] | None = None

    def text(self, kind: str) -> str:
        """One of the texts."""
        return gzip.decompress(self.texts[kind]).decode()


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


def read(path: pathlib.Path) -> CachedProgram | None:
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
    return CachedProgram(parts, fields["stats"])


def write(path: pathlib.Path, compiled: CachedProgram) -> None:
    """Keeps a result, in place of what is there. A folder that cannot be written, or a full disk,
    costs time and leaves nothing behind."""
    sizes = [(name, len(text)) for name, text in compiled.texts.items()]
    header = json.dumps({"stats": compiled.stats, "parts": sizes}).encode()
    content = header + b"\n" + b"".join(compiled.texts.values())
    with contextlib.suppress(OSError):
        put(path, _checksum(path, content) + b"\n" + content)
        _tidy(path.parent)


def put(path: pathlib.Path, content: bytes) -> None:
    """Writes a file at one go, in place of what is there: whoever reads it sees one or the other.

    Raises:
        OSError: the folder cannot be written, or the disk is full. Nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=_PART)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    finally:
        pathlib.Path(name).unlink(missing_ok=True)


def _checksum(path: pathlib.Path, content: bytes) -> bytes:
    about = f"{_FORMAT}\n{path.name}\n".encode()
    return hashlib.sha256(about + content).hexdigest().encode()


def _tidy(folder: pathlib.Path) -> None:
    """Removes what dead processes left half-written, and the results least recently used."""
    for part in folder.glob(f"*{_PART}"):
        if part.stat().st_mtime < time.time() - _STALE:
            part.unlink(missing_ok=True)
    kept = [(path.stat(), path) for path in folder.glob(f"*{_SUFFIX}")]
    size = sum(stat.st_size for stat, _ in kept)
    for stat, path in sorted(kept, key=lambda one: one[0].st_mtime):
        if size <= _MOST:
            break
        path.unlink(missing_ok=True)
        size -= stat.st_size
