"""The face: small, documented and quick to import."""

import doctest
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem import cli
from jaxmem.ground import errors as errors_module
from jaxmem.targets import known_targets

PUBLIC = [
    name
    for name, value in vars(jaxmem).items()
    if not name.startswith("_") and not inspect.ismodule(value)
]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented(name):
    documented = inspect.getdoc(getattr(jaxmem, name))
    assert documented and len(documented) > 30
    if inspect.isfunction(getattr(jaxmem, name)) and name != "install_compiler":
        assert doctest.DocTestParser().get_examples(documented), "an example that runs"


def test_all_errors_are_one_family():
    errors = {name for name, kind in vars(errors_module).items() if inspect.isclass(kind)}
    assert errors <= set(PUBLIC), "every one has a name in jaxmem"
    for name in errors:
        kind = getattr(jaxmem, name)
        assert issubclass(kind, jaxmem.JaxmemError | UserWarning)


def test_import_loads_no_library_that_jax_flax_and_optax_have_not():
    """Seconds are for a benchmark (speed/import_time.py): they depend on what else runs."""
    code = (
        "import sys, jax, flax.linen, optax; before = set(sys.modules)\n"
        "import jaxmem; print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = set(done.stdout.split()) - set(sys.stdlib_module_names)
    assert added <= {"jax", "jaxmem", "filelock", "platformdirs"}


def test_the_command_line_lists_targets(capsys):
    assert cli.main(["targets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, target in known_targets().items():
        size = jaxmem.format_bytes(target.usable_bytes).split()
        assert any(line.split()[:3] == [name, *size] for line in lines), name
    assert cli.main(["targets", "--json"]) == 0
    assert '"compute_capability": [\n' in capsys.readouterr().out


def test_the_command_line_installs_the_compiler_once(capsys):
    assert cli.main(["install-compiler"]) == 0
    assert "XLA's compiler for cuda is in " in capsys.readouterr().out
    assert cli.main(["install-compiler", "--cuda", "11"]) == 1
    assert capsys.readouterr().err.startswith("jaxmem: There is a compiler for CUDA 12 and for")


def test_it_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "jaxmem", "targets"], capture_output=True)
    assert done.returncode == 0
    assert b"h200" in done.stdout


A_FUNCTION = "takes a function of arrays; got"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: jaxmem.residuals(3), f"jaxmem.residuals {A_FUNCTION} 3."),
        (lambda: jaxmem.measure(3), f"jaxmem.measure {A_FUNCTION} 3."),
        (lambda: jaxmem.eval_shape(3), f"jaxmem.eval_shape {A_FUNCTION} 3."),
        (lambda: jaxmem.value_and_update(3), f"jaxmem.value_and_update {A_FUNCTION} 3."),
        (lambda: jaxmem.max_batch_size(3, len), f"jaxmem.max_batch_size {A_FUNCTION} 3."),
        (lambda: jaxmem.fit(3, optax.sgd(0.1), {}, {}), f"jaxmem.fit {A_FUNCTION} 3."),
        (lambda: jaxmem.ops.swap(3), f"jaxmem.ops.swap {A_FUNCTION} 3."),
        (lambda: jaxmem.plan(3), f"jaxmem.plan {A_FUNCTION} the object builtins.int. Pass a"),
        (lambda: jaxmem.pareto(3), f"jaxmem.pareto {A_FUNCTION} the object builtins.int."),
        (lambda: jaxmem.remat_policy(3), f"jaxmem.remat_policy {A_FUNCTION} the object"),
        (lambda: jaxmem.remat(3), f"jaxmem.remat {A_FUNCTION} the object builtins.int."),
        (lambda: jaxmem.autocast(3, "bf16"), "jaxmem.autocast takes a function; got 3."),
        (lambda: jaxmem.microbatch(3, 2), "jaxmem.microbatch takes a loss function; got 3."),
        (lambda: jaxmem.train_step(3, optax.sgd(0.1)), "takes a loss function; got 3."),
        (lambda: jaxmem.layers(3), "jaxmem.layers takes a function block(params, x) -> x; got 3."),
        (lambda: jaxmem.memory(3, target="local"), "takes a function or a jitted one; got int"),
        (lambda: jaxmem.diff(3, 3), "jaxmem.diff compares two reports: jaxmem.MemoryReport, or"),
        (lambda: jaxmem.accumulate(3, 2), "takes an optax.GradientTransformation, such as"),
        (lambda: jaxmem.offload(3), "takes an optax.GradientTransformation, such as"),
        (lambda: jaxmem.shard(3), "jaxmem.shard takes a jax.sharding.Mesh or AbstractMesh, such"),
    ],
)
def test_what_is_no_function(call, said):
    with pytest.raises(jaxmem.JaxmemError) as caught:
        call()
    assert said in str(caught.value)


def swapped_loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda *args: jaxmem.plan(swapped_loss, *args),
        lambda *args: jaxmem.pareto(swapped_loss, *args),
        lambda *args: jaxmem.remat_policy(swapped_loss, *args),
        lambda *args: jaxmem.residuals(swapped_loss, *args),
        lambda *args: jaxmem.memory(swapped_loss, *args, target="local"),
        lambda *args: jaxmem.memory(swapped_loss, *args, target="h200"),
        lambda *args: jaxmem.measure(swapped_loss, *args),
        lambda *args: jaxmem.eval_shape(swapped_loss, *args),
        lambda *args: jaxmem.remat(swapped_loss)(*args),
        lambda *args: jax.grad(jaxmem.remat(swapped_loss))(*args),
        lambda *args: jaxmem.autocast(swapped_loss, "bf16")(*args),
        lambda *args: jaxmem.ops.swap(swapped_loss)(*args),
    ],
)
def test_errors_inside_of_a_function_say_what_it_was_given(call):
    """Parameters and batch in each other's place, say."""
    params, batch = {"w": jnp.ones((3, 1), "float32")}, {"x": jnp.ones((4, 3), "float32")}
    with pytest.raises(KeyError) as caught:
        call(batch, params)
    assert [note for note in caught.value.__notes__ if note.startswith("jaxmem")] == [
        "jaxmem: while tracing swapped_loss(params, batch) with params: ['x'] float32[4, 3]; "
        "batch: ['w'] float32[3, 1]."
    ]
