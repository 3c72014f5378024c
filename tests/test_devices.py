"""The fewest devices that a step fits on."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem import cli
from jaxmem.fitting import devices

ADAM, WIDTH = optax.adam(1e-3), 1024


def loss_fn(layers, x):
    for w in layers:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def shapes(rows=512):
    layers = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 8
    return layers, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


def workload():
    return loss_fn, ADAM, *shapes(), {"budget": "60MiB", "target": "h100", "keep": "placement"}


@pytest.mark.slow
def test_the_fewest_devices_that_fit_and_no_fewer():
    """32 MiB of parameters, with gradients and moments 128."""
    needed = jaxmem.devices_needed(*workload()[:4], **workload()[4])
    assert int(needed) == needed.count == 4 and [one.devices for one in needed.tried] == [1, 2, 4]
    assert needed.step.sharding.mesh.shape == {"data": 4}
    assert needed.tried[-1].bytes == needed.fitting.chosen.compiled <= 60 * 2**20
    for one in needed.tried[:-1]:
        assert one.bytes > 60 * 2**20
    text = " ".join(str(needed).split())
    assert text.startswith("4 devices are needed, of NVIDIA H100 80GB HBM3, with 60.00 MiB")
    with pytest.raises(jaxmem.BudgetError, match=r"fits the budget of 60.00 MiB on no number of"):
        jaxmem.devices_needed(*workload()[:4], **workload()[4], most=2)


def test_only_counts_that_divide_the_batch_are_tried():
    h100, v5e = jaxmem.target("h100"), jaxmem.target("v5e")
    assert devices._counts(shapes(24)[1], 1024, h100) == [1, 2, 4, 8, 24]
    assert devices._counts(shapes(512)[1], 64, h100) == [1, 2, 4, 8, 16, 32, 64]
    assert devices._counts(shapes(3)[1], 64, h100) == [1]
    assert devices._counts(shapes(24)[1], 1024, v5e) == [1, 4, 8]  # there are no other slices


def test_what_is_no_question_is_told():
    with pytest.raises(jaxmem.JaxmemError, match="searches the number of devices and takes no me"):
        jaxmem.devices_needed(*workload()[:4], mesh=jax.sharding.AbstractMesh((2,), ("data",)))
    with pytest.raises(jaxmem.JaxmemError, match="takes most=, an int of 1 or more; got 0"):
        jaxmem.devices_needed(*workload()[:4], most=0)
    said = r"jaxmem.devices_needed has no option bogus=; it takes most=, .*: allow=, budget=, keep="
    with pytest.raises(jaxmem.JaxmemError, match=said):
        jaxmem.devices_needed(*workload()[:4], bogus=1)


@pytest.mark.slow
def test_what_else_could_be_allowed_can_be():
    """No mesh, which is in the way of nothing; what is kept is told apart."""
    with pytest.raises(jaxmem.BudgetError) as caught:
        jaxmem.devices_needed(
            *(loss_fn, ADAM, *shapes(24)), target="h100", budget="4MiB", keep="placement"
        )
    said = str(caught.value)
    assert " was tried (1, 2, 4, 8, 24). " in said and "mesh" not in said
    assert "allow='precision' to compute in bfloat16" in said
    assert "What is kept and need not be: 'placement'. Or raise the budget or most=, or" in said
    assert f"({caught.value.lowest} bytes " in said


@pytest.mark.slow
def test_one_device_is_told_as_one(caplog):
    needed = jaxmem.devices_needed(*workload()[:4], target="h100", budget="1GiB")
    assert "jaxmem: fit on 1 device" in [record.getMessage() for record in caplog.records]
    assert str(needed).startswith("1 device is needed, of NVIDIA H100")


@pytest.mark.slow
def test_a_byte_more_than_the_budget_shows_in_the_table():
    needed = jaxmem.devices_needed(*workload()[:4], target="h100", budget="1GiB")
    tried = devices.Tried(1, 2**30 + 1, False, "too large")
    table = str(dataclasses.replace(needed, tried=(tried, *needed.tried)))
    assert "1.00 GiB + 1 B projected" in table


def test_numbers_in_a_batch_are_no_arrays_to_divide():
    assert devices._counts({"x": shapes(24)[1], "weight": 0.5}, 64, jaxmem.target("h100")) == [1]


@pytest.mark.slow
def test_the_command_line(capsys):
    assert cli.main(["devices", f"{__name__}:workload", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["count"] == 4 and about["tried"][-1]["compiled"]
    assert cli.main(["devices", f"{__name__}:workload", "--most", "1"]) == 3
    assert "on no number of devices" in capsys.readouterr().err


def test_shapes_of_meshes_are_searched_for_real_parameters_too():
    def loss(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["w"]) ** 2)

    for made in (jnp.ones, np.ones):
        given = {"w": made((64, 64), "float32")}, made((64, 64), "float32")
        step = jaxmem.fit(loss, optax.sgd(0.1), *given, target="h100", devices=8, compilations=1)
        assert step.fitting.chosen.compiled
