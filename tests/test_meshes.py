"""Which mesh: the shapes that `fit` searches, and what decides between them."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import jaxmem
from jaxmem import cli
from jaxmem.fitting import Levers, Problem, Search
from jaxmem.fitting.meshes import Meshes, told

P = PartitionSpec
WIDTH, MIB = 1024, 2**20
PARAMS = {
    "up": [jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), jnp.float32)] * 4,
    "down": [jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32)] * 4,
}
ADAM = optax.adam(1e-3)


def loss_fn(params, x):
    for up, down in zip(params["up"], params["down"], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(x**2)


def rows(count):
    return jax.ShapeDtypeStruct((count, WIDTH), jnp.float32)


def cut(path, leaf):
    """Tensor parallel as Megatron has it: columns, then rows."""
    return 1 if "up" in path else 0 if "down" in path else None


SPLIT = {"model": cut}


def problem(count=64, batch=512, target="h100", **options):
    return Problem(
        loss_fn, ADAM, PARAMS, rows(batch), target=target, devices=count, budget="1GiB", **options
    )


def shapes(*args, **options):
    return [told(shape) for shape in problem(*args, **options).meshes.shapes]


def test_pieces_lie_within_nodes_or_take_whole_ones():
    assert shapes(8) == ["8 data"]
    assert shapes(32) == ["32 data", "2 replica x 16 data", "4 replica x 8 data"]
    assert shapes(8, split=SPLIT) == ["8 data", "4 data x 2 model", "2 data x 4 model", "8 model"]
    assert shapes(16, split=SPLIT)[:3] == ["16 data", "2 replica x 8 data", "8 data x 2 model"]
    assert not any("16 model" in one for one in shapes(16, split=SPLIT))  # not between nodes


def test_only_shapes_that_divide_batch_and_parameters():
    assert shapes(16, batch=8, split=SPLIT)[0] == "8 data x 2 model"
    found = problem(16, batch=8, split=SPLIT).refused["mesh"]
    assert "2 shapes that do not divide the step; of the first: batch has shape [8, 1024]" in found
    with pytest.raises(jaxmem.JaxmemError, match="to be spread over 64 devices. Make it a multi"):
        problem(64, batch=8)


def test_a_mesh_and_a_number_are_one_too_many():
    mesh = AbstractMesh((8,), ("data",))
    with pytest.raises(jaxmem.JaxmemError, match=r"takes mesh= or devices=: a mesh that is known"):
        problem(8, mesh=mesh)
    with pytest.raises(jaxmem.JaxmemError, match="an int of 1 or more or a list of jax.devices"):
        problem("8")
    with pytest.raises(jaxmem.JaxmemError, match="an int of 1 or more or a list of jax.devices"):
        problem(0)
    with pytest.raises(jaxmem.JaxmemError, match="cuts arrays along axes of a mesh: pass mesh="):
        Problem(loss_fn, ADAM, PARAMS, rows(8), target="h100", split=SPLIT)


def test_what_a_model_cuts_is_checked():
    with pytest.raises(jaxmem.JaxmemError, match=r"split= takes a dict: for each axis of the mesh"):
        jaxmem.shard(AbstractMesh((8,), ("data",)), split=cut)
    mesh = AbstractMesh((4, 2), ("data", "model"))
    with pytest.raises(jaxmem.JaxmemError, match="no axis 'expert'; its axes are 'data', 'model'"):
        jaxmem.shard(mesh, split={"expert": cut})
    wrong = jaxmem.shard(mesh, split={"model": lambda path, leaf: 3})
    with pytest.raises(jaxmem.JaxmemError, match=r"cut along axis 3; return one of its axes, or"):
        wrong.place_params(PARAMS)
    odd = jaxmem.shard(mesh, split={"model": lambda path, leaf: 1})
    with pytest.raises(jaxmem.JaxmemError, match=r"of shape \[64, 1001\], into 2 pieces; it is no"):
        odd.place_params({"w": jnp.zeros((64, 1001))})
    with pytest.raises(jaxmem.JaxmemError, match="gather does not know how the parameters of a la"):
        jaxmem.shard(mesh, split=SPLIT).gather(lambda w, x: x @ w)


def test_parameters_lie_along_the_models_axes_and_the_rest_of_the_mesh():
    mesh = AbstractMesh((2, 4, 2), ("replica", "data", "model"))
    fsdp = jaxmem.shard(mesh, split=SPLIT)
    assert (fsdp.axis, fsdp.replicas, fsdp.rows) == ("data", ("replica",), ("replica", "data"))
    assert fsdp.specs(PARAMS)["up"][0] == P("data", "model")
    assert fsdp.specs(PARAMS)["down"][0] == P("model", "data")
    assert fsdp.place_batch(rows(64)).sharding.spec == P(("replica", "data"))
    two = jaxmem.shard(mesh, stage=2, split=SPLIT)
    assert two.place_params(PARAMS)["up"][0].sharding.spec == P(None, "model")
    assert "the model's own axes 2 (model)" in str(fsdp)
    assert "parameters 128.00 MiB 16.00 MiB" in " ".join(fsdp.report(PARAMS).split())


def test_an_axis_of_the_batch_alone_spreads_parameters_too():
    """A sequence in pieces: all devices share the parameters."""
    split = {"context": lambda path, leaf: 1 if path.startswith("batch") else None}
    given = Meshes(None, 8, split, PARAMS, rows(8))
    given.choose(8)
    shape = (("replica", 1), ("data", 2), ("context", 4))
    assert shape in given.shapes
    sharding = given.sharding(shape, 3)
    assert sharding.axis == ("data", "context") and sharding.count == 8
    assert sharding.place_batch(rows(8)).sharding.spec == P(("replica", "data"), "context")
    assert sharding.specs(PARAMS)["up"][0] == P(None, ("data", "context"))


def seconds(target, shape, **levers):
    """Predicted of the step as it is, with its shape and stage."""
    search = Search(problem(math.prod(shape), target=target, split=SPLIT))
    names = ("replica", "data", "model")
    chosen = Levers(mesh=tuple(zip(names, shape, strict=True)), **levers)
    return search.costs.priced(chosen, search.costs.plain(chosen)).seconds


def slow(network):
    target = jaxmem.target("h100")
    links = dataclasses.replace(target.links, network=network)
    return dataclasses.replace(target, links=links)


def test_a_slow_network_makes_copies_of_nodes_worth_their_bytes():
    """What each device sends between nodes is an eighth where the shards are inside of one, but it
    is summed over copies; of 64 in one ring all of it crosses the network."""
    whole, hybrid = (1, 64, 1), (8, 8, 1)
    poor, rich = slow(1e9), slow(400e9)
    assert seconds(poor, hybrid, stage=3) < 0.8 * seconds(poor, whole, stage=3)
    assert seconds(rich, hybrid, stage=3) > seconds(rich, whole, stage=3)


def test_what_tensor_parallelism_sums_is_sent_within_a_node():
    poor, rich = slow(1e9), slow(400e9)
    assert seconds(poor, (1, 1, 8), stage=1) == seconds(rich, (1, 1, 8), stage=1)
    links = dataclasses.replace(poor.links, inside=45e9)
    inside = dataclasses.replace(poor, links=links)
    more = seconds(inside, (1, 1, 8), stage=1) - seconds(poor, (1, 1, 8), stage=1)
    # Two sums forward and backward of each of 4 layers, twice 7/8 of x each, at 45 and 450 GB/s;
    # the matmul before them has its own in the forward pass, and the one after in the other.
    sent = 2 * 4 * 2 * 7 / 8 * 512 * WIDTH * 4
    assert more == pytest.approx(sent * (1 / 45e9 - 1 / 450e9) / inside.shares.link, rel=1e-3)


def test_the_bound_is_no_more_than_any_plan_takes():
    search = Search(problem(split=SPLIT))
    for levers in search.options:
        if levers.microbatches in (1, 4) and not levers.host and levers.stage != 2:
            plain = search.costs.priced(levers, search.costs.plain(levers))
            assert search.costs.bound(levers) <= 1.02 * plain.seconds, levers
            assert search.costs.least_bytes(levers) <= plain.projected


def test_the_shape_is_chosen_with_everything_else_and_named(capsys):
    given = loss_fn, ADAM, PARAMS, rows(512)
    step = jaxmem.fit(*given, target=slow(1e8), devices=16, budget="300MiB")
    assert step.sharding.mesh.shape == {"replica": 2, "data": 8}
    chosen = step.fitting.chosen
    assert chosen.levers.mesh == (("replica", 2), ("data", 8)) and chosen.compiled <= 300 * MIB
    assert "mesh 2 replica x 8 data, ZeRO stage" in " ".join(capsys.readouterr().out.split())
    assert jaxmem.fit(*given, target="h100", devices=1, budget="4GiB").sharding is None


def train():
    return loss_fn, ADAM, PARAMS, rows(512), {"budget": "1GiB", "target": "h100"}


def test_the_command_line(capsys):
    assert cli.main(["fit", f"{__name__}:train", "--devices", "16", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["mesh"] in ([["data", 16]], [["replica", 2], ["data", 8]])
