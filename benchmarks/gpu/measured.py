"""Measures on the GPU of this machine: python -m benchmarks --suite gpu --run [--quick] [--only=…]

Each part is a process of its own that ends within `LIMIT`; what it found is kept at once, so the
same command goes on after an interruption with the parts that are missing or failed. A new commit
or another device begins a new file. Parts: `parity` and `repeat`, the tests that only a GPU can
run; `search`, exact, over Wikipedia's passages; `tokens`, the updates of a language model; and the
first updates of recipes, by the user's own command. `--quick`: small ones, on any device.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.gpu import OWN
from benchmarks.gpu.compiling import with_system
from benchmarks.gpu.recipes import CORPORA, QUICK, RECIPES, config_of, search_program
from benchmarks.report import Case
from qrag_jax.errors import InputError
from qrag_jax.runtime.aot import Program, least_seconds
from qrag_jax.runtime.config_fields import flat
from qrag_jax.runtime.mesh import make_mesh
from qrag_jax.runtime.platform import ask_determinism
from qrag_jax.runtime.whole_files import write_json

LIMIT, ROUNDS, ONE = 590.0, 5, (1, 1, 1)
STEPS, LOGGED = 24, 4  # updates of a recipe, and those of a line of its log
TOKENS = ("rlvr/qwen3-1.7b", "leret/qwen3-1.7b")  # whose updates `tokens` times
TRAINED = ("q_rag/contriever", "q_rag/e5", "q_rag/qwen3-0.6b", "harr/grpo-0.6b")


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """Runs the parts that are missing; returns the figures of all parts.

    Raises:
        InputError: there is no GPU here, or `only` names an unknown part.
    """
    if unknown := [name for name in only if name not in PARTS]:
        raise InputError(f"--only={unknown[0]}: the parts are {', '.join(PARTS)}.")
    # So that the part that is being run ends with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    python = str(OWN) if OWN.exists() else sys.executable
    device = in_process(python, "device", Path())[0]["case"]
    if not quick and not device.startswith("gpu"):
        raise InputError(
            "--run measures on a GPU, and JAX finds none here (pip install 'qrag_jax[cuda12]' "
            "where there is one); --quick runs small programs on any device."
        )
    name = f"{report.slug(device)}{'-quick' if quick else ''}-{report.commit()}"
    folder = report.ROOT / "runs" / "benchmarks" / "gpu" / name
    wanted = only or (QUICK_PARTS if quick else tuple(PARTS))
    more = ["--quick"] if quick else []
    parts = finish(folder, wanted, lambda part: in_process(python, part, folder, *more))
    return [Case(**case) for part in parts.values() for case in part]


def finish(
    folder: Path, names: Sequence[str], part: Callable[[str], list[dict[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Runs the parts of which the folder's file has no figures, and adds each one's at once.

    Returns:
        The figures by part; of one that failed, now, a case without a value that says why.
    """
    path, results = folder / "results.json", {}
    if path.exists():
        results = json.loads(path.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    failed = {}
    for name in names:
        if name not in results:
            print(f"{name}: …", flush=True)
            try:
                results[name] = part(name)
            except (subprocess.SubprocessError, OSError, ValueError) as error:
                failed[name] = [{"case": name, "value": None, "unit": str(error)[-300:]}]
                continue
            write_json(path, results)
    return results | failed


def in_process(python: str, name: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """What a part prints on its last line.

    Raises:
        SubprocessError: it took too long, or ended with an error.
    """
    command = [python, "-m", "benchmarks.gpu.measured", name, str(folder), *more]
    process = subprocess.Popen(  # noqa: S603
        command, cwd=report.ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        shown, _ = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:  # with the processes that it has started itself
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        raise subprocess.SubprocessError(f"ended with status {process.returncode}")
    figures: list[dict[str, Any]] = json.loads(shown.splitlines()[-1])
    return figures


# ---------------------------------------------------------------- parts


def _device(folder: Path, quick: bool) -> list[dict[str, Any]]:
    first = jax.devices()[0]
    return [_case(f"{first.platform} {first.device_kind}", float(jax.device_count()), "devices")]


def _tests(which: str, folder: Path, quick: bool) -> list[dict[str, Any]]:
    """The tests of tests/test_on_gpu.py that an expression of pytest's -k chooses."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_on_gpu.py", "-m", "", "-k", which]
    shown = subprocess.run(command, capture_output=True, text=True).stdout  # noqa: S603
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", shown)}
    bad = counts.get("failed", 0) + counts.get("error", 0)
    if not counts.get("passed", 0) + bad:
        raise ValueError(f"no test was run: {shown[-200:]}")
    passed = float(counts.get("passed", 0))
    return [
        _case(f"tests on a GPU ({which})", passed, "passed", target="no failure", holds=not bad)
    ]


def _search(folder: Path, quick: bool) -> list[dict[str, Any]]:
    name = "search/tiny" if quick else "search/wikipedia"
    ask_determinism()
    devices = jax.devices()[:1]
    on_cpu, corpus = devices[0].platform == "cpu", CORPORA[name]
    program = search_program(corpus, make_mesh(ONE, devices), on_cpu=on_cpu)
    return [timed(name, program, corpus.queries, "queries/s")]


def _tokens(folder: Path, quick: bool) -> list[dict[str, Any]]:
    """Updates of language models: their blocks have fixed shapes, so values change no time."""
    recipes = QUICK if quick else {name: RECIPES[name] for name in TOKENS}
    figures: list[dict[str, Any]] = []
    for name, recipe in recipes.items():

        def use(system: Any, *sizes: int, name: str = name) -> list[dict[str, Any]]:
            updates = [p for p in system.programs() if p.name.startswith("update")]
            return [timed(f"{name}/{p.name}", p) for p in updates]

        figures += with_system(recipe, ONE, folder.parent / "models", use, drawn=False)
        jax.clear_caches()
    return figures


def _recipe(name: str, folder: Path, quick: bool) -> list[dict[str, Any]]:
    """The first updates of a recipe, with random weights of full size: a time depends on none."""
    recipe = QUICK["harr/tiny"] if quick else RECIPES[name]
    config = config_of(recipe, ONE, folder.parent / "models", drawn=True)
    with config.unlocked():
        config.train.update(steps=STEPS, log_every=LOGGED, eval_every=STEPS, checkpoint_every=STEPS)
        config.eval.samples = min(config.eval.samples, 32)
    workdir = folder / f"recipe-{name.replace('/', '-')}"
    file, _, variant = recipe.config.partition(":")
    command = [sys.executable, "-m", "qrag_jax.train", f"--workdir={workdir}"]
    command += [f"--config=configs/{file}.py:{variant}"]
    plain = importlib.import_module(f"configs.{file}").get_config(variant)
    before, wanted = flat(plain.to_dict()), flat(config.to_dict())
    command += [f"--config.{f}={v}" for f, v in wanted.items() if before.get(f) != v]
    with (folder / f"{workdir.name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)  # noqa: S603
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    # The first line of the log has the compiling.
    rates = [row["speed/steps_per_second"] for row in rows if "speed/steps_per_second" in row][1:]
    first = [row["speed/time_to_first_step"] for row in rows if "speed/time_to_first_step" in row]
    details = {"first step after, s": first[0]} if first else {}
    return [_case(f"{name}: update", 1e3 / statistics.median(rates), "ms", details=details)]


PARTS: dict[str, Callable[[Path, bool], list[dict[str, Any]]]] = {
    "parity": functools.partial(_tests, "attention or computes"),
    "search": _search,
    "tokens": _tokens,
    **{f"recipe-{n.replace('/', '-')}": functools.partial(_recipe, n) for n in TRAINED},
    "repeat": functools.partial(_tests, "repeats"),
}
QUICK_PARTS = ("search", "tokens")


def _case(name: str, value: float | None, unit: str, **more: Any) -> dict[str, Any]:
    return {"case": name, "value": value, "unit": unit, **more}


def timed(name: str, program: Program, work: float = 0.0, unit: str = "ms") -> dict[str, Any]:
    """Runs a program with values; the median of `ROUNDS` calls after one that warms up.

    Args:
        work: what one call does, if the figure is a rate of `unit`; 0: it is milliseconds.
    """
    began = time.monotonic()
    compiled = program.function.lower(*program.arguments).compile()
    took, arguments = time.monotonic() - began, list(with_values(program.arguments))
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
        if program.name.startswith("update"):
            arguments[0] = result[0]  # its buffers were taken over
    median = statistics.median(seconds[1:])
    details: dict[str, float | str] = {"compiled in, s": took, "ms": 1e3 * median}
    device = jax.devices()[0]
    least = least_seconds(device.device_kind, program.flops, program.dtype)
    if least is not None:
        details["share of peak"] = least / median
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if peak is not None:
        details["peak memory, GiB"] = peak / 2**30
    return _case(name, work / median if work else 1e3 * median, unit, details=details)


def with_values(arguments: Any) -> Any:
    """Values for shapes: random floats, zero moments and integers, true flags, in their places."""
    places, tree = jax.tree_util.tree_flatten_with_path(arguments)

    def make() -> list[Any]:
        return [
            _value(n, jax.tree_util.keystr(path), leaf) for n, (path, leaf) in enumerate(places)
        ]

    where = [getattr(leaf, "sharding", None) for _, leaf in places]
    return jax.tree.unflatten(tree, jax.jit(make, out_shardings=where)())


def _value(number: int, path: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(number), leaf.shape)
    if leaf.dtype == jnp.bool_:
        return jnp.ones(leaf.shape, leaf.dtype)
    if not jnp.issubdtype(leaf.dtype, jnp.floating) or ".mu" in path or ".nu" in path:
        return jnp.zeros(leaf.shape, leaf.dtype)
    # JAX's own generator takes minutes for some thousand million numbers.
    places = jnp.arange(math.prod(leaf.shape), dtype=jnp.uint32) % 10_007
    drawn = 0.03 * jnp.sin(places * (1.0 + number)).reshape(leaf.shape)
    return (drawn + ("'scale'" in path)).astype(leaf.dtype)


def main() -> None:
    """Runs one part."""
    name, folder, *more = sys.argv[1:]
    part = _device if name == "device" else PARTS[name]
    print(json.dumps(part(Path(folder), "--quick" in more)))


if __name__ == "__main__":
    main()
