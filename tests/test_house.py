"""The house as CONTRIBUTING.md tells of it: small files and classes, a place for each target."""

import ast
import dataclasses
import importlib
import pathlib
import re
import types

import pytest

import jaxmem
from jaxmem import jaxprs
from jaxmem.ground.errors import JaxmemError
from jaxmem.jaxprs import internals

ROOT = pathlib.Path(jaxmem.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Words of one family of targets, which no other wing says but in its documentation.
# (cuDNN is the name of an implementation of attention in JAX itself.)
OF_A_FAMILY = re.compile(
    r"cuda|\bgpus?\b|_gpu|gpu_|nvidia|[hav]\d00|\brtx\b|pinned_host|cublas|triton|nccl",
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


def test_no_module_is_hidden_by_what_has_its_name():
    """``jaxmem.autocast.RULES`` was an AttributeError, since a function had the module's name."""
    hidden = []
    for module in modules():
        parent, _, leaf = module.__name__.rpartition(".")
        if parent and getattr(importlib.import_module(parent), leaf) is not module:
            hidden.append(module.__name__)
    assert hidden == []


def documentation(tree) -> set[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = [n.body[0] for n in ast.walk(tree) if isinstance(n, owners) and n.body]
    return {id(node.value) for node in first if isinstance(node, ast.Expr)}


def test_what_is_one_familys_is_said_in_targets_alone():
    found = []
    for name, tree in trees():
        if name.parts[0] == "targets":
            continue
        told = documentation(tree)
        for node in ast.walk(tree):
            texts = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
            if isinstance(node, ast.Constant) and id(node) not in told:
                texts.append(node.value)
            said = [text for text in texts if isinstance(text, str) and OF_A_FAMILY.search(text)]
            found += [f"{name}:{getattr(node, 'lineno', 0)}: {text}" for text in said]
    for page in sorted((ROOT / "reports").rglob("*.html")):
        found += [f"{page.name}: {line}" for line in OF_A_FAMILY.findall(page.read_text())]
    assert found == []


def test_private_names_of_jax_are_asked_for_in_one_place():
    found = []
    for name, tree in trees():
        for node in ast.walk(tree):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            found += [str(name) for module in modules if "._src" in (module or "")]
    assert found == []


@pytest.mark.parametrize(
    "name", sorted(internals.NAMES.keys() - {"primal_left_tangent_right", "remat"})
)
def test_jax_has_its_private_names(name):
    assert getattr(internals, name) is not None


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
