"""Which mesh: the shapes that `fit` searches, and what decides between them."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import cli
from jaxmem.fitting import Levers, LeverSearch, Workload
from jaxmem.fitting.meshes import Meshes, describe

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


def workload(count=64, batch=512, target="h100", **options):
    return Workload(
        loss_fn, ADAM, PARAMS, rows(batch), target=target, devices=count, budget="1GiB", **options
    )


def shapes(*args, **options):
    return [describe(shape) for shape in workload(*args, **options).meshes.shapes]


def test_pieces_lie_within_nodes_or_take_whole_ones():
    assert shapes(8) == ["8 data"]
    assert shapes(32) == ["32 data", "2 replica x 16 data", "4 replica x 8 data"]
    assert shapes(8, split=SPLIT) == ["8 data", "4 data x 2 model", "2 data x 4 model", "8 model"]
    assert shapes(16, split=SPLIT)[:3] == ["16 data", "2 replica x 8 data", "8 data x 2 model"]
    assert not any("16 model" in one for one in shapes(16, split=SPLIT))  # not between nodes


def test_only_shapes_that_divide_batch_and_parameters():
    assert shapes(16, batch=8, split=SPLIT)[0] == "8 data x 2 model"
    found = workload(16, batch=8, split=SPLIT).refused["mesh"]
    said = "2 shapes that do not divide the step, such as 16 data: batch has shape [8, 1024]"
    assert said in found
    found = workload(24, batch=48).refused["mesh"]
    assert found.startswith("a shape that does not divide the step, 24 data: ['down'][0] of shape")


@pytest.mark.parametrize(
    ("count", "batch", "expected"),
    [
        (12, 48, ["3 replica x 4 data", "6 replica x 2 data"]),
        (6, 48, ["3 replica x 2 data"]),
        (10, 40, ["5 replica x 2 data"]),
        (3, 48, ["3 replica"]),
        (9, 18, ["9 replica"]),  # three of three would lie across nodes
        (24, 48, ["3 replica x 8 data"]),
    ],
)
def test_numbers_that_divide_no_parameter_have_copies_within_nodes(count, batch, expected):
    given = workload(count, batch=batch)
    assert [describe(shape) for shape in given.meshes.shapes] == expected
    stages = {levers.stage for levers in given.options}
    assert stages == ({1, 2, 3} if "data" in expected[0] else {1})


def test_copies_within_nodes_have_the_models_own_axes():
    assert shapes(12, batch=48, split=SPLIT) == [
        "3 replica x 4 data",
        "6 replica x 2 data",
        "3 replica x 2 data x 2 model",
    ]


def test_a_step_on_twelve_devices_is_compiled_for_them():
    step = jaxmem.fit(
        *(loss_fn, ADAM, PARAMS, rows(96)), target="h100", devices=12, budget="1GiB", compilations=1
    )
    assert step.sharding.mesh.size == step.fitting.target.count == 12
    assert step.fitting.chosen.compiled <= 2**30


@pytest.mark.parametrize("count", [64, 7])
def test_where_nothing_divides_the_advice_can_be_taken(count):
    with pytest.raises(jaxmem.JaxmemError) as caught:
        workload(count, batch=8)
    said = str(caught.value)
    start = f"No mesh of {count} devices divides the step. {count} data: batch has shape [8, 1024]"
    assert said.startswith(start)
    assert said.endswith("Make it a multiple, or take another number of devices.")


def test_where_a_parameter_keeps_the_others_from_being_spread_the_table_says_so():
    params = {"w": jax.ShapeDtypeStruct((1001, 1023), jnp.float32)}
    given = Workload(odd_loss, ADAM, params, rows(64), target="h100", devices=8)
    assert [describe(shape) for shape in given.meshes.shapes] == ["8 replica"]
    said = given.refused["mesh"]
    assert "8 data: ['w'] of shape [1001, 1023] cannot be spread over 8 devices (data): no" in said
    assert said.endswith("Make it a multiple, or take another number of devices.")
    assert "keep=" not in said


def odd_loss(params, x):
    return jnp.mean(x) * jnp.mean(params["w"])


def test_of_a_mesh_that_is_given_the_advice_can_be_taken_too():
    mesh = AbstractMesh((8,), ("data",))
    params = {"w": jax.ShapeDtypeStruct((1001, 1023), jnp.float32)}
    for loss, given, batch in ((odd_loss, params, 64), (loss_fn, PARAMS, 12)):
        with pytest.raises(
            jaxmem.JaxmemError, match=r"Make it a multiple, or take another mesh\.$"
        ):
            Workload(loss, ADAM, given, rows(batch), target="h100", mesh=mesh)
    factored = optax.adafactor(1e-3)  # a row of 20,001 sums of squares
    params = {"w": jax.ShapeDtypeStruct((20_001, 1024), jnp.float32)}
    with pytest.raises(jaxmem.JaxmemError) as caught:
        Workload(odd_loss, factored, params, rows(64), target="h100", devices=8)
    said = str(caught.value)
    assert "of shape [20001] cannot be spread over 8 devices (data): no axis is a multi" in said
    assert said.endswith("Make it a multiple, or take another number of devices.")


def test_a_mesh_and_a_number_are_one_too_many():
    mesh = AbstractMesh((8,), ("data",))
    with pytest.raises(jaxmem.JaxmemError, match=r"takes mesh= or devices=: a mesh that is known"):
        workload(8, mesh=mesh)
    with pytest.raises(jaxmem.JaxmemError, match="an int of 1 or more or a list of jax.devices"):
        workload("8")
    with pytest.raises(jaxmem.JaxmemError, match="an int of 1 or more or a list of jax.devices"):
        workload(0)
    with pytest.raises(jaxmem.JaxmemError, match="cuts arrays along axes of a mesh: pass mesh="):
        Workload(loss_fn, ADAM, PARAMS, rows(8), target="h100", split=SPLIT)


def test_what_a_model_cuts_is_checked():
    with pytest.raises(jaxmem.JaxmemError, match=r"split= takes a dict: for each axis of the mesh"):
        jaxmem.shard(AbstractMesh((8,), ("data",)), split=cut)
    mesh = AbstractMesh((4, 2), ("data", "model"))
    with pytest.raises(jaxmem.JaxmemError, match="no axis 'expert'; its axes are 'data', 'model'"):
        jaxmem.shard(mesh, split={"expert": cut})
    odd = jaxmem.shard(mesh, split={"model": lambda path, leaf: 1})
    with pytest.raises(jaxmem.JaxmemError, match=r"of shape \[64, 1001\], into 2 parts, and 1001"):
        odd.place_params({"w": jnp.zeros((64, 1001))})
    with pytest.raises(jaxmem.JaxmemError, match="gather does not know how the parameters of a la"):
        jaxmem.shard(mesh, split=SPLIT).gather(lambda w, x: x @ w)


TWO = AbstractMesh((4, 2), ("data", "model"))


@pytest.mark.parametrize("name", ["replica", "data"])
def test_names_of_axes_of_fits_own_are_reserved(name):
    """With devices=, where it names the axes; not on a mesh of the caller's."""
    said = f"names an axis '{name}', which is a name of an axis of jaxmem.fit's own: with devices="
    for count in (1, 8):
        with pytest.raises(jaxmem.JaxmemError, match=said):
            workload(count, split={name: cut})
    mesh = AbstractMesh((4, 2), (name, "rest"))
    given = Workload(loss_fn, ADAM, PARAMS, rows(64), target="h100", mesh=mesh, split={name: cut})
    assert given.sharding(3).axis == "rest" and given.sharding(3).model == (name,)


@pytest.mark.parametrize("name", [1, None, ("a", "b"), ""])
def test_names_of_axes_are_text(name):
    said = "split= takes names of axes of the mesh, as text; got .* as one."
    for call in (
        lambda: workload(8, split={name: cut}),
        lambda: jaxmem.shard(TWO, split={name: cut}),
    ):
        with pytest.raises(jaxmem.JaxmemError, match=said):
            call()


@pytest.mark.parametrize(
    "options", [{"split": {"data": cut, "model": cut}}, {"axis": "model", "split": SPLIT}]
)
@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_are_not_spread_along_what_the_model_cuts_them_along(options, stage):
    sharding = jaxmem.shard(TWO, stage=stage, **options)
    said = r"cuts \['down'\]\[0\] along 'model', and jaxmem.shard spreads param"
    with pytest.raises(jaxmem.JaxmemError, match=said):
        sharding.place_params(PARAMS)


def test_a_mesh_of_the_models_axes_alone():
    """Tensor parallelism, and nothing else."""
    mesh = AbstractMesh((8,), ("model",))
    sharding = jaxmem.shard(mesh, (), split=SPLIT)
    assert sharding.specs(PARAMS)["up"][0] == P(None, "model")
    assert str(sharding) == "ZeRO stage 3 over 1 device, the model's own axes 8 (model)"
    given = Workload(loss_fn, ADAM, PARAMS, rows(64), target="h100", mesh=mesh, split=SPLIT)
    assert {levers.stage for levers in given.options} == {1}


def test_an_axis_of_the_batch_may_be_the_one_that_parameters_are_spread_along():
    split = {"model": lambda path, leaf: 1 if path.startswith("batch") else None}
    sharding = jaxmem.shard(TWO, "model", split=split)
    assert sharding.place_params(PARAMS)["up"][0].sharding.spec == P(None, "model")
    assert sharding.place_batch(rows(64)).sharding.spec == P("data", "model")


@pytest.mark.parametrize("stage", [True, False, 0, 4, 1.0, "3", None])
def test_stages_are_1_2_and_3(stage):
    with pytest.raises(jaxmem.JaxmemError, match="ZeRO has the stages 1, 2 and 3; got stage="):
        jaxmem.shard(TWO, stage=stage)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"axis": ("data", "data")}, r"or several in a tuple, each once; got \('data', 'data'\)"),
        ({"axis": ["data"]}, r"several in a tuple, each once; got \['data'\]"),
        ({"scanned": 3}, "takes scanned=, text that is in the paths of parameters .*; got 3"),
        ({"keep": None}, r"jaxmem.shard\(keep=...\) takes a function of .*; got None"),
    ],
)
def test_what_shard_takes_is_checked(options, said):
    with pytest.raises(jaxmem.JaxmemError, match=said):
        jaxmem.shard(TWO, **options)


@pytest.mark.parametrize("returned", [None, "copy", 1, jnp.ones(3, bool)])
def test_what_keep_returns_is_checked(returned):
    sharding = jaxmem.shard(TWO, keep=lambda path, leaf: returned)
    said = r"keep=, a function that says True \(.*\) or False of an array; for \['up'\]\[0\] it ret"
    with pytest.raises(jaxmem.JaxmemError, match=said):
        sharding.specs({"up": [PARAMS["up"][0]]})


@pytest.mark.parametrize("returned", [2, -3, "up", 1.0, True, False, (0, 1), [1], jnp.float32(1)])
@pytest.mark.parametrize("size", [1, 2])
def test_what_a_split_function_returns_is_checked(returned, size):
    """Whatever the size of the mesh: of one device along it too."""
    mesh = AbstractMesh((4, size), ("data", "model"))
    split = {"model": lambda path, leaf: returned if "up" in path else None}
    said = (
        r"^split\['model'\] returned .* for \['up'\]\[0\] of shape \[1024, 4096\]: it is to return "
        "the axis that is cut, an int of -2 to 1 here, or None.$"
    )
    for call in (
        lambda: jaxmem.shard(mesh, stage=3, split=split).place_params(PARAMS),
        lambda: jaxmem.shard(mesh, stage=3, split=split).specs(PARAMS),
        lambda: workload(8, split=split),
        lambda: Workload(loss_fn, ADAM, PARAMS, rows(64), target="h100", mesh=mesh, split=split),
    ):
        with pytest.raises(jaxmem.JaxmemError, match=said) as caught:
            call()
        if not isinstance(returned, jax.Array):
            assert f"returned {returned!r} for" in str(caught.value)
    of_batch = {"model": lambda path, leaf: returned if path == "batch" else None}
    with pytest.raises(
        jaxmem.JaxmemError, match=r"for batch of shape \[64, 1024\]: it is to return"
    ):
        jaxmem.shard(mesh, split=of_batch).place_batch(rows(64))
    with pytest.raises(
        jaxmem.JaxmemError, match=r"for batch of shape \[64, 1024\]: it is to return"
    ):
        workload(8, batch=64, split=of_batch)


def test_axes_may_be_counted_from_the_end_and_be_of_numpy():
    for returned in (-1, np.int64(1)):
        split = {"model": lambda path, leaf, returned=returned: returned}
        specs = jaxmem.shard(TWO, split=split).specs(PARAMS)
        assert specs["up"][0] == P("data", "model")


def fails(path, leaf):
    raise KeyError("x")


def test_what_a_users_function_raises_says_which_and_for_what():
    for call, note in (
        (
            lambda: jaxmem.shard(TWO, split={"model": fails}).place_params(PARAMS),
            "['down'][0], an ",
        ),
        (lambda: jaxmem.shard(TWO, split={"model": fails}).place_batch(rows(8)), "batch, an array"),
        (lambda: workload(8, split={"model": fails}), "batch, an array float32[512, 1024]."),
    ):
        with pytest.raises(KeyError) as caught:
            call()
        assert f"jaxmem: raised by split['model'] for {note}" in caught.value.__notes__[0]
    with pytest.raises(KeyError) as caught:
        jaxmem.shard(TWO, keep=fails).place_params(PARAMS)
    assert "jaxmem: raised by keep for ['down'][0], an array float32[4096, 1024]" in str(
        caught.value.__notes__
    )


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
    search = LeverSearch(workload(math.prod(shape), target=target, split=SPLIT))
    names = ("replica", "data", "model")
    chosen = Levers(mesh=tuple(zip(names, shape, strict=True)), **levers)
    return search.costs.candidate_of(chosen, search.costs.plain_plan(chosen)).seconds


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


@pytest.mark.slow
def test_the_bound_is_no_more_than_any_plan_takes():
    search = LeverSearch(workload(split=SPLIT))
    some = [
        levers
        for levers in search.options
        if levers.microbatches in (1, 4) and not levers.host and levers.stage != 2
    ]
    assert some
    for levers in some:
        plain = search.costs.candidate_of(levers, search.costs.plain_plan(levers))
        assert search.costs.bound(levers) <= 1.02 * plain.seconds, levers
        assert search.costs.argument_bytes(levers) <= plain.projected


@pytest.mark.slow
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


def test_shardings_of_ones_own_are_told_of():
    mesh = AbstractMesh((4, 2), ("data", "model"))
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(None, "model"))
        ),
        PARAMS,
    )
    said = (
        r"by ZeRO's stages, and not as they are given: params\['down'\]\[0\] by "
        r".*\(None, 'model'\) and 7 more. .* pass split="
    )
    with pytest.raises(jaxmem.JaxmemWarning, match=said):
        jaxmem.fit(loss_fn, ADAM, params, rows(64), mesh=mesh, target="h100")
