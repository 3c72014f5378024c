"""How long compilations took on this machine: so that the next one is told for how long to wait."""

import contextlib
import math
import pathlib

from jaxmem.targets.cache import cache_folder

_LINES = 200  # that are kept; there are up to twice as many in the file. Chosen.


def remember(target: str, size: int, seconds: float) -> None:
    """Keeps the seconds that a module of so many bytes took for a target. A folder that cannot be
    written costs nothing."""
    with contextlib.suppress(OSError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{target} {size} {seconds:.2f}\n")  # in one piece, beside other processes
        lines = path.read_text("utf-8").splitlines(keepends=True)
        if len(lines) > 2 * _LINES:
            path.write_text("".join(lines[-_LINES:]), "utf-8")


def expected(target: str, size: int) -> float | None:
    """Seconds that a module of so many bytes may take: as long as the nearest one, by its size;
    None: none was compiled for the target."""
    known = [(bytes, seconds) for name, bytes, seconds in _lines() if name == target]
    if not known:
        return None
    nearest, seconds = min(reversed(known), key=lambda one: abs(math.log(one[0] / size)))
    return seconds * size / nearest


def _lines() -> list[tuple[str, int, float]]:
    try:
        text = _path().read_text("utf-8")
    except (OSError, UnicodeError):
        return []
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):  # of a line that was cut
            name, size, seconds = line.split()
            if int(size) > 0:
                found.append((name, int(size), float(seconds)))
    return found


def _path() -> pathlib.Path:
    return cache_folder() / "durations"
