"""A language model with tools (RLVR) as a recipe of the suite `scaling`.

Its update is the suite gpu's program `tokens`: a block of one question's episodes on each device;
more questions on a device take as many times longer. The rollouts are bound by bytes
(`scaling_answers`), so their time is a floor. The update's collectives are within its estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from benchmarks.gpu import compiled_rows
from benchmarks.gpu_rows import EIGHT, GPU, ONE, Row
from benchmarks.gpu_tokens import (
    LANGUAGE_MODELS,
    MEMBERS,
    OWN,
    PROMPT,
    TOKENS,
    LanguageModelSize,
    adapter_shapes,
)
from benchmarks.scaling_answers import Decoding, decode_seconds
from benchmarks.scaling_model import Bytes, Compiled, Recipe
from configs import rlvr
from qrag_jax.models.compute.precision import FLOAT32, precision
from qrag_jax.models.trunks.qwen3 import Qwen3
from qrag_jax.runtime.device_speeds import SPEEDS, Speeds
from qrag_jax.runtime.platform import Platform

# Recipe → the variant of configs/rlvr.py, and its model.
RECIPES = {
    "rlvr-qwen3": ("qwen3", LANGUAGE_MODELS[1]),
    "rlvr-qwen25": ("qwen25", LANGUAGE_MODELS[2]),
}
SAMPLED = OWN // 2  # tokens that an episode draws; as many are the tools'


def compile_tokens(name: str) -> dict[str, Any]:
    """Compiles the update of a recipe for one H100 and for eight; returns JSON.

    Raises:
        InputError: the packages to compile are missing.
        RuntimeError: a program does not compile.
    """
    variant, model = RECIPES[name]
    config = rlvr.get_config(variant)
    wanted = [Row(GPU, model, True, mesh, TOKENS) for mesh in (ONE, EIGHT)]
    one, split = compiled_rows(wanted)
    for row in (one, split):
        if "failed" in row:
            raise RuntimeError(f"{row['name']} was not compiled: {row['failed']}")
    train = config.train
    return {
        "name": name,
        "steps": train.steps,
        "questions": train.batch_size,
        "one": one,
        "split": split,
    }


def tokens_recipe(result: Mapping[str, Any], each: tuple[int, ...]) -> Recipe:
    """The recipe of what `compile_tokens` gave.

    Args:
        each: numbers of questions a device.
    """
    _, model = RECIPES[result["name"]]
    return Recipe(
        name=result["name"],
        steps=result["steps"],
        questions=result["questions"],
        gradients=4.0 * adapter_count(model),
        question_bytes=4.0 * MEMBERS * (PROMPT + OWN),
        loaded=float("inf"),  # texts that are tokenised while the device samples
        one=_compiled(result["one"], 1, each),
        split=_compiled(result["split"], 8, each),
        played={count: rollout_seconds(model, count, SPEEDS[GPU]) for count in each},
    )


def _compiled(row: Mapping[str, Any], devices: int, each: tuple[int, ...]) -> Compiled:
    seconds = row["estimate"]["seconds"]
    return Compiled(
        devices,
        {count: count * seconds for count in each},
        dict.fromkeys(each, 0.0),
        Bytes(row["arguments"], row["outputs"], row["temporaries"]),
    )


def rollout_seconds(model: LanguageModelSize, questions: int, speeds: Speeds) -> float:
    """Seconds in which a device plays the episodes of so many questions: a floor.

    It reads prompts and tools' words as fast as products go, and draws the tokens of all episodes
    side by side.
    """
    sizes, weights = model.config, float(weight_count(model))
    # Keys and values of each layer, in two bytes.
    token_bytes = 4.0 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
    read = questions * (PROMPT + MEMBERS * (OWN - SAMPLED))
    drawn = Decoding(weights, token_bytes, SAMPLED, PROMPT + (OWN - SAMPLED) // 2)
    return 2 * weights * read / speeds.peak("bf16") + decode_seconds(
        drawn, questions * MEMBERS, speeds
    )


def weight_count(model: LanguageModelSize) -> int:
    """The number of a language model's weights."""
    shapes = jax.eval_shape(_trunk(model).init_params, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def adapter_count(model: LanguageModelSize) -> int:
    """The number of weights of its adapters."""
    return sum(leaf.size for leaf in jax.tree.leaves(adapter_shapes(model, _trunk(model))))


def _trunk(model: LanguageModelSize) -> Qwen3:
    computed_in = precision(FLOAT32, Platform.here())
    return Qwen3(model.config, computed_in, "none", own_head=model.own_head)
