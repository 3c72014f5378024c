"""What the examples share: options, errors told in a line, digits, and checkpoints.

A checkpoint is whole or not there, and checked before use. It is a folder named by its step. Orbax
writes it under another name; then comes a list of its files with their SHA-256, and one rename
makes it count. So a run may be killed at any moment. A checkpoint whose files are not what was
written is left out: the one before it is used, and that is said. On several processes the first one
keeps the books.

    checkpoints = Checkpoints(options, ["batch", "seed"])  # None of it without --checkpoints
    start, state = checkpoints.resume(state)
    for step in range(start + 1, options.steps + 1):
        state, metrics = train_step(state, batch(step))
        checkpoints.save_at(step, state, last=step == options.steps)
"""

import argparse
import errno
import hashlib
import json
import logging
import pathlib
import shutil
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import jaxmem

# The list of files; the names of what does not count.
MANIFEST, PARTIAL = "checkpoint.json", ".part"
KEPT = 2
_FILES = 2**16  # bytes of what Orbax writes beside the arrays: a dozen small files
OPTION_HELP = {
    "accumulate": "steps in an update of the parameters",
    "batch": "examples in a step",
    "length": "characters in an example",
    "microbatches": "slices of a batch, one after the other",
    "plan_batch": "examples in the step that --plan compiles",
    "precision": "fp32, bf16, fp16 or the long form",
    "print_every": "steps between two lines",
    "rate": "peak learning rate",
    "side": "pixels of an image's side",
    "stage": "of ZeRO",
    "steps": "steps to train",
}


def parser(
    about: str, *, save_every: int, folder: str | None = None, **defaults: int | float | str
) -> argparse.ArgumentParser:
    """The options of an example: ``rate=0.1`` is ``--rate``, a float that is 0.1 by default.

    ``about`` is the script's docstring; ``folder`` is where checkpoints go by default.
    """
    found = argparse.ArgumentParser(description=about.partition("\n")[0])
    for name, default in defaults.items():
        found.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            help=f"{OPTION_HELP.get(name, '')} (default: %(default)s)".strip(),
        )
    add_checkpoint_options(found, every=save_every, default=folder)
    return found


def run(main: Callable[[argparse.Namespace], None], arguments: argparse.ArgumentParser) -> None:
    """Calls ``main`` with the options of the command line; errors of jaxmem end it with a line."""
    try:
        main(arguments.parse_args())
    except jaxmem.JaxmemError as error:
        raise SystemExit(f"error: {error}") from error


def count(params) -> int:
    """How many numbers the parameters are."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def digits(train: bool) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's handwritten digits, ``uint8 [n, 8, 8]`` from 0 to 16, and their labels: 1,437
    to train on, or the 360 that are held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    chosen = order[360:] if train else order[:360]
    return images[chosen].reshape(-1, 8, 8).astype(np.uint8), labels[chosen].astype(np.int32)


# ---- checkpoints


def add_checkpoint_options(parser, every: int, default: str | None = None) -> None:
    """``--checkpoints`` and ``--save-every``."""
    about = "folder to save to and to resume from" + (" (default: %(default)s)" if default else "")
    parser.add_argument("--checkpoints", metavar="DIR", default=default, help=about)
    parser.add_argument("--save-every", type=int, default=every, help="steps between checkpoints")


def digest(params: Any) -> str:
    """The parameters in 16 letters: the same for two runs that end bit for bit alike."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


class Checkpoints:
    """The checkpoints of one run, in the folder of ``options.checkpoints``.

    ``settings`` are the names of the options that make the run what it is: it is not resumed with
    others.
    """

    def __init__(self, options, settings: list[str]):
        self.folder = pathlib.Path(options.checkpoints).resolve() if options.checkpoints else None
        self.every = options.save_every
        self.settings = json.loads(
            json.dumps({name: getattr(options, name) for name in settings}, default=str)
        )
        self.first = jax.process_index() == 0

    def resume(self, state: Any) -> tuple[int, Any]:
        """The step of the newest whole checkpoint and its state, with the arrays where those of
        ``state`` are; 0 and ``state`` itself where the run begins."""
        if self.folder is None:
            return 0, state
        step, why = 0, "the first process says why"
        if self.first:
            try:
                step = self._newest()
            except (OSError, SystemExit) as error:
                step, why = -1, str(error)
        step = int(multihost_utils.broadcast_one_to_all(np.int64(step)))
        if step < 0:
            raise SystemExit(f"The run in {self.folder} cannot be resumed: {why}")
        if not step:
            return 0, state
        leaves, tree = jax.tree.flatten(state)
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, leaves)
        with _orbax() as orbax:
            restored = orbax.restore(
                self._path(step) / "state", args=ocp.args.StandardRestore(like)
            )
        if self.first:
            print(f"resumed from step {step} in {self.folder}", flush=True)
        return step, jaxmem.place(jax.tree.unflatten(tree, restored), like=state)

    def save_at(self, step: int, state: Any, last: bool = False) -> None:
        """Saves the state after ``step`` if it is time, or the last one; before the next step runs,
        to which the state's memory is donated."""
        if self.folder is None or not (last or step % self.every == 0):
            return
        threads = set(threading.enumerate())
        try:
            self._save(step, jax.tree.leaves(state))
        except Exception as error:
            for thread in set(threading.enumerate()) - threads:
                thread.join(5)  # Orbax's, which go on writing
            if self.first:
                self._clear()
            no_room = self.folder.is_dir() and shutil.disk_usage(self.folder).free < 2**16
            why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            if no_room or "No space left" in str(error):
                why = "the disk is full"
            raise SystemExit(
                f"The checkpoint of step {step} cannot be written to {self.folder}: {why}. Started "
                "again when it can be, the run goes on from the checkpoint before."
            ) from error

    def _save(self, step: int, leaves: list[Any]) -> None:
        part = self.folder / PARTIAL
        if self._path(step).exists():  # the last one of a run that had ended
            return
        if self.first:
            self._clear()
            part.mkdir(parents=True)
            size = sum(leaf.nbytes for leaf in leaves) + _FILES
            if shutil.disk_usage(part).free < size:
                raise OSError(errno.ENOSPC, f"No space left for {jaxmem.format_bytes(size)}")
        multihost_utils.sync_global_devices("a place for the checkpoint")
        with _orbax() as orbax:
            logging.disable()  # it logs what it raises, and what its threads do thereafter
            try:
                orbax.save(part / "state", args=ocp.args.StandardSave(leaves))
            finally:
                logging.disable(logging.NOTSET)
        if self.first:
            about = json.dumps({"settings": self.settings, "files": _files(part)})
            (part / MANIFEST).write_text(f"{_sha256(about.encode())}\n{about}")
            part.rename(self._path(step))
            for old in self._steps()[KEPT:]:
                self._remove(old)
        multihost_utils.sync_global_devices("the checkpoint counts")

    def _newest(self) -> int:
        """The newest whole checkpoint; 0: there is none, and none that is damaged."""
        self._clear()
        damaged = {}
        for step in self._steps():
            why, settings = self._check(step)
            if why:
                damaged[step] = why
                print(
                    f"the checkpoint of step {step} is damaged ({why}) and is not used", flush=True
                )
                continue
            for name in self.settings:
                if settings.get(name) != self.settings[name]:
                    option = name.replace("_", "-")
                    raise SystemExit(
                        f"it was begun with --{option} {settings.get(name)}, not "
                        f"{self.settings[name]}. Give the same, or another --checkpoints."
                    )
            for other in damaged:
                self._remove(other)
            return step
        if damaged:
            raise SystemExit("no checkpoint is whole. Remove the folder to begin anew.")
        return 0

    def _check(self, step: int) -> tuple[str, dict[str, Any]]:
        """What is wrong with a checkpoint ("": nothing), and the settings of its run."""
        try:
            checksum, _, about = (self._path(step) / MANIFEST).read_bytes().partition(b"\n")
        except OSError as error:
            return f"{MANIFEST}: {error.strerror}", {}
        if _sha256(about) != checksum.decode(errors="replace"):
            return MANIFEST, {}
        listed = json.loads(about)
        try:
            found = _files(self._path(step))
        except OSError as error:
            return str(error), {}
        names = sorted(listed["files"].keys() | found.keys())
        wrong = [name for name in names if listed["files"].get(name) != found.get(name)]
        return ", ".join(wrong[:3]), listed["settings"]

    def _steps(self) -> list[int]:
        """Of what is there, the newest first."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((int(entry.name) for entry in entries if entry.name.isdigit()), reverse=True)

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / str(step)

    def _remove(self, step: int) -> None:
        """Renames first: half a checkpoint must not look like one."""
        self._path(step).rename(self.folder / f"{PARTIAL}-{step}")
        shutil.rmtree(self.folder / f"{PARTIAL}-{step}")

    def _clear(self) -> None:
        """Removes what was not written or not removed to its end."""
        for part in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(part)


def _orbax() -> ocp.Checkpointer:
    """Not in the background: the next step overwrites what is being saved."""
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _files(folder: pathlib.Path) -> dict[str, str]:
    """The checksum of every file but the list itself, by its path in the folder."""
    return {
        str(path.relative_to(folder)): _sha256(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
