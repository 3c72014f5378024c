"""Every constant that was chosen is measured: benchmarks/planner/sensitivity.py has it."""

import pathlib
import re

import pytest

from benchmarks._record import results_of
from benchmarks.planner.sensitivity import changes, constants

ROOT = pathlib.Path(__file__).parents[1]
RUNS = results_of("planner")["sensitivity"]["runs"]
HEADS = ("half", "twice", "far below", "far above")
KEYS = [one.key for one in constants()]
# What bounds the time of one step of planning, or decides where a compiler does: in their comments
# is what was looked at instead.
ELSEWHERE = {
    "planning.dp._MAX_SHARD_MAPS",
    "planning.mapped._OPTIONS",
    "planning.bound._CANDIDATE_CUTS",
    "planning.bound._SOLVED_CUTS",
    "planning.named_counts._CHUNK",
    "planning.per_block.SMALL_BESIDE",
    "program.costs._NESTED",
    "program.expansions._MOST",
    "program.uses._MANY",
    "program.opaque._MAX_REORDERED",
    "program.derivatives.pooling._WINDOW",
    "fitting.capacity._MAX_GROWTH",
    "fitting.capacity._JUMP_RATIO",
    "fitting.costs._PROGRAMS",
    "fitting.devices._HOPELESS",
    "fitting.sizes._MOST_SLICES",
    "fitting.table._NAMED",
    "fitting.choice_page._SHOWN",
    "rematerialization.compiled_per_block._EXACT",
    *(f"rematerialization.compiled_plans.{name}" for name in ("_RECHECK_ERROR", "_SOME_ROOM")),
    "rematerialization.loop_budgets._STATES",
    *(f"rematerialization.search.{name}" for name in ("TRY_PLAIN_LIMIT", "_ALIKE")),
    "rematerialization.policies._EXPENSIVE",
    "rematerialization.timelines._POINTS",
    *(f"planning.names.{name}" for name in ("MOST", "_GOALS", "_EQUAL", "_OVERLAP")),
    *(f"rematerialization.corrections.{name}" for name in ("_NEAR", "_BORROWED_STEPS")),
    *(f"rematerialization.named.search.{n}" for n in ("_ABOVE", "_WORTH")),
    "rematerialization.named.search._MIN_PRICE_GAIN",
    "rematerialization.named.suggesting._SMALL",
}


def numbers(*wings: str):
    """Constants that are numbers, and the comments above and beside them."""
    for wing in wings:
        for path in sorted((ROOT / "jaxmem" / wing).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / "jaxmem").with_suffix("").parts)
            above, before = "", ""
            for line in path.read_text().splitlines():
                if line.startswith("#"):
                    above = above + line if before.startswith("#") else line
                elif found := re.match(r"(_?[A-Z][A-Z_]+).* = [-(]*\d.*?(#.*)?$", line):
                    yield f"{module}.{found[1]}", (above + (found[2] or "")).lower()
                else:
                    above = ""
                before = line


WINGS = ("planning", "program", "rematerialization", "fitting")


def test_every_chosen_constant_is_measured():
    chosen = {name for name, comment in numbers(*WINGS) if "chosen" in comment}
    assert chosen - set(KEYS) == ELSEWHERE


def test_every_default_number_says_where_it_comes_from():
    """Those of what searches and tables may do, in the lines of signatures."""
    silent, found = [], 0
    for path in sorted((ROOT / "jaxmem").rglob("*.py")):
        for line in path.read_text().splitlines():
            if re.match(r"\s+(compilations|points|most): int( \| None)? = [1-9]", line):
                found += 1
                silent += [f"{path.name}: {line}"] if "# chosen" not in line else []
    assert not silent
    assert found >= 9


def test_every_number_says_where_it_comes_from():
    origin = re.compile(r"\b(chosen|measured|derived|by definition)\b")
    found = dict(numbers(*WINGS, "targets/cuda", "targets/tpu"))
    assert not [name for name, comment in found.items() if not origin.search(comment)]
    assert len(found) > 80


# What changes nothing on the programs of the table, even far off: it bounds the time of planning,
# or the test that is named needs it.
NEEDED = {
    "planning.variants._FLOOR_MEMORIES": (
        "test_memory_grows_as_the_square_root_by_sqrt_and_as_the_logarithm_by_dp"
    ),
    "planning.loops._MENU_RATIO": "test_both_schedules_are_about_the_best_together",
    "planning.repeating._ALIKE": "test_blocks_are_found_by_what_repeats",
    "planning.repeating._INSIDE": "test_blocks_end_where_the_least_crosses_of_all_of_them",
    "planning.repeating._PART": "test_the_first_block_may_differ_from_the_others",
    "rematerialization.compiled_plans._OVER_BUDGET_STEPS": (
        "test_what_is_projected_a_little_too_large_is_tried_last"
    ),
    "fitting.search._RETRY_RANGE": "test_plans_between_two_that_do_not_fit_are_tried",
    "fitting.search._OVERPLAN": "test_plans_above_those_that_do_not_fit_are_tried",
}


def test_no_constant_changes_nothing():
    idle = None
    for run in RUNS.values():
        still = {
            row["constant"]
            for row in run["rows"]
            if not changes("".join(row[head] for head in HEADS))
        }
        idle = still if idle is None else idle & still
    assert idle == set(NEEDED)
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert all(f"def {name}(" in tests for name in NEEDED.values())


@pytest.mark.parametrize("run", RUNS)
def test_the_table_is_of_these_constants(run):
    rows = RUNS[run]["rows"]
    assert [row["constant"] for row in rows] == KEYS
    values = {one.key: one.value for one in constants()}
    for row in rows:
        value = values[row["constant"]]
        first = value[0] if isinstance(value, tuple) else value
        assert row["value"].lstrip("(").split(",")[0] == f"{first:.4g}"
