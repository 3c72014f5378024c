"""A short version of the campaign of faults (`tests/faults.py`, `make faults`), and the checkpoints
of the examples by themselves."""

import argparse
import json
import logging
import pathlib
import random
import resource
import shutil
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from tests import faults

sys.path.append(str(faults.ROOT / "examples"))

import shared

SEED = 20260101


@pytest.mark.slow
@pytest.mark.parametrize("example", faults.EXAMPLES)
def test_examples_that_are_killed_end_as_if_nothing_had_been(example, tmp_path):
    dice = random.Random(SEED)
    whole = faults.UndisturbedRun(example, tmp_path, tmp_path / "compiled").run()
    for row in (faults.kill_at_random(whole, 2, dice), faults.damage_checkpoint(whole, dice)):
        assert not row.wrong, row


@pytest.mark.slow
def test_an_example_on_a_full_disk(tmp_path):
    whole = faults.UndisturbedRun("equinox", tmp_path, tmp_path / "compiled").run()
    try:
        row = faults.fill_disk(whole)
    except PermissionError as error:
        pytest.skip(str(error))
    assert not row.wrong, row


# ---- the checkpoints by themselves


@pytest.fixture(autouse=True)
def logging_as_it_was():
    yield
    logging.disable(logging.NOTSET)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


STEP = jaxmem.train_step(loss_fn, jaxmem.offload(optax.adam(1e-2)))
BATCH = jnp.ones((2, 3))


def options(folder, **changes):
    parser = argparse.ArgumentParser()
    shared.add_checkpoint_options(parser, every=2)
    parser.set_defaults(**{"seed": 0, "learning_rate": 0.1} | changes)
    return parser.parse_args(["--checkpoints", str(folder)])


def begin(folder, **changes):
    found = shared.Checkpoints(options(folder, **changes), ["seed", "learning_rate"])
    params = {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}
    return found, STEP.init(params)


def train(folder, until: int):
    """Trains up to a step; the step it was resumed from, and the parameters."""
    saved, state = begin(folder)
    first, state = saved.resume(state)
    for index in range(first + 1, until + 1):
        state, _ = STEP(state, BATCH)
        saved.save_at(index, state, last=index == until)
    return first, shared.digest(state)


def test_a_run_is_resumed_where_it_was_saved(tmp_path, capsys):
    whole = train(tmp_path / "whole", 7)
    assert [train(tmp_path / "parts", until)[0] for until in (2, 3, 6)] == [0, 2, 3]
    assert train(tmp_path / "parts", 7) == (6, whole[1])
    assert train(tmp_path / "parts", 7) == (7, whole[1])
    assert f"resumed from step 3 in {tmp_path}" in capsys.readouterr().out
    assert faults.steps(tmp_path / "parts") == [7, 6]
    saved, state = begin(tmp_path / "parts")
    memory = saved.resume(state)[1].opt_state[0].mu["w"].sharding.memory_kind
    assert memory == "pinned_host"
    none = argparse.Namespace(checkpoints=None, save_every=1)
    assert shared.Checkpoints(none, []).resume(state) == (0, state)


def test_every_damaged_file_sends_the_run_to_the_checkpoint_before(tmp_path, capsys):
    whole = train(tmp_path / "saved", 4)[1]
    files = [path.relative_to(tmp_path) for path in (tmp_path / "saved" / "4").rglob("*")]
    files = [path for path in files if (tmp_path / path).is_file()]
    assert len(files) > 8 and pathlib.Path("saved/4/checkpoint.json") in files
    dice = random.Random(SEED)
    for name in files:
        for index, kind in enumerate(faults.damages(tmp_path / name, dice)):
            saved, _ = begin(tmp_path / "saved")
            assert saved._check(4)[0], (name, kind)
            assert not saved._check(2)[0]
            if index:  # one run for each file, which removes it
                continue
            shutil.copytree(tmp_path / "saved", tmp_path / "copy")
            capsys.readouterr()
            assert train(tmp_path / "copy", 4) == (2, whole), (name, kind)
            said = capsys.readouterr().out
            assert said.startswith("the checkpoint of step 4 is damaged (")
            assert ") and is not used\nresumed from step 2 in " in said
            shutil.rmtree(tmp_path / "copy")
    (tmp_path / "saved" / "4" / "more").write_text("what nobody wrote")
    assert begin(tmp_path / "saved")[0]._check(4)[0] == "more"


def test_without_a_whole_checkpoint_nothing_is_begun_anew_unasked(tmp_path):
    train(tmp_path, 2)
    (tmp_path / "2" / shared.MANIFEST).write_text("")
    with pytest.raises(SystemExit, match=r"cannot be resumed: no checkpoint is whole. Remove the"):
        train(tmp_path, 4)
    assert faults.steps(tmp_path) == [2]


def test_another_run_is_not_resumed(tmp_path):
    train(tmp_path, 2)
    for changes, said in (
        (
            {"seed": 1},
            "it was begun with --seed 0, not 1. Give the same, or another --checkpoints.",
        ),
        ({"learning_rate": 0.2}, "begun with --learning-rate 0.1, not 0.2. Give the same"),
    ):
        saved, state = begin(tmp_path, **changes)
        with pytest.raises(SystemExit, match=said):
            saved.resume(state)


def test_what_was_half_written_or_half_removed_is_cleared(tmp_path):
    train(tmp_path, 4)
    for name in (".part", ".part-2"):
        shutil.copytree(tmp_path / "4", tmp_path / name)
    assert train(tmp_path, 4)[0] == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "4"]


@pytest.mark.parametrize("size", [0, 1, 100, 1000])
def test_a_checkpoint_that_cannot_be_written_is_said_and_leaves_nothing(tmp_path, size):
    train(tmp_path, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    saved, state = begin(tmp_path)
    state = saved.resume(state)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(SystemExit) as caught:
            saved.save_at(4, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(caught.value)
    assert said.startswith(f"The checkpoint of step 4 cannot be written to {tmp_path}: ")
    assert said.endswith("the run goes on from the checkpoint before.") and "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    saved.save_at(4, state)
    assert faults.steps(tmp_path) == [4, 2]


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    saved, state = begin(tmp_path / "file" / "folder")
    assert saved.resume(state)[0] == 0
    with pytest.raises(SystemExit, match="cannot be written to .*: .*Not a directory"):
        saved.save_at(2, state)


def test_the_list_of_files_is_readable(tmp_path):
    train(tmp_path, 2)
    about = json.loads((tmp_path / "2" / shared.MANIFEST).read_text().partition("\n")[2])
    assert about["settings"] == {"seed": 0, "learning_rate": 0.1}
    assert all(len(checksum) == 64 for checksum in about["files"].values())
    assert shared.digest(jax.random.normal(jax.random.key(0), 3)) != shared.digest(0)
