"""Compiles the programs of a training's step and tells their time and bytes, as JSON.

`python -m benchmarks.scaling_programs ASKED` prints one JSON object on its last line; ASKED is the
JSON of an `Asked`. The training is opened as `train --dry_run` opens it: no weights are placed and
nothing is trained. One compiled program serves several batches: its loops over blocks take the
rounds that the lengths of so many questions give them, and all else is the same.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from benchmarks.memory_cases import whole_bytes
from qrag_jax import systems
from qrag_jax.data.episodes import EpisodeSource, stack
from qrag_jax.errors import InputError
from qrag_jax.rollouts.block_rounds import draw_lengths, loop_rounds, widths_of
from qrag_jax.runtime import step_time
from qrag_jax.runtime.device_speeds import Links, Speeds, speeds_of
from qrag_jax.runtime.dry_run import Program
from qrag_jax.runtime.hlo import SENDS
from qrag_jax.runtime.run import Run
from qrag_jax.runtime.step_time import COLLECTIVES, Rounds
from qrag_jax.runtime.targets import described_devices
from qrag_jax.systems.q_rag import QRag

REFUSED = 2  # the exit status if something that is needed is missing
LOADED = 40  # batches whose loading is timed


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to compile.

    Attributes:
        config: a config of configs/, such as "published.py:e5-hotpotqa".
        fields: of the config, by their dotted names.
        mesh: sizes along data, fsdp and tensor.
        devices: as `--for` has them, such as "h100x8"; "": this process's own.
        compiled_for: questions a device of the program.
        questions: questions a device of the steps whose time is told.
        speeds: of a device, as `speeds_json` gives them; None: those known of its kind.
    """

    config: str
    fields: Mapping[str, Any]
    mesh: tuple[int, int, int]
    devices: str
    compiled_for: int
    questions: tuple[int, ...]
    speeds: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, text: str) -> Asked:
        """Reads it from JSON."""
        found = json.loads(text)
        found["mesh"], found["questions"] = tuple(found["mesh"]), tuple(found["questions"])
        return cls(**found)


def speeds_json(speeds: Speeds) -> dict[str, Any]:
    """Speeds as JSON holds them."""
    return dataclasses.asdict(speeds)


def speeds_from(found: Mapping[str, Any]) -> Speeds:
    """The inverse of `speeds_json`."""
    links = found["links"] and Links(**found["links"])
    return Speeds(**{**found, "links": links})


def config_of(asked: Asked) -> ConfigDict:
    """The config with the asked fields, batch and mesh.

    Raises:
        InputError: there is no such config.
    """
    file, _, variant = asked.config.partition(":")
    try:
        module = importlib.import_module(f"configs.{file.removesuffix('.py')}")
    except ModuleNotFoundError:
        raise InputError(f"there is no configs/{file}; give one of that folder.") from None
    config = module.get_config(variant)
    count = int(np.prod(asked.mesh))
    with config.unlocked():
        config.update_from_flattened_dict(dict(asked.fields))
        config.train.batch_size = count * asked.compiled_for
        config.train.accumulation = 1
        config.eval.batch_size = -(-config.eval.batch_size // count) * count
        config.runtime.mesh = asked.mesh
    return config


def measure(asked: Asked) -> dict[str, Any]:
    """Compiles the programs of a step.

    Returns:
        JSON: `programs`, for each one its bytes and, by questions, its seconds; `gradients`, bytes
        of all gradients in float32; `question_bytes`; `state_bytes`, of parameters, targets and
        moments in all; `loaded`, questions/s that a core makes ready.

    Raises:
        InputError: the config, its data or its encoder cannot be used.
    """
    config = config_of(asked)
    systems.check(config)
    systems.before_devices(config, dry=True, described=bool(asked.devices))
    devices = described_devices(asked.devices).devices if asked.devices else jax.devices()
    kind = devices[0].device_kind
    speeds = speeds_of(kind) if asked.speeds is None else speeds_from(asked.speeds)
    if speeds is None:
        raise InputError(f"the speeds of {kind} are not known; give them.")
    with (
        tempfile.TemporaryDirectory() as folder,
        Run.open(Path(folder) / "run", time.monotonic()) as run,
        systems.open_system(config, run, dry=True, devices=devices) as system,
    ):
        if not isinstance(system, QRag):
            raise InputError(f"{asked.config} is no training of Q-RAG; give one of those.")
        state = system.towers.state_shapes(system.inputs.encoder.trained)
        batch = jax.tree.leaves(system.inputs.batch_shapes(1))
        return {
            "device": kind,
            "gradients": sum(map(_float32_bytes, jax.tree.leaves(state.params))),
            "state_bytes": sum(map(whole_bytes, jax.tree.leaves(state))),
            "question_bytes": sum(map(whole_bytes, batch)),
            "loaded": _loaded(system),
            "programs": {
                program.name: _program(system, program, asked, speeds)
                for program in system.programs()
                if program.name != "evaluation"
            },
        }


def _float32_bytes(leaf: Any) -> int:
    return 4 * int(np.prod(leaf.shape, dtype=np.int64))


def _program(system: QRag, program: Program, asked: Asked, speeds: Speeds) -> dict[str, Any]:
    began = time.monotonic()
    compiled = program.function.lower(*program.arguments).compile()
    seconds, stats, text = time.monotonic() - began, compiled.memory_analysis(), compiled.as_text()
    found = {
        count: step_time.estimate(text, speeds, step_time.Assumptions(loops))
        for count, loops in _loops(system, asked)
    }
    return {
        "compiled_s": seconds,
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "steps": {
            str(count): {
                "seconds": estimate.seconds,
                "exposed": estimate.parts.get(COLLECTIVES, 0.0),
                "parts": dict(estimate.parts),
                "bound": estimate.bound,
                "share_of_peak": estimate.share_of_peak(),
                "sends": {
                    name: {"count": kind.count, "seconds": kind.seconds, "bytes": kind.bytes}
                    for name, kind in estimate.kinds.items()
                    if name in SENDS
                },
            }
            for count, estimate in found.items()
        },
    }


def _loops(system: QRag, asked: Asked) -> Iterator[tuple[int, dict[tuple[int, int], Rounds]]]:
    """For each number of questions the course of the loops, by the rows of the program."""
    actor, inputs = system.towers.actor, system.inputs
    stores, widths = [*inputs.stores.values()], widths_of(actor, inputs.shape)
    for count in asked.questions:
        lengths = draw_lengths(actor, inputs.shape, stores, count)
        own = loop_rounds(actor.block_shapes, widths, lengths)
        yield count, rows_of_program(own, count, asked.compiled_for)


def rows_of_program(
    loops: Mapping[tuple[int, int], Rounds], questions: int, compiled_for: int
) -> dict[tuple[int, int], Rounds]:
    """The course of loops for so many questions, named as in a program for other ones.

    A loop is known by the number of its rows, which grows with the questions, and their width.
    """
    return {
        (rows * compiled_for // questions, width): course for (rows, width), course in loops.items()
    }


def _loaded(system: QRag) -> float:
    """Questions/s that one core of this machine makes ready, by its time in this process.

    What else runs on the machine meanwhile changes little of it.
    """
    inputs, size = system.inputs, system.config.train.batch_size // system.mesh.size
    sources = [EpisodeSource(store, inputs.shape) for store in inputs.stores.values()]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(LOADED):
        chosen = [sources[number] for number in rng.integers(len(sources), size=size)]
        drawn.append([(source, int(rng.integers(len(source)))) for source in chosen])
    stack([sources[0][0]])
    began = time.thread_time()
    for batch in drawn:
        stack([source[index] for source, index in batch])
    return LOADED * size / (time.thread_time() - began)


def main(arguments: Sequence[str]) -> int:
    """Prints what was asked for; returns the exit status."""
    try:
        found = measure(Asked.of(arguments[0]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
