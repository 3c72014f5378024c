"""The loop of all searches with the compiler: rounds, and what counts of them."""

import itertools
import random
import threading
import time
import types

import pytest

import jaxmem
from jaxmem.rematerialization import search
from jaxmem.rematerialization.corrections import Outcome
from jaxmem.rematerialization.search import PendingCompilation, Search


def searched(rounds, compiled, seconds=None, compilations=6, allowed=100):
    """A search over names, with compiled bytes by name (an error is raised), that take seconds by
    name; and the names that were stopped, in order."""
    search, stopped, threads = Search(allowed, compilations), [], {}
    ended = {name: threading.Event() for name in compiled}

    def compile(name):
        time.sleep((seconds or {}).get(name, 0))
        ended[name].set()

    def finish(name):
        ended[name].wait()
        if isinstance(compiled[name], Exception):
            raise compiled[name]
        return Outcome("", compiled[name] or 0, 100, compiled[name], name)

    def start(name):
        threads[name] = threading.Thread(target=compile, args=(name,))
        threads[name].start()
        return PendingCompilation(name, lambda: finish(name), lambda: stopped.append(name))

    def proposals():
        yield from rounds

    search.run(proposals(), start)
    for thread in threads.values():
        thread.join()
    return search, stopped


@pytest.mark.parametrize("seed", range(5))
def test_what_is_found_does_not_depend_on_which_is_there_first(seed):
    rounds = [["a", "b"], ["c", "d"], ["e", "f"]]
    compiled = {"a": 120, "b": 90, "c": 105, "d": 101, "e": 99, "f": 80}
    seconds = {name: random.Random(f"{seed} {name}").random() / 20 for name in compiled}
    search, _ = searched(rounds, compiled, seconds, compilations=9)
    assert list(search.outcomes) == ["a", "b", "c", "d", "e"]
    assert list(search.corrections.ratios) == ["a", "b", "c", "d", "e"] and search.best == "b"


def test_what_is_beside_one_that_fits_is_stopped_and_does_not_count():
    search, stopped = searched([["a", "b"], ["c"]], {"a": 90, "b": 80, "c": 101})
    assert list(search.outcomes) == ["a", "c"] and "b" in stopped
    assert search.remaining == 4


def test_the_last_compilation_but_one_has_nothing_beside_it():
    """So that one is left for what is sure to be small."""
    compiled = dict.fromkeys("abcdef", 120)
    search, _ = searched([["a", "b"], ["c", "d"], ["e", "f"]], compiled, compilations=4)
    assert list(search.outcomes) == ["a", "b", "c", "e"]


def test_errors_count_of_the_first_of_a_round_alone():
    error = jaxmem.CompileError("no such kernel")
    search, _ = searched([["a", "b"], ["c"]], {"a": 120, "b": error, "c": 90})
    assert search.outcomes["b"].compiled is None and search.best == "c"
    assert "no such kernel" in search.outcomes["b"].message
    with pytest.raises(jaxmem.CompileError, match="no such kernel"):
        searched([["a", "b"]], {"a": error, "b": 90})


def test_an_error_or_an_interrupt_stops_what_was_begun():
    stopped = []

    def start(name):
        if name == "b":
            raise KeyboardInterrupt
        return PendingCompilation(
            name, lambda: pytest.fail("nobody waits"), lambda: stopped.append(name)
        )

    with pytest.raises(KeyboardInterrupt):
        Search(100, 6).run([["a", "b"]], start)
    assert stopped == ["a"]


@pytest.mark.parametrize(("first", "outcomes"), [(90, ["a"]), (120, ["a", "b", "c"])])
def test_an_error_at_the_start_of_the_second_counts_where_it_is_wanted(first, outcomes):
    def start(name):
        if name == "b":
            raise jaxmem.JaxmemError("cannot be lowered")
        size = {"a": first, "c": 80}[name]
        return PendingCompilation(name, lambda: Outcome("", size, 100, size, name), lambda: None)

    search = Search(100, 6)
    search.run([["a", "b"], ["c"]] if first > 100 else [["a", "b"]], start)
    assert list(search.outcomes) == outcomes and search.best == outcomes[-1]
    if first > 100:
        assert "cannot be lowered" in search.outcomes["b"].message
    with pytest.raises(jaxmem.JaxmemError, match="cannot be lowered"):
        Search(100, 6).run([["b", "a"]], start)


def test_progress_says_what_is_compiled_how_many_and_how_long(caplog, monkeypatch):
    clock = itertools.chain([10.0, 10.6], itertools.repeat(10.8))
    monkeypatch.setattr(search, "time", types.SimpleNamespace(monotonic=clock.__next__))
    searched([["a", "b"], ["c"]], {"a": 120, "b": 90, "c": 101})
    said = [record.getMessage() for record in caplog.records]
    alternative = "; beside it, in case it does not fit: b"
    assert said[0] == f"jaxmem: compiling 1 of at most 6: a{alternative}"
    assert said[1] == "jaxmem: compiled 1 of at most 6; up to about 3 s more"
    assert said[3] == "jaxmem: compiling 3 of at most 6: c"


def test_what_is_dropped_has_no_number(caplog):
    """So that no number is told twice."""
    searched([["a", "b"], ["c"]], {"a": 90, "b": 80, "c": 101})
    said = [record.getMessage() for record in caplog.records]
    numbers = [line.split(" of at most")[0] for line in said]
    assert numbers == [f"jaxmem: compil{end} {n}" for n in (1, 2) for end in ("ing", "ed")]


def test_what_missed_the_budget_has_missed_it_for_all_that_are_projected_alike():
    found, _ = searched([["a"], ["b"], ["c"]], {"a": 120, "b": 90, "c": None})
    assert found.has_missed(100, ["a"]) and found.has_missed(100, ["a", "b"])
    assert not found.has_missed(100, ["b", "c"])  # it fits, or is no program
    assert not found.has_missed(102, ["a"]) and not found.has_missed(98, ["a"])
    # What nearly fits leaves hope for one more.
    near, _ = searched([["b"], ["d"]], {"b": 90, "d": 101})
    assert not near.has_missed(100, ["d"])
    nearer, _ = searched([["d"], ["e"]], {"d": 101, "e": 101})
    assert nearer.has_missed(100, ["d", "e"]) and not nearer.has_missed(102, ["d", "e"])
    assert not nearer.has_missed(100, ["d"])
