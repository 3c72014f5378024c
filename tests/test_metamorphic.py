"""Random programs under random plans, against themselves unplanned, in many ways.

``make test`` runs none of them, ``make test-all`` 400 with fixed seeds, ``make fuzz`` as many as
JAXMEM_FUZZ says with seeds of the day. ``JAXMEM_SEED=n pytest tests/test_metamorphic.py`` runs
every check on one program and prints it.
"""

import collections
import datetime
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import metamorphic_checks as checks
import metamorphic_numpy
import pytest
from metamorphic import program

ONE = os.environ.get("JAXMEM_SEED")
COUNT = int(os.environ.get("JAXMEM_FUZZ", 400))
CHUNK = 20
DAY = os.environ.get("JAXMEM_DAY", datetime.date.today().strftime("%Y%m%d"))
FIRST = int(DAY) * 100_000 if "JAXMEM_FUZZ" in os.environ else 0

pytestmark = pytest.mark.filterwarnings("ignore")  # of the programs: casts, NaN, other libraries


def report(failures):
    assert not failures, f"{len(failures)} failures\n\n" + "\n\n".join(failures)


@pytest.mark.skipif(ONE is not None, reason="JAXMEM_SEED asks for one program")
@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(-(-COUNT // CHUNK)))
def test_random_programs(chunk):
    start = FIRST + chunk * CHUNK
    failures, made, unusable = [], 0, collections.Counter()
    for seed in range(start, start + CHUNK):
        found, count, why = checks.run_seed(seed, shrink=len(failures) < 3)
        failures += found
        made += count
        unusable["gradients" if any(w.startswith("gradients") for w in why) else "other"] += bool(
            why
        )
    if chunk % 20 == 19:
        jax.clear_caches()  # thousands of programs would fill the memory
    report(failures)
    # Enough was compared: a generator whose programs cannot be differentiated proves nothing.
    assert made >= 0.8 * CHUNK, f"seeds {start} to {start + CHUNK}: {made} checks, {unusable}"


@pytest.mark.skipif(ONE is None, reason="JAXMEM_SEED is not set")
def test_one_seed():
    print(program(int(ONE)).listing())
    every = [check for _, check in checks.CHECKS]
    failures, _, why = checks.run_seed(int(ONE), checks=every)
    print("\n".join(why))
    report(failures)


FOUR = """
import jax, sys
jax.config.update("jax_enable_x64", True)
import metamorphic_checks as checks
assert len(jax.devices()) == 4
made, failures = 0, []
for seed in range(*map(int, sys.argv[1:])):
    found, count, _ = checks.run_seed(seed, checks=[checks.gradients, checks.sharded], shrink=False)
    failures += found
    made += count
print("\\n\\n".join(f.split("jaxpr:")[0] for f in failures))
sys.exit(bool(failures) or made < 5)
"""


@pytest.mark.slow
def test_four_devices():
    """Programs inside `shard_map` over four devices, and with `shard_map` inside."""
    folder = Path(__file__).parent
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)]),
    }
    first = FIRST + 90_000
    last = first + (10 if "JAXMEM_FUZZ" not in os.environ else COUNT // 50)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FOUR, str(first), str(last)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# The checks can fail: functions that are wrong on purpose


def found_by(check, apply, seeds=range(16)):
    """Whether a check tells the programs that ``apply`` makes from the plain ones; of how many."""
    wrong = made = 0
    for seed in seeds:
        case = checks.case_of(seed, apply)
        try:
            wrong += checks.attempt(check, case, seed) is not None
            made += 1
        except checks.Unusable:
            pass
    return wrong, made


def one_part_in_a_million(p):
    def wrong(*args, **kwargs):
        loss, aux = p(*args, **kwargs)
        return loss + 1e-6 * (loss - jax.lax.stop_gradient(loss)), aux

    return wrong


def other_aux(p):
    def wrong(*args, **kwargs):
        loss, aux = p(*args, **kwargs)
        return loss, aux | {"two": 3}

    return wrong


def strong_types(p):
    def wrong(*args, **kwargs):
        loss, aux = p(*args, **kwargs)
        return loss.astype(jnp.float16), aux

    return wrong


def keeps_more(p):
    def wrong(*args, **kwargs):
        loss, aux = p(*args, **kwargs)
        return loss + 1e-30 * jnp.sum(jnp.sin(jnp.full(1000, loss))), aux

    return wrong


@pytest.mark.parametrize(
    ("check", "apply"),
    [
        (checks.gradients, one_part_in_a_million),
        (checks.kept_bytes, keeps_more),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                (checks.gradients, other_aux),
                (checks.forward, other_aux),
                (checks.types, strong_types),
                (checks.vmapped, one_part_in_a_million),
                (checks.linearized, one_part_in_a_million),
                (checks.with_dead_code, one_part_in_a_million),
            )
        ),
    ],
)
def test_a_wrong_function_is_found(check, apply):
    float64 = [seed for seed in range(12) if program(seed).dtype == "float64"][:4]
    wrong, made = found_by(check, apply, float64)
    assert made >= 2
    assert wrong == made


def test_a_right_function_passes():
    for check in (checks.gradients, checks.types, checks.kept_bytes):
        wrong, made = found_by(check, lambda p: p, range(5))
        assert made >= 3
        assert wrong == 0


def test_a_rule_that_runs_once_for_each_reader_is_found():
    """Plain JAX runs a rule once, on the sum of cotangents."""
    wrong, made = found_by(checks.gradients, lambda p: p.split_rules())
    assert made >= 10
    assert wrong >= 2


def test_a_failure_says_how_to_reproduce_it():
    case = checks.case_of(1, one_part_in_a_million)
    texts, _, _ = checks.run_seed(1, one_part_in_a_million, checks=[checks.gradients])
    assert len(texts) == 1
    for part in ("JAXMEM_SEED=1", repr(case.planner), "relative difference", "loss =", "jaxpr:"):
        assert part in texts[0]


def test_plans_have_regions():
    """The programs are ones that planners act on."""
    acted = made = 0
    for seed in range(12):
        p = program(seed)
        try:
            acted += bool(checks.make_plan(p, "dp", None).regions)
            made += 1
        except Exception:
            continue
    assert acted >= made / 3


def test_numpy_evaluates_as_xla_does():
    compared = 0
    for seed in range(8):
        p = program(seed)
        if p.dtype != "float64":
            continue
        args, kwargs = p.arguments()
        fun, arrays = metamorphic_numpy.on_arrays(checks.differentiated(p, p), *args, **kwargs)
        try:
            expected = jax.jit(fun, compiler_options=checks.QUICK)(*arrays)
        except Exception:
            continue
        found = checks.by_numpy(p, p)
        if checks.finite(expected):
            try:
                checks.same(p, expected, found, "NumPy", 10)
            except checks.Unusable:
                continue
            compared += 1
    assert compared >= 4
