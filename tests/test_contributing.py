"""CONTRIBUTING.md: its examples run, and its tables are those of the code."""

import ast
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem import jaxprs
from jaxmem.fitting import LEVERS
from jaxmem.fitting.levers import Lever
from jaxmem.fitting.levers.setting import register
from jaxmem.jaxprs import internals
from jaxmem.optim.codecs import CODECS
from jaxmem.planning import PLANNERS
from jaxmem.program import read_program
from jaxmem.program.derivatives import DERIVATIVES
from jaxmem.targets import FAMILIES, known_targets

ROOT = pathlib.Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.fixture(autouse=True)
def registries():
    """As they were, afterwards."""
    kept = [(registry, dict(registry)) for registry in (PLANNERS, LEVERS, FAMILIES, CODECS)]
    derivatives = list(DERIVATIVES)
    yield
    DERIVATIVES[:] = derivatives
    for registry, entries in kept:
        registry.clear()
        registry.update(entries)
    known_targets.cache_clear()


def run(title: str) -> None:
    """The example of that title."""
    (block,) = re.findall(rf'```python title="{title}"\n(.*?)```', TEXT, re.DOTALL)
    exec(compile(block, f"CONTRIBUTING.md, {title}", "exec"), {"__name__": title})
    known_targets.cache_clear()


def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


SHAPES = ([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jnp.ones((512, 64), jnp.float32))


def test_a_planner():
    with pytest.raises(jaxmem.JaxmemError, match="'halves'"):
        jaxmem.plan(loss, *SHAPES, planner="halves")
    run("planner")
    plan = jaxmem.plan(loss, *SHAPES, planner="halves", budget="1500KiB")
    assert plan.planner == "halves" and len(plan.regions) == 2 and plan.recomputes
    assert plan.predicted.bytes < jaxmem.plan(loss, *SHAPES, budget="1GiB").predicted.bytes
    keys = jax.random.split(jax.random.key(0), 8)
    params = [jax.random.normal(key, (64, 64), jnp.float32) / 8 for key in keys]
    planned, plain = (jax.grad(fun)(params, SHAPES[1]) for fun in (plan.apply(loss), loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), planned, plain)


def test_a_lever(capsys):
    given = (loss, optax.adam(1e-3), *SHAPES)
    options = {"target": "h200", "budget": "1GiB", "allow": "half_moments", "compilations": 1}
    with pytest.raises(jaxmem.JaxmemError, match="half_moments"):
        jaxmem.fit(*given, **options)
    run("lever")
    step = jaxmem.fit(*given, **options)
    settings = {str(one.levers) for one in step.fitting.considered}
    assert any("bfloat16 moments" in setting for setting in settings)
    assert "half_moments" not in step.fitting.refused
    refused = jaxmem.fit(*given, **{**options, "allow": ()}).fitting.refused
    assert "with other rounding" in refused["half_moments"]


def test_a_family_of_targets():
    with pytest.raises(jaxmem.JaxmemError, match="no target named 'half-h200'"):
        jaxmem.target("half-h200")
    run("family")
    half = jaxmem.target("half-h200")
    assert half.family == "lab" and half.memory_bytes == jaxmem.target("h200").memory_bytes // 2
    report = jaxmem.memory(loss, *SHAPES, target="half-h200")
    assert report.device == jaxmem.memory(loss, *SHAPES, target="h200").device
    assert jaxmem.plan(loss, *SHAPES, target=half, compilations=1)


def test_a_codec():
    with pytest.raises(jaxmem.JaxmemError, match="'float16'"):
        jaxmem.optim.small_moments(optax.adam(1e-3), "float16")
    run("codec")
    params, gradients = jnp.ones((64, 64)), jax.random.normal(jax.random.key(0), (64, 64))
    results = []
    for optimizer in (optax.adam(1e-3), jaxmem.optim.small_moments(optax.adam(1e-3), "float16")):
        state = optimizer.init(params)
        for _ in range(3):
            updates, state = optimizer.update(gradients, state, params)
        results.append(updates)
    assert {state.inner[0].mu.dtype, state.inner[0].nu.dtype} == {jnp.dtype("float16")}
    np.testing.assert_allclose(*results, rtol=3e-3)


def test_a_derivative_says_what_its_operation_costs(monkeypatch):
    run("derivative")
    flat = jaxprs.flatten(lambda x: jnp.sum(jnp.cumprod(x) ** 2), [jnp.ones(64)])
    before = read_program(flat)
    for cost in (1000, 0):
        monkeypatch.setattr(
            type(DERIVATIVES[-1]),
            "cost",
            lambda self, one, cost=cost: cost if jaxprs.operation_of(one) == "cumprod" else None,
        )
        after = read_program(flat)
        assert after.flops == before.flops + cost
        (operation,) = (one for one in after.operations if one.name == "cumprod")
        assert operation.fused == (cost == 0)


def test_a_derivative(monkeypatch):
    run("derivative")
    emitted = []
    own = type(DERIVATIVES[-1])
    emit = own.emit
    monkeypatch.setattr(own, "emit", lambda *args: emitted.append(args[1]) or emit(*args))

    def products(w, x):
        return jnp.sum((jnp.cumprod(x @ w, axis=0) @ w) ** 2)

    w, x = jnp.eye(8) * 0.9, jax.random.uniform(jax.random.key(0), (16, 8)) + 0.5
    plan = jaxmem.plan(products, w, x, planner="sqrt")
    np.testing.assert_allclose(
        jax.grad(plan.apply(products))(w, x), jax.grad(products)(w, x), rtol=1e-5
    )
    assert [step.primitive for step in emitted] == ["cumprod"]


def tables() -> list[list[list[str]]]:
    """The cells of each table, without its head."""
    found = re.findall(r"(?:^\|.*\|\n)+", TEXT, re.MULTILINE)
    return [[re.split(r" *\| *", row)[1:-1] for row in table.splitlines()[2:]] for table in found]


def test_the_tables_of_private_names_are_those_of_the_module():
    _, names, members, attributes, _ = tables()
    told = {name.strip("`"): (module.strip("`"), needs) for name, module, needs in names}
    assert told == internals.NAMES
    assert {
        name.strip("`"): tuple(one.strip("`") for one in of.split(", ")) for name, of in members
    } == internals.MEMBERS
    assert {name.strip("`"): needs for name, needs in attributes} == internals.ATTRIBUTES


def test_the_table_of_the_workers_names_is_theirs():
    used = set()
    for path in (ROOT / "jaxmem" / "targets").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxlib."):
                used |= {f"{node.module}.{name.name}" for name in node.names}
            owner = getattr(getattr(node, "value", None), "id", "")
            if isinstance(node, ast.Attribute) and (
                owner in ("xla_client", "extension")
                or (owner == "module" and "registrations" in node.attr)
            ):
                used.add(f"{owner}.{node.attr}")
            if getattr(node, "attr", "").startswith("_make"):
                used.add(f"topology.{node.attr}")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                of, name = node.args[0], getattr(node.args[1], "value", None)
                if getattr(of, "id", "") == "module":
                    used.add(f"module.{name}")
    told = set()
    for names, _ in tables()[-1]:
        first, *others = re.findall("`(.*?)`", names)
        told |= {first, *(f"{first.rpartition('.')[0]}.{name}" for name in others)}
    assert told == used


def test_every_wing_is_told_of():
    wings = {path.parent.name for path in (ROOT / "jaxmem").glob("*/__init__.py")}
    assert {cells[0].strip("`") for cells in tables()[0]} == wings | {
        "jaxmem/__init__.py",
        "jaxmem/pytest.py",
    }


class Half(Lever):
    """bfloat16 compute by what CONTRIBUTING.md says of levers alone."""

    name = "half_compute"
    allowed = {"half_compute": "compute in bfloat16"}  # noqa: RUF012
    changes_loss = shifts_projection_error = True
    changes_state = False

    def values(self, workload):
        return [False, True] if workload.may(self.name) else [False]

    def text(self, value):
        return "bfloat16 compute"

    def loss(self, workload, loss_fn, value):
        return jaxmem.autocast(loss_fn, "bf16")


@pytest.mark.slow
def test_a_lever_that_makes_the_loss_faster_is_chosen():
    register(Half())
    wide = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6
    given = loss, optax.adam(1e-3), wide, jax.ShapeDtypeStruct((32768, 2048), jnp.float32)
    options = {"target": "h200", "budget": "20GiB", "compilations": 2}
    found = {
        allow: jaxmem.fit(*given, allow=allow, **options).fitting.chosen
        for allow in ("precision", "half_compute")
    }
    assert found["half_compute"].levers.half_compute
    assert found["half_compute"].seconds == pytest.approx(found["precision"].seconds, rel=0.1)
    plain = jaxmem.fit(*given, **options).fitting.chosen
    assert found["half_compute"].seconds < 0.7 * plain.seconds
