"""What a search shows while it runs: a bar in a terminal, lines elsewhere."""

import io
import itertools
import logging
import logging.handlers
import re
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from programs import array

import jaxmem
from jaxmem.cli.output import progress
from jaxmem.ground import bars
from jaxmem.ground.bar import Bar
from jaxmem.ground.progress import counting, expect, tell
from jaxmem.targets import compilation, durations
from jaxmem.targets.cache import cache_folder


class Terminal(io.StringIO):
    """A console that claims to be a terminal."""

    def isatty(self):
        return True


class NoHandlers(list):
    """The root logger's, without those that pytest adds."""

    def append(self, handler):
        pass


def terminal(monkeypatch):
    """Makes stderr a terminal of 120 columns, without pytest's own log handlers; returns what reads
    it. To be called in the test: pytest sets stderr before each."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(logging.getLogger(), "handlers", NoHandlers())
    written = Terminal()
    monkeypatch.setattr(sys, "stderr", written)
    return lambda: re.sub(r"\x1b\[[\d;?]*\w", "", written.getvalue())


def clocked(monkeypatch, bar, seconds):
    """So many seconds after what runs began."""
    now = bar.began + seconds
    monkeypatch.setattr(time, "monotonic", lambda: now)


def test_time_left_by_what_was_compiled_here(monkeypatch):
    bar = Bar("", 6)
    assert bar.remaining_seconds is None
    bar.begin(2)
    bar.expect(None)
    assert bar.remaining_seconds is None
    clocked(monkeypatch, bar, 10)
    bar.finish()
    assert bar.remaining_seconds == 4 * 10  # the one beside it should be there, four more may come
    bar.finish()
    bar.begin(1)
    assert bar.remaining_seconds == 4 * 10
    clocked(monkeypatch, bar, 4)
    assert bar.remaining_seconds == 4 * 10 - 4
    clocked(monkeypatch, bar, 400)
    assert bar.remaining_seconds == 3 * 10


def test_time_left_by_what_the_cache_remembers(monkeypatch):
    bar = Bar("", 3)
    bar.begin(1)
    bar.expect(8.0)
    clocked(monkeypatch, bar, 2)
    assert bar.remaining_seconds == 6 + 2 * 8
    clocked(monkeypatch, bar, 4)
    bar.finish()
    assert bar.remaining_seconds == 2 * 4  # what was measured here counts more
    found = Bar("", 3)
    found.begin(1)
    clocked(monkeypatch, found, 0.5)
    found.finish()
    assert found.remaining_seconds == 2 * 0.5  # in the cache, as those after it may be


def test_durations_are_kept_beside_the_results(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "new"))
    assert durations.expected("h200", 1000) is None
    durations.remember("h200", 1000, 3.0)
    durations.remember("h200", 100_000, 60.0)
    durations.remember("v5e", 2000, 600.0)
    assert durations.expected("h200", 2000) == 6.0
    assert durations.expected("h200", 90_000) == 54.0
    with (cache_folder() / "durations").open("a") as file:
        file.write("h200 17\nh200 0 1\nh200 x 1\n")  # cut short, damaged
    assert durations.expected("h200", 2000) == 6.0
    for size in range(1, 500):
        durations.remember("h200", size, 1.0)
    assert len((cache_folder() / "durations").read_text().splitlines()) <= 400
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXMEM_CACHE", str(tmp_path / "file"))  # no folder
    durations.remember("h200", 1, 1.0)
    assert durations.expected("h200", 1) is None


def seen(read, pattern):
    """Whether it is drawn in a minute: another thread does."""
    until = time.monotonic() + 60
    while not re.search(pattern, read()) and time.monotonic() < until:
        time.sleep(0.05)
    return re.search(pattern, read())


def test_a_bar_in_a_terminal(monkeypatch):
    read = terminal(monkeypatch)
    with progress("planning"), counting(6) as bar:
        bar.begin(2)
        expect(900.0)  # so long that a slow machine does not end it
        bar.show("compiling dp, " + "a very long name of it " * 9)
        assert seen(read, r"0 of at most 6, \d+ s, up to about \d+ (s|min) more")
        bar.finish()
        tell("jaxmem: compiled 1 of at most 6")
        assert seen(read, r"1 of at most 6, \d+ s")
    text = read()
    assert "planning ..." in text and "compiling dp, a very long name" in text
    assert "jaxmem: compiled" not in text  # the bar says it
    assert max(map(len, re.split(r"[\r\n]", text))) <= 120
    tell("afterwards")
    assert read().endswith("s\nafterwards\n")


@pytest.mark.parametrize("case", ["pipe", "silenced", "dumb"])
def test_no_bar_elsewhere(monkeypatch, case):
    read = terminal(monkeypatch)
    if case == "pipe":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    if case == "silenced":
        monkeypatch.setattr(logging.getLogger("jaxmem"), "level", logging.WARNING)
        logging.getLogger("jaxmem").manager._clear_cache()
    if case == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    with counting(6) as bar:
        bar.begin()
        tell("a line")
        assert bars._display is None
    lines = {"pipe": "a line\n", "dumb": "a line\n"}
    assert read().strip("\n") == lines.get(case, "").strip("\n")
    if case == "silenced":
        logging.getLogger("jaxmem").manager._clear_cache()


def test_handlers_of_the_program_have_the_records(monkeypatch):
    """Those that write to the terminal leave it to the bar: libraries bring some along."""
    read = terminal(monkeypatch)
    kept = logging.handlers.BufferingHandler(10)
    handlers = [kept, logging.StreamHandler(sys.stderr), logging.StreamHandler(io.StringIO())]
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    with counting(6) as bar:
        bar.show("compiling")
        tell("a line")
        logging.getLogger("other").warning("of another")
    assert [record.getMessage() for record in kept.buffer] == ["a line", "of another"]
    assert handlers[2].stream.getvalue() == "a line\nof another\n"
    assert "0 of at most 6" in read() and "of another" in read() and "a line" not in read()
    tell("afterwards")
    assert read().endswith("afterwards\n")


def deep(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def test_searches_count_in_a_terminal(monkeypatch):
    read = terminal(monkeypatch)
    params, x = [array(64, 64)] * 3, array(256, 64)
    jaxmem.plan(deep, params, x, target="h200", budget="1GiB")
    text = read()
    assert re.search(r"compiling .* projected \.\.\. .*0 of at most \d", text)
    assert "jaxmem: comp" not in text

    def make(batch):
        return jax.grad(deep), (params, array(8 * batch, 64))

    jaxmem.largest(make, target="h200", budget="1MiB", compilations=2)
    assert re.search(r"compiling number 1 for h200 \.\.\. .*0 of at most 2", read())
    assert "jaxmem: comp" not in read()


def test_a_compilation_is_remembered_for_the_next_one(monkeypatch, tmp_path):
    monkeypatch.setattr(durations, "_path", lambda: tmp_path / "durations")
    read = terminal(monkeypatch)
    number = itertools.count()
    monkeypatch.setattr(compilation, "_result_path", lambda *_: tmp_path / f"{next(number)}")
    for more in (0, 8):
        with progress("one step"):
            jaxmem.memory(deep, [array(64, 64)], array(64 + more, 64), target="h200")
    (first, _) = (line.split() for line in (tmp_path / "durations").read_text().splitlines())
    assert first[0] == "h200" and int(first[1]) > 500
    monkeypatch.setattr(durations, "expected", lambda target, size: 50.0)
    with progress("one step"):
        jaxmem.memory(deep, [array(64, 64)], array(64 + 16, 64), target="h200")
        assert seen(read, "one step .* s, up to about [1-5]?. s more")


def test_a_long_compilation_is_told(monkeypatch, caplog):
    monkeypatch.setattr(compilation, "_LONG", 0.01)
    monkeypatch.setattr(compilation, "read", lambda path: None)
    caplog.set_level(logging.INFO, "jaxmem")
    jaxmem.memory(lambda x: jnp.sin(x) * 0.0123, array(64), target="h200", timeout=500)
    told = "jaxmem: XLA compiles for h200, longer than 0.01 s; at most 500 s"
    assert [record.message for record in caplog.records] == [told]


def test_a_short_compilation_is_not_told(caplog):
    caplog.set_level(logging.INFO, "jaxmem")
    jaxmem.memory(lambda x: jnp.sin(x) * 0.0123, array(64), target="h200")
    assert not caplog.records
