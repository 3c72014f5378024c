"""The house as CONTRIBUTING.md tells of it: small files and classes, a place for each target."""

import ast
import collections
import dataclasses
import doctest
import importlib
import json
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
import types

import pytest

import jaxmem
from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError
from jaxmem.jaxprs import internals

ROOT = pathlib.Path(jaxmem.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Words of one family of targets, which no other wing says. (cuDNN is the name of an implementation
# of attention in JAX itself.)
OF_A_FAMILY = re.compile(
    r"cuda|\bgpus?\b|_gpu|gpu_|nvidia|[hav]\d00|\brtx\b|pinned_host|cublas|triton|nccl"
    r"|tensor cores?|\btpus?\b|\bvmem\b",
    re.IGNORECASE,
)


def trees():
    for file in FILES:
        yield file.relative_to(ROOT), ast.parse(file.read_text())


def modules():
    """Each module but those that are scripts."""
    for file in FILES:
        name = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
        if not name.endswith(("__main__", "worker")):
            yield importlib.import_module(name.removesuffix(".__init__"))


def test_files_and_classes_are_small():
    large = [str(file) for file in FILES if file.read_text().count("\n") >= 400]
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= 250:
                large.append(f"{name}: {node.name}")
    assert large == []


def test_dataclasses_have_few_fields():
    large = []
    for module in modules():
        for kind in vars(module).values():
            is_one = isinstance(kind, type) and dataclasses.is_dataclass(kind)
            if is_one and len(dataclasses.fields(kind)) > 20:
                large.append(kind.__qualname__)
    assert large == []


def test_classes_have_fewer_than_forty_names_for_others():
    large = []
    for module in modules():
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                fields = getattr(kind, "__dataclass_fields__", {})
                if sum(not one.startswith("_") for one in {*dir(kind), *fields}) >= 40:
                    large.append(kind.__qualname__)
    assert large == []


def test_what_is_imported_for_annotations_is_of_the_same_wing():
    """Or of one below: where import-linter does not look, nothing points up either."""
    contracts = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(one["layers"] for one in contracts["contracts"] if "layers" in one)
    height = {
        wing.strip(): at for at, line in enumerate(reversed(layers)) for wing in line.split(":")
    }
    found = 0
    for name, tree in trees():
        guarded = (
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for inner in ast.walk(node)
            if isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("jaxmem.")
        )
        for one in guarded:
            found += 1
            wing, other = name.parts[0].removesuffix(".py"), one.module.split(".")[1]
            assert wing == other or height[other] < height[wing], f"{name}: {one.module}"
    assert found > 5


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "jaxmem/planning/README.md"])
def test_files_that_developers_are_told_of_exist(page):
    root = ROOT.parent
    named = re.findall(r"`([\w./-]+\.py)`", (root / page).read_text())
    places = (root, ROOT, (root / page).parent)
    assert not [one for one in named if not any((place / one).exists() for place in places)]
    assert named


def test_levers_that_developers_are_told_of_exist():
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    (row,) = re.findall(r"^\| `levers` \| (.*) \|$", text, re.MULTILINE)
    parts = {one.stem for one in (ROOT / "levers").iterdir() if one.is_dir() or one.suffix == ".py"}
    assert set(re.findall(r"`(\w+)`", row)) <= parts


def test_no_two_classes_have_the_same_name():
    kinds = [
        kind.__name__
        for module in modules()
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    ]
    assert [name for name, count in collections.Counter(kinds).items() if count > 1] == []


def test_no_module_is_hidden_by_what_has_its_name():
    """``jaxmem.autocast.RULES`` was an AttributeError, since a function had the module's name."""
    hidden = []
    for module in modules():
        parent, _, leaf = module.__name__.rpartition(".")
        if parent and getattr(importlib.import_module(parent), leaf) is not module:
            hidden.append(module.__name__)
    assert hidden == []


def documentation(tree) -> dict[int, str]:
    """Each docstring by the id of its node, without its examples: those may name any target."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = [n.body[0] for n in ast.walk(tree) if isinstance(n, owners) and n.body]
    told = [one.value for one in first if isinstance(one, ast.Expr)]
    told = [one for one in told if isinstance(getattr(one, "value", None), str)]
    parse = doctest.DocTestParser().parse
    return {
        id(node): " ".join(part for part in parse(node.value) if isinstance(part, str))
        for node in told
    }


def comments(file) -> list[str]:
    with tokenize.open(file) as lines:
        tokens = tokenize.generate_tokens(lines.readline)
        return [token.string for token in tokens if token.type == tokenize.COMMENT]


def test_what_is_one_familys_is_said_in_targets_alone():
    found = []
    for name, tree in trees():
        if name.parts[0] == "targets":
            continue
        told = documentation(tree)
        texts = [*told.values(), *comments(ROOT / name)]
        for node in ast.walk(tree):
            texts += [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
            if isinstance(node, ast.Constant) and id(node) not in told:
                texts.append(node.value)
        said = (text for text in texts if isinstance(text, str))
        found += [f"{name}: {one[0]}" for text in said for one in OF_A_FAMILY.finditer(text)]
    for page in sorted((*(ROOT / "reports").rglob("*.html"), ROOT / "planning" / "README.md")):
        found += [f"{page.name}: {line}" for line in OF_A_FAMILY.findall(page.read_text())]
    assert found == []


# What JAX says may move, or does not document.
MAY_MOVE = re.compile(
    r"\b(jax|jaxlib)\.(_src|experimental|extend|interpreters|mlir)\b|\.SymbolicZero"
)


def run_time_nodes(tree):
    """All nodes but those that a type checker alone reads."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from run_time_nodes(node)


def test_names_of_jax_that_may_move_are_asked_for_in_one_place():
    workers = {
        "targets/spmd.py",
        "targets/cuda/in_worker.py",
        "targets/cuda/matmuls_apart.py",
        "targets/tpu/in_worker.py",
    }
    found = []
    for name, tree in trees():
        for node in run_time_nodes(tree):
            texts = []
            if isinstance(node, ast.ImportFrom):
                texts = [f"{node.module}.{one.name}" for one in node.names]
            elif isinstance(node, ast.Import):
                texts = [one.name for one in node.names]
            elif isinstance(node, ast.Attribute):
                texts = [ast.unparse(node)]
            found += [f"{name}: {text}" for text in texts if MAY_MOVE.search(text)]
    own = re.compile(r"(jaxmem|internals)\.")
    assert {one.partition(":")[0] for one in found if not own.search(one)} <= workers


# Hides names of JAX from jaxmem and then imports it. A private name stays where it is for JAX
# itself, which could not run without; jaxmem asks for those through importlib alone.
WITHOUT_NAMES = """
import importlib, json, sys, types
import jax, optax, jax.experimental.layout, jax.extend.core
names, real = json.loads(sys.argv[1]), importlib.import_module
for name, (module, _) in names.items():
    if module.startswith("jax.") and "_src" not in module:
        delattr(real(module), name)

def without(module, package=None):
    parent, _, leaf = module.rpartition(".")
    if sys._getframe(1).f_globals["__name__"] != "jaxmem.jaxprs.internals":
        return real(module, package)
    if names.get(leaf, [None])[0] == parent:
        raise ImportError(module)
    left = {name: value for name, value in vars(real(module)).items() if name not in names}
    return types.SimpleNamespace(**left)

importlib.import_module = without
import jaxmem
from jaxmem.jaxprs import internals

for module in ("jaxmem.cli", "jaxmem.ops", "jaxmem.optim", "jaxmem.frameworks.flax"):
    real(module)
assert jaxmem.format_bytes(2**30) == "1.00 GiB"
assert jaxmem.target("h200").name == "h200"
state = jaxmem.accumulate(optax.sgd(0.1), 2).init(jax.numpy.ones(4, "float32"))
assert sum(leaf.nbytes for leaf in jax.tree.leaves(state)) >= 16
for name, (module, needs) in names.items():
    try:
        getattr(internals, name)
    except jaxmem.JaxmemError as error:
        assert f"has no {module}.{name}, which jaxmem needs for {needs}" in str(error), error
    else:
        raise AssertionError(f"{name} was not hidden")
"""


# What works without the names that hardly anything needs.
WITHOUT_FEW = """
import warnings
import jax, jax.numpy as jnp, jaxmem, pytest
from jaxmem.jaxprs import internals

few, real = {"PassManager", "batching", "callback", "source_info_util"}, internals._import

def without(module, name):
    if name in few:
        raise ImportError(name)
    return real(module, name)

internals._import = without

def loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

def loud(params, x):
    jax.debug.print("{}", x[0, 0])
    return loss(params, x)

args = [jnp.eye(64)] * 8, jnp.ones((512, 64))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    plan = jaxmem.plan(loss, *args, budget="1500KiB")
    assert plan.regions
    planned = jax.grad(plan.apply(loss))
    for one, other in zip(planned(*args), jax.grad(loss)(*args), strict=True):
        assert jnp.allclose(one, other)
    assert jaxmem.memory(jax.jit(loss), *args, target="h200").device > 0
    assert jaxmem.residuals(loss, *args)
said = "".join(str(one.message) for one in caught if one.category is jaxmem.JaxmemWarning)
for name in ("batching", "source_info_util"):
    assert said.count(f".{name}, which jaxmem needs for") == 1, said
with pytest.raises(NotImplementedError, match="Batching rule"):
    jax.vmap(planned, (None, 0))(args[0], args[1][None])
with pytest.raises(jaxmem.JaxmemError, match=r"no jax._src.callback, which jaxmem needs for"):
    jaxmem.memory(jax.jit(loud), *args, target="h200")
"""


@pytest.mark.slow
def test_a_name_that_moved_stops_only_what_needs_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT_FEW], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_any_name_that_may_move_jaxmem_is_imported_and_each_is_told():
    call = [sys.executable, "-W", "ignore", "-c", WITHOUT_NAMES, json.dumps(internals.NAMES)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", sorted(internals.NAMES.keys() - {"primal_left_tangent_right", "remat"})
)
def test_jax_has_its_private_names(name):
    assert getattr(internals, name) is not None


MEMBERS = [(name, member) for name, of in internals.MEMBERS.items() for member in of]


def test_what_is_read_of_a_module_of_jaxs_is_in_the_table():
    """``internals.mlir.lower_fun``, or ``own = internals.optional("source_info_util")``."""
    read = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                path = ast.unparse(node).split(".")
                if path[:1] == ["internals"] and path[1] in internals.MEMBERS and path[2:]:
                    read.add((path[1], path[2].partition("(")[0]))
    own = {"hlo", "source_info_util"}  # under another name
    assert read == {one for one in MEMBERS if one[0] not in own}


@pytest.mark.parametrize(("module", "member"), MEMBERS)
def test_what_is_read_of_a_module_of_jaxs_is_told_where_it_has_moved(module, member, monkeypatch):
    if module == "remat" and not jax_has_remat3():
        pytest.skip("this jax has no flag jax_remat3")
    own = getattr(internals, module)
    assert getattr(own, member) is not None
    path, needs = internals.NAMES[module]
    left = {name: value for name, value in vars(own._module).items() if name != member}
    monkeypatch.setattr(own, "_module", types.SimpleNamespace(**left))
    text = f"no {path}.{module}.{member}, which jaxmem needs for {needs}"
    with pytest.raises(JaxmemError, match=re.escape(text)):
        getattr(own, member)


def jax_has_remat3() -> bool:
    try:
        return internals.remat is not None
    except JaxmemError:
        return False


def test_a_private_name_that_moved_is_told_where_it_is_needed(monkeypatch):
    monkeypatch.setitem(internals.NAMES, "nowhere", ("jax._src", "plans of moved things"))
    with pytest.raises(JaxmemError, match=r"no jax\._src\.nowhere, which jaxmem needs for pl"):
        internals.nowhere  # noqa: B018


@pytest.mark.parametrize("name", ["compile_args", "_compiler_options_kvs"])
def test_an_attribute_that_moved_is_told(name):
    lowered = types.SimpleNamespace(_lowering=types.SimpleNamespace())
    read = jaxprs.kept_arguments if name == "compile_args" else jaxprs.compiler_options
    with pytest.raises(
        JaxmemError, match=rf"has no lowered\._lowering\.{name}, which jaxmem needs"
    ):
        read(lowered)


def test_an_argument_that_moved_is_told():
    class Traced:
        def lower(self, *, lowering_platforms):
            raise AssertionError

    with pytest.raises(JaxmemError, match=r"has no traced\.lower\(_private_parameters=\), which"):
        jaxprs.lower_for(Traced(), "cpu")
