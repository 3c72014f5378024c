"""The largest batch that fits, found by compiling."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import cli
from jaxmem.fitting import capacity
from jaxmem.ground.bytes import format_against

MIB = 2**20
STEP = jaxmem.train_step(
    lambda params, batch: jnp.mean(jnp.tanh(jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2),
    optax.sgd(0.1, momentum=0.9),
)
PARAMS = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "ab"}
STATE = jaxmem.eval_shape(STEP.init, PARAMS)


def make_args(batch):
    return STATE, jax.ShapeDtypeStruct((batch, 256), jnp.float32)


def make(batch):
    return STEP, make_args(batch)


def compiled(batch):
    return jaxmem.memory(STEP, *make_args(batch), target="h200").device


def test_the_answer_fits_and_the_next_one_does_not(caplog):
    answer = jaxmem.max_batch_size(STEP, make_args, budget="64MiB", target="h200")
    assert int(answer) == answer.size and answer.size % 8 == 0 and answer.size > 5000
    assert answer.size < answer.too_large <= 1.01 * answer.size
    assert compiled(answer.size) == answer.report.device <= 64 * MIB < compiled(answer.too_large)
    assert len(answer.compiled) <= 6
    text = str(answer)
    assert text.startswith(f"largest batch: {answer.size} (a multiple of 8) on h200: NVIDIA H200")
    assert answer.reason.startswith(f"{answer.too_large}, the next ")
    takes = format_against(answer.compiled[answer.too_large], 64 * MIB)
    assert answer.reason.endswith(f" takes {takes}, more than the budget of 64.00 MiB.")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * len(answer.compiled)
    assert lines[0] == "jaxmem: compiling 1 of at most 6: batch 8 for h200"
    assert lines[1].startswith("jaxmem: compiled 1 of at most 6: batch 8 for h200: ")
    assert ", fits" in lines[1]


def test_nothing_fits_is_an_answer():
    answer = jaxmem.max_batch_size(STEP, make_args, budget="1MiB", target="h200")
    assert int(answer) == 0 and answer.too_large == 8 and len(answer.compiled) == 1
    assert answer.reason.startswith("Nothing fits: a batch of 8 takes ")
    assert "more than the budget of 1.00 MiB, of which 1.0" in answer.reason
    assert "are arguments; at the peak " in answer.reason and "test_max_batch" in answer.reason
    assert answer.reason.endswith("jaxmem.fit searches what makes it fit.")


def test_the_batch_is_a_multiple_of_the_mesh():
    sharding = NamedSharding(
        jaxmem.shard(AbstractMesh((3,), ("data",))).mesh, PartitionSpec("data")
    )

    def sharded(batch):
        return STATE, jax.ShapeDtypeStruct((batch, 256), jnp.float32, sharding=sharding)

    target = jaxmem.target("h200", count=3)
    answer = jaxmem.max_batch_size(STEP, sharded, budget="16MiB", target=target)
    assert answer.multiple == 24 and answer.size % 24 == 0
    assert answer.report.device <= 16 * MIB
    # Each GPU has a third of it, all of the parameters, and what a partitioned program takes more.
    alone = jaxmem.memory(STEP, *make_args(answer.size // 3), target="h200")
    assert 1 <= answer.report.device / alone.device < 1.5


@pytest.mark.parametrize(
    ("name", "of_batch"),
    [
        ("a line", lambda n: 1000 + 7 * n),
        ("a bend near the end", lambda n: 1000 + 7 * n if n < 8000 else 29000 + 7 * n // 2),
        ("a jump", lambda n: 1000 + 7 * n + 20000 * (n >= 6000)),
        ("jumps up and down", lambda n: 1000 + 7 * n // 2 + 29000 * (n % 16384 >= 5500)),
        ("two ways", lambda n: 2000 + 7 * n // 2 if n < 5000 else 1000 + 7 * n),
        ("steeper soon", lambda n: max(26000 + n // 8, 16000 + 12 * n)),
        ("steeper later", lambda n: max(26000 + n, 5000 + 7 * n)),
        ("flat at first", lambda n: max(40000, 7 * n)),
        ("saw teeth", lambda n: 1000 + 7 * n + 900 * (n % 64 == 0)),
    ],
)
def test_whatever_the_bytes_do_the_answer_fits(monkeypatch, name, of_batch):
    """Bytes by a formula in place of the compiler's."""

    class Report:
        def __init__(self, batch):
            self.device = of_batch(batch)

    monkeypatch.setattr(capacity, "memory", lambda step, x, **_: Report(x.shape[0]))
    shapes = lambda n: (jax.ShapeDtypeStruct((n, 1), jnp.int8),)  # noqa: E731
    answer = jaxmem.max_batch_size(STEP, shapes, budget=60_000, target="h200")
    best = max(n for n in range(8, 60_000, 8) if of_batch(n) <= 60_000)
    assert len(answer.compiled) <= 6
    assert of_batch(answer.size) <= 60_000
    assert of_batch(answer.too_large) > 60_000
    assert answer.size >= 0.95 * best
    if name == "a line":
        assert answer.exact and answer.size == best


def test_wrong_input_is_told_before_compiling():
    for changes, text in (
        ({"multiple": 0}, r"multiple= takes an int of 1 or more; got 0\."),
        ({"compilations": 1}, r"compilations= takes an int of 2 or more; got 1\."),
        ({"make_args": 8}, r"takes make_args, a function of the batch size .* got 8\."),
        ({"make_args": lambda n: STATE._asdict()}, r"make_args\(8\) must return the tuple of the"),
        ({"make_args": lambda n: make_args(8)}, r"the same sizes for batches of 8 and 16: no ba"),
        ({"budget": "lots"}, r"The budget 'lots' does not parse"),
    ):
        given = {"make_args": make_args, "budget": "1GiB", "target": "h200"} | changes
        with pytest.raises(jaxmem.JaxmemError, match=text):
            jaxmem.max_batch_size(STEP, **given)


def test_command_line(capsys, tmp_path):
    name = f"{__name__}:make"
    common = ["max-batch", "--target", "h200", "--budget"]
    page = tmp_path / "report.html"
    assert cli.main([*common, "64MiB", name, "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("largest batch: ")
    assert "<html" in page.read_text()[:200]
    picture = tmp_path / "timeline.svg"
    multiple = [name, "--multiple", "48", "--json", "--plot", str(picture)]
    assert cli.main([*common, "64MiB", *multiple]) == 0
    assert "svg" in picture.read_text()[:300]
    about = json.loads(capsys.readouterr().out)
    assert about["size"] % 48 == 0 and about["report"]["device"] <= about["budget"] == 64 * MIB
    assert cli.main([*common, "1MiB", name]) == 3
    assert "Nothing fits" in capsys.readouterr().out
    assert cli.main([*common, "1MiB", f"{__name__}:compiled"]) == 1
    assert "must return (step, args)" in capsys.readouterr().err
    assert cli.main([*common, "1MiB", "tests.programs:mlp"]) == 1
    assert "mlp is called with the batch size and must return" in capsys.readouterr().err


# ---- any other number


@pytest.mark.parametrize(
    ("name", "of_number", "near"),
    [
        ("a line", lambda n: 1000 + 70 * n, 1.0),
        ("a square", lambda n: 1000 + n * n, 0.97),
        ("a cube", lambda n: 1000 + n**3, 0.9),
        ("a root", lambda n: 100 * n**0.5, 0.5),
        ("steps", lambda n: 1000 + 5000 * (n // 64), 0.9),
    ],
)
def test_any_number_that_fits(monkeypatch, name, of_number, near):
    """Bytes by a formula in place of the compiler's; the arguments say nothing of them."""

    class Report:
        def __init__(self, number):
            self.device = of_number(number)

    monkeypatch.setattr(capacity, "memory", lambda step, x, **_: Report(step(None)))
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    answer = jaxmem.largest(
        lambda n: ((lambda _: n), (x,)), budget=60_000, target="h200", most=100_000
    )
    best = max(n for n in range(1, 100_001) if of_number(n) <= 60_000)
    assert len(answer.compiled) <= 7 and of_number(answer.size) <= 60_000
    if name == "a root":  # the most that was to be tried fits
        assert answer.too_large is None
    else:
        assert of_number(answer.too_large) > 60_000
    assert answer.size >= near * best, (answer.size, best)


@pytest.mark.slow
def test_the_states_that_a_loop_keeps(caplog):
    """Compiled; and never more than the number that was to be tried."""

    def make(states):
        def loss(w, x):
            def step(x, _):
                return jnp.tanh(x @ w), None

            return jnp.sum(jaxmem.scan(step, x, length=500, budget=(states + 4) * 2**20)[0])

        shapes = (256, 256), (1024, 256)
        return jax.grad(loss), [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    answer = jaxmem.largest(make, budget="48MiB", target="h200", compilations=5)
    assert 30 <= int(answer) <= 46 and answer.report.device <= 48 * MIB
    assert str(answer).startswith(f"largest number: {answer.size} (a multiple of 1) on h200")
    assert "compiled 1 of at most 5: number 1 for h200: " in caplog.text
    few = jaxmem.largest(make, budget="48MiB", target="h200", most=2)
    assert int(few) == 2 and few.reason == "It is the largest number that was to be tried."


def test_wrong_makers_are_told():
    for make, text in (
        (8, r"jaxmem.largest takes make, a function of an integer that returns \(step, args\)"),
        (lambda n: STEP, r"make\(1\) must return \(step, args\), a function and the tuple of its"),
    ):
        with pytest.raises(jaxmem.JaxmemError, match=text):
            jaxmem.largest(make, budget="1GiB", target="h200")
    with pytest.raises(jaxmem.JaxmemError, match=r"most= takes an int of 1 or more; got 0\."):
        jaxmem.largest(lambda n: (STEP, make_args(n)), budget="1GiB", target="h200", most=0)
