"""Pages in a real browser: `opened` loads one and says what went wrong in it.

A module of tests imports `one_browser` beside it.
"""

import contextlib
import pathlib
import shutil

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FOUND = next(filter(None, map(shutil.which, _NAMES)), None)

needs_browser = pytest.mark.skipif(
    _FOUND is None, reason="no Chromium on this machine: apt-get install chromium"
)

_CONTRAST = (pathlib.Path(__file__).parent / "contrast.js").read_text("utf-8")


_running = None  # the browser of the module that is tested


@pytest.fixture(scope="module", autouse=True)
def one_browser():
    """One browser for all tests of a module that imports this: starting one takes seconds."""
    global _running
    if _FOUND is None:
        yield
        return
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        options = {"executable_path": _FOUND, "args": ["--no-sandbox"]}
        _running = playwright.chromium.launch(**options)
        yield
        _running.close()
        _running = None


@contextlib.contextmanager
def opened(path, width=1200, height=900, scheme="light"):
    """The page of a file; afterwards: it made no error and asked for nothing else."""
    viewport = {"width": width, "height": height}
    page = _running.new_page(viewport=viewport, color_scheme=scheme)
    errors, requests = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert errors == [] and requests == [path.as_uri()]


def faint_texts(page):
    """How many texts a page shows, and those that are too faint, with their contrast."""
    return page.evaluate(_CONTRAST)


def overlap(page, one: str, other: str) -> float:
    """Square pixels that two elements share."""
    first, second = (page.locator(name).bounding_box() for name in (one, other))
    sides = [
        min(first[at] + first[size], second[at] + second[size]) - max(first[at], second[at])
        for at, size in (("x", "width"), ("y", "height"))
    ]
    return max(0, sides[0]) * max(0, sides[1])


def fits_its_width(page) -> bool:
    """Whether nothing has to be scrolled to the side."""
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")
