"""Faults on purpose, and what is left of them: `make faults`.

    python tests/faults.py                                   # all of it, about an hour on two cores
    python tests/faults.py kills --example unet --kills 5 --seed 7

kills    every example that trains, killed at random moments and while it writes checkpoints, and
         started again until it ends: with the parameters of a run that nobody disturbed
full     the same examples on a disk that fills up: a message, nothing half-written, and with room
         again the same parameters (needs root, for a small file system in memory)
damage   every file of a checkpoint and every kept result of the compiler, damaged in several ways:
         never used
workers  processes that compile or did, killed: their workers end within 5 seconds
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
# Small, with many checkpoints. One process each; tests/end_to_end/test_fsdp.py kills one of two.
EXAMPLES = {
    "resnet50": "--epochs 1 --batch 128 --size 16 --save-every 1",
    "characters": "--steps 20 --batch 4 --length 16 --accumulate 2 --save-every 2",
    "unet": "--steps 12 --side 16 --batch 4 --save-every 1",
    "equinox": "--steps 40 --depth 2 --width 16 --save-every 4",
    "wave": "--steps 12 --side 32 --length 60 --save-every 1",
    "fsdp": "--steps 12 --cpu-devices 2 --save-every 1",
}


@dataclasses.dataclass
class Row:
    """What was tried so often, and how often it went wrong."""

    what: str
    times: int
    wrong: int
    note: str = ""


# ---- the examples


def start(example: str, saved: pathlib.Path, compiled: pathlib.Path) -> subprocess.Popen:
    """The training script of an example; compiled programs are shared between runs."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_COMPILATION_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    script = str(ROOT / "examples" / example / "train.py")
    return subprocess.Popen(
        [sys.executable, script, *EXAMPLES[example].split(), "--checkpoints", str(saved)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    """What a run printed that ended well."""
    output, _ = process.communicate(timeout=900)
    if process.returncode:
        raise AssertionError(f"exit code {process.returncode}:\n{output[-3000:]}")
    return output


def digest(output: str) -> str:
    """Of the parameters with which a run ended."""
    found = re.search(r"^parameters (\w{16})$", output, re.MULTILINE)
    assert found, output
    return found[1]


@dataclasses.dataclass
class UndisturbedRun:
    """A run that nobody disturbed."""

    example: str
    folder: pathlib.Path
    compiled: pathlib.Path
    digest: str = ""
    seconds: float = 0

    def run(self) -> "UndisturbedRun":
        """Runs twice: the first one compiles."""
        for name in ("first", "whole"):
            began = time.monotonic()
            self.digest = digest(finish(start(self.example, self.folder / name, self.compiled)))
            self.seconds = time.monotonic() - began
        return self

    @property
    def checkpoints(self) -> list[int]:
        """The steps that were kept, the newest first."""
        return steps(self.folder / "whole")


def steps(folder: pathlib.Path) -> list[int]:
    """The checkpoints of a run, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((int(p.name) for p in folder.iterdir() if p.name.isdigit()), reverse=True)


# ---- kills


def kill_at_random(whole: UndisturbedRun, count: int, dice: random.Random) -> Row:
    """Kills the runs of an example so many times, every second time while it writes."""
    row = Row(f"{whole.example}: killed", 0, 0)
    writing = ended = 0
    while row.times < count:
        saved = whole.folder / f"killed-{ended}"
        while True:
            process = start(whole.example, saved, whole.compiled)
            if row.times < count:
                aimed = row.times % 2 == 1
                moment = dice.uniform(0, 0.3) if aimed else dice.uniform(0, whole.seconds)
                _wait(process, saved if aimed else None, moment)
            if row.times < count and process.poll() is None:
                writing += bool(list(saved.glob(".part*")))
                process.kill()
                process.communicate()
                row.times += 1
                continue
            try:
                good = digest(finish(process)) == whole.digest
            except AssertionError as error:
                good, row.note = False, str(error)
            row.wrong += not good
            ended += 1
            break
    row.note = f"{writing} while writing a checkpoint, {ended} runs to the end {row.note}".strip()
    return row


def _wait(process: subprocess.Popen, saved: pathlib.Path | None, moment: float) -> None:
    """Until some seconds have gone by, counted from when a checkpoint is being written if
    ``saved`` is its folder; or until the process ends."""
    while saved and process.poll() is None and not list(saved.glob(".part*")):
        time.sleep(0.001)
    deadline = time.monotonic() + moment
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)


# ---- full disks


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, size: int) -> Iterator[Callable[[int], None]]:
    """A file system in memory; gives a function that changes its size. PermissionError: it takes
    root."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        raise PermissionError("no file system can be mounted here")
    try:
        yield lambda size: subprocess.run(
            ["mount", "-o", f"remount,size={size}", str(folder)], check=True
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill_disk(whole: UndisturbedRun) -> Row:
    """An example whose disk has room for two checkpoints and not for a third."""
    newest = whole.folder / "whole" / str(whole.checkpoints[0])
    # In pages, as a file system in memory has it; blocks on a disk may be more, or none as yet.
    files = [path for path in newest.rglob("*") if path.is_file()]
    one = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    disk, row = whole.folder / "disk", Row(f"{whole.example}: disk full", 1, 0)
    with small_disk(disk, int(2.5 * one)) as resize:
        process = start(whole.example, disk / "saved", whole.compiled)
        output, _ = process.communicate(timeout=900)
        said = re.search(
            r"The checkpoint of step \d+ cannot be written to .*the disk is full", output
        )
        left = list((disk / "saved").glob(".part*"))
        if process.returncode != 1 or not said or "Traceback" in output or left:
            row.wrong, row.note = 1, f"exit code {process.returncode}, left {left}: {output[-500:]}"
        kept = steps(disk / "saved")
        resize(20 * one)
        if digest(finish(start(whole.example, disk / "saved", whole.compiled))) != whole.digest:
            row.wrong, row.note = 1, "ended with other parameters"
    row.note = row.note or f"ended with a message; went on from step {kept[0] if kept else 0}"
    return row


# ---- damage


def zeros(content: bytes, dice: random.Random) -> bytes:
    """Up to 200 bytes of zeros."""
    at = dice.randrange(max(len(content) - 200, 1))
    return content[:at] + bytes(len(content[at : at + 200])) + content[at + 200 :]


def a_bit(content: bytes, dice: random.Random) -> bytes:
    """One bit changed."""
    at = dice.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]


def cut(content: bytes, dice: random.Random) -> bytes:
    """The rest lost."""
    return content[: dice.randrange(len(content))]


def noise(content: bytes, dice: random.Random) -> bytes:
    """Something else."""
    return dice.randbytes(100)


KINDS: list[Callable[[bytes, random.Random], bytes]] = [zeros, a_bit, cut, noise]


def damages(path: pathlib.Path, dice: random.Random) -> Iterator[str]:
    """Damages a file in every way, one after the other, and puts it right again."""
    content = path.read_bytes()
    for kind in KINDS:
        other = kind(content, dice) if content else b"x"
        if other != content:
            path.write_bytes(other)
            yield kind.__name__
    path.unlink()
    yield "removed"
    path.write_bytes(content)


def damage_checkpoint(whole: UndisturbedRun, dice: random.Random) -> Row:
    """Every file of the newest checkpoint, in every way; and one such run to its end."""
    saved, (newest, before) = whole.folder / "whole", whole.checkpoints[:2]
    files = sorted(path for path in (saved / str(newest)).rglob("*") if path.is_file())
    row = Row(f"{whole.example}: damaged checkpoints", 0, 0)
    for path in files:
        for kind in damages(path, dice):
            row.times += 1
            if checked(saved, newest):
                row.wrong, row.note = row.wrong + 1, f"{path.name}: {kind}"
    if not checked(saved, newest):
        row.wrong, row.note = row.wrong + 1, "a whole one is taken for a damaged one"
    path = dice.choice([path for path in files if path.stat().st_size])
    path.write_bytes(dice.choice(KINDS)(path.read_bytes(), dice))
    output = finish(start(whole.example, saved, whole.compiled))
    told = f"the checkpoint of step {newest} is damaged (" in output
    if not told or f"resumed from step {before} " not in output or digest(output) != whole.digest:
        row.wrong, row.note = row.wrong + 1, output
    row.note = row.note or f"{len(files)} files; a run went on from the one before, and said so"
    return row


def checked(saved: pathlib.Path, step: int) -> bool:
    """Whether the examples take a checkpoint for a whole one."""
    sys.path.append(str(ROOT / "examples"))
    from shared import Checkpoints

    options = argparse.Namespace(checkpoints=saved, save_every=1)
    return not Checkpoints(options, [])._check(step)[0]


PROGRAM = """
    import sys
    import jax, jax.numpy as jnp, jaxmem

    shape = jax.ShapeDtypeStruct((int(sys.argv[1]), 64), "float32")
    report = jaxmem.memory(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x.T))), shape, target="h200")
    print(report.to_json())
"""


def damage_results(folder: pathlib.Path, dice: random.Random) -> list[Row]:
    """Every kept result of the compiler, in every way; and a cache on a full disk."""
    sys.path.insert(0, str(ROOT))
    from jaxmem.targets.cache import cache_folder

    cache, compilers = folder / "cache", cache_folder() / "compilers"

    def report(rows: int, where: pathlib.Path = cache) -> str:
        where.mkdir(parents=True, exist_ok=True)
        if not (where / "compilers").is_symlink():
            (where / "compilers").symlink_to(compilers)
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAXMEM_CACHE": str(where),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(rows)]
        return finish(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True))

    row = Row("kept results: damaged", 0, 0)
    for rows in (64, 128):
        expected = report(rows)
        (path,) = (cache / "compiled").iterdir()
        for kind in damages(path, dice):
            row.times += 1
            if report(rows) != expected or list((cache / "compiled").iterdir()) != [path]:
                row.wrong, row.note = row.wrong + 1, f"{rows} rows: {kind}"
        shutil.rmtree(cache / "compiled")
    full = Row("kept results: disk full", 1, 0)
    small = folder / "small"
    with small_disk(small, 4096):
        (small / "filler").write_bytes(bytes(4096))
        if report(128, small) != expected:
            full.wrong, full.note = 1, "other bytes"
        left = list((small / "compiled").iterdir())
        if left:
            full.wrong, full.note = 1, f"left {left}"
    return [row, full]


# ---- workers

COMPILING = """
    import jax, jax.numpy as jnp, jaxmem
    from jaxmem.targets import workers
    from jaxmem.targets import compilation
    from jaxmem.targets.cuda import compiler

    def loss(w, x):
        for scale in range(400):
            x = jnp.tanh(x @ w) + scale * jnp.sin(x)
        return x.sum()

    compilation.read = lambda path: None  # nothing is kept
    compilation.write = lambda path, compiled: None
    shapes = [jax.ShapeDtypeStruct((256, 256), "float32")] * 2
    compile_long = lambda: jaxmem.memory(jax.grad(loss), *shapes, target="h200")
    compile_short = lambda: jaxmem.memory(jnp.sin, shapes[0], target="h200")
    start_worker = workers.Worker.__init__

    def started(self, command):
        start_worker(self, command)
        print("worker", self.process.pid, flush=True)

    workers.Worker.__init__ = started
"""
BUSY = "compile_short()\nprint('compiling', flush=True)\ncompile_long()\nprint('too late')"
IDLE = "compile_short()\nprint('idle', flush=True)\nimport time\ntime.sleep(600)"


def run_compiling(code: str) -> subprocess.Popen:
    """A process that compiles, and prints the numbers of its workers."""
    text = textwrap.dedent(COMPILING) + textwrap.dedent(code)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    command = [sys.executable, "-c", text]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


def gone(pid: int) -> bool:
    """Whether a process has ended (nobody may have asked for its exit code)."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def seconds_after(how: signal.Signals, code: str, wait: float) -> float:
    """How long a worker outlives its parent, killed ``wait`` seconds after it compiles or idles."""
    parent = run_compiling(code)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline().split()[1])
    parent.stdout.readline()
    time.sleep(wait)
    assert not gone(worker)
    parent.send_signal(how)
    assert parent.communicate(timeout=10)[0] == ""
    killed = time.monotonic()
    while not gone(worker) and time.monotonic() - killed < 60:
        time.sleep(0.02)
    return time.monotonic() - killed


def kill_parents(count: int, dice: random.Random) -> Row:
    """Parents killed at random moments, while they compile and after."""
    found = [
        seconds_after(
            dice.choice([signal.SIGKILL, signal.SIGTERM]),
            BUSY if index % 2 else IDLE,
            dice.uniform(0, 6 if index % 2 else 1),
        )
        for index in range(count)
    ]
    wrong = sum(seconds > 5 for seconds in found)
    return Row("workers: parent killed", count, wrong, f"gone after {max(found):.1f} s at most")


# ---- the campaign


def campaign(options, folder: pathlib.Path) -> Iterator[Row]:
    """The rows of what was asked for."""
    wanted = options.parts or ["kills", "full", "damage", "workers"]
    dice = random.Random(options.seed)
    if "workers" in wanted:
        yield kill_parents(options.kills, dice)
    if "damage" in wanted:
        yield from damage_results(folder, dice)
    for example in options.example or EXAMPLES:
        if set(wanted) == {"workers"}:
            break
        whole = UndisturbedRun(example, folder / example, folder / "compiled").run()
        if "kills" in wanted:
            yield kill_at_random(whole, options.kills, dice)
        if "full" in wanted:
            yield fill_disk(whole)
        if "damage" in wanted:
            yield damage_checkpoint(whole, dice)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", help="of kills, full, damage, workers (default: all)")
    parser.add_argument("--example", action="append", choices=EXAMPLES, help="default: all")
    parser.add_argument("--kills", type=int, default=20, help="of each example, and of parents")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()) // 86400, help="default: today"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in campaign(options, pathlib.Path(folder)):
            wrong += row.wrong
            print(f"{row.what:34}{row.times:5} times {row.wrong:3} wrong  {row.note}", flush=True)
    print(f"{wrong} wrong in all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
