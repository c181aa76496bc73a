"""The published recipes whose steps are predicted, compiled for H100s that are not here.

Each is compiled for one H100 and for eight along `fsdp`, from the recipe's own config, with an
encoder of the real size and zero weights (`scaling_folders`), by the compiler of `make gpu`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu_tokens import LANGUAGE_MODELS
from benchmarks.memory import OWN
from benchmarks.scaling_answers import Sidecar
from benchmarks.scaling_folders import write_zeros
from benchmarks.scaling_hosts import compiled
from benchmarks.scaling_model import SIZES, Bytes, Compiled, Recipe
from benchmarks.scaling_programs import Asked
from configs import published
from qrag_jax.data.config import SYNTHETIC
from qrag_jax.errors import InputError
from qrag_jax.models.compute.precision import FLOAT32, precision
from qrag_jax.models.trunks.qwen3 import Qwen3
from qrag_jax.runtime.platform import Platform

DATA = Path(os.environ.get("QRAG_DATA", "../shared/data"))
FOLDERS = {"hotpotqa": "hotpotqa", "musique": "musique", "two_wiki": "2wikimultihopqa"}
HOST = 8  # H100s of a host
# A suffix of a recipe's name: in bfloat16, with layers computed again, not as published.
HALF = "+bfloat16"
RECIPES = (
    "e5-hotpotqa",
    "e5-hotpotqa" + HALF,
    "contriever-babilong",
    "contriever-babilong" + HALF,
    "contriever-babilong-em",
    "contriever-niah",
    "e5-musique",
    "qwen3-babilong",
    "gte-hotpotqa-musique",
    "gte-hotpotqa-musique-wiki",
)
# Tokens of a question with its chunks, and of an answer: that of config.llm.max_tokens.
PROMPT, ANSWER, AT_ONCE = 512, 32, 20
ANSWERS_BY = LANGUAGE_MODELS[1]  # Qwen3-1.7B, as configs/published.py has it


def questions_each(questions: int) -> tuple[int, ...]:
    """Questions a device of all steps of a recipe: its batch, and that split over `SIZES`."""
    found = {-(-questions // size) for size in SIZES if size <= questions}
    return tuple(sorted(found | {questions}, reverse=True))


def compile_recipe(name: str, folder: Path, devices: str = "h100") -> dict[str, Any]:
    """Compiles a recipe; returns JSON from which `recipe_of` makes it.

    Args:
        name: one of `RECIPES`.
        folder: for the encoder's folder and the tokens.
        devices: a kind of device that programs can be compiled for.

    Raises:
        InputError: the recipe is unknown, or the packages to compile are missing.
    """
    found = {
        use: compiled(asked_for(name, folder, mesh, devices), str(OWN))
        for use, mesh in (("one", (1, 1, 1)), ("split", (1, HOST, 1)))
    }
    train = published.get_config(name.removesuffix(HALF)).train
    return {"name": name, "steps": train.steps, "questions": train.batch_size} | found


def asked_for(name: str, folder: Path, mesh: tuple[int, int, int], devices: str) -> Asked:
    """The program of a recipe on a mesh, with the batch over its first host's devices.

    Args: as `compile_recipe`.

    Raises:
        InputError: see `compile_recipe`.
    """
    variant, half = name.removesuffix(HALF), name.endswith(HALF)
    if variant not in published.RUNS:
        raise InputError(f"there is no recipe {name!r}; give one of {', '.join(RECIPES)}.")
    if not OWN.exists():
        raise InputError(
            "to compile for a GPU the packages of jax[cuda12] are needed; `make gpu` makes an "
            "environment that has them."
        )
    config = published.get_config(variant)
    encoder = folder / config.encoder.path.replace("/", "--")
    if not encoder.exists():
        write_zeros(config.encoder.path, encoder)
    fields: dict[str, Any] = {
        "encoder.path": str(encoder.absolute()),
        "data.path": data_path([*config.data.sources]),
        "data.cache": str((folder / "cache").absolute()),
    }
    if half:
        fields |= {"encoder.dtype": "bfloat16", "encoder.remat": "layers"}
    elif variant.startswith("qwen3"):
        fields["encoder.remat"] = "layers"  # else it fits no H100
    count, questions = math.prod(mesh), config.train.batch_size
    return Asked(
        f"published.py:{variant}",
        fields,
        mesh,
        f"{devices}x{count}",
        -(-questions // min(count, HOST)),
        questions_each(questions),
    )


def data_path(sources: list[str]) -> str:
    """`config.data.path` of these sources: the records if they are there, else invented ones."""
    places = {name: DATA / FOLDERS[name] for name in sources if name in FOLDERS}
    if not places:
        return ""  # babilong and niah make their own
    if not all(place.exists() for place in places.values()):
        return SYNTHETIC
    if len(places) == 1:
        return str(next(iter(places.values())).absolute())
    return ",".join(f"{name}={place.absolute()}" for name, place in places.items())


def recipe_of(result: Mapping[str, Any]) -> Recipe:
    """The recipe of what `compile_recipe` gave."""
    one, split = result["one"], result.get("split")
    played = one["programs"].get("play")
    return Recipe(
        name=result["name"],
        steps=result["steps"],
        questions=result["questions"],
        gradients=one["gradients"],
        question_bytes=one["question_bytes"],
        loaded=one["loaded"],
        one=compiled_of(one, 1),
        split=compiled_of(split, HOST) if split else None,
        played={int(n): step["seconds"] for n, step in played["steps"].items()} if played else {},
        sidecar=sidecar_of(result["name"]),
    )


def compiled_of(found: Mapping[str, Any], devices: int) -> Compiled:
    """The program of an update of what `scaling_programs` told."""
    update = found["programs"]["update"]
    steps = {int(count): step for count, step in update["steps"].items()}
    return Compiled(
        devices=devices,
        compute={n: step["seconds"] - step["exposed"] for n, step in steps.items()},
        exposed={n: step["exposed"] for n, step in steps.items()},
        bytes=Bytes(update["arguments"], update["outputs"], update["temporaries"]),
    )


def sidecar_of(name: str) -> Sidecar | None:
    """The language model that a recipe asks about every prefix of its episodes, if it asks one."""
    if name not in published.RUNS or published.get_config(name).reward.name == "ground_truth":
        return None
    config = published.get_config(name)
    if "llm" not in config or config.llm is None:
        return None
    sizes = ANSWERS_BY.config
    trunk = Qwen3(sizes, precision(FLOAT32, Platform.here()), "none", own_head=False)
    shapes = jax.tree.leaves(jax.eval_shape(trunk.init_params, jax.random.key(0)))
    return Sidecar(
        title=ANSWERS_BY.name,
        parameters=float(sum(leaf.size for leaf in shapes)),
        # Keys and values of each layer, in two bytes.
        token_bytes=4.0 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim,
        calls=config.env.max_steps,
        prompt=PROMPT,
        answer=ANSWER,
        at_once=AT_ONCE,
    )
