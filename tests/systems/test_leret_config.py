"""What LeReT's config refuses, and the course of stages that it gives."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from qrag_jax.errors import InputError
from qrag_jax.systems.leret_config import LeretConfig, StagePlan, default_config

FEW_SHOT = {"tries.ways": "few_shot", "stages": ("sft", "preference")}


def of(**fields: Any) -> LeretConfig:
    config = default_config()
    config.update_from_flattened_dict(fields)
    return LeretConfig.of(config)


def test_the_stages_come_in_turn() -> None:
    config = of(**{"script.steps": 5, "sft.steps": 3, "preference.steps": 4})
    assert config.plan == (
        StagePlan("script", 0, 0, 5),
        StagePlan("sft", 1, 5, 3),
        StagePlan("preference", 1, 8, 4),
        StagePlan("sft", 2, 12, 3),
        StagePlan("preference", 2, 15, 4),
    )
    assert config.train.steps == 19
    assert [config.stage_at(step).first for step in (0, 4, 5, 11, 18)] == [0, 0, 5, 8, 15]


def test_the_prompts_that_try() -> None:
    assert of().tries.variants == (1, 2, 3, 4)
    assert of(**{"tries.prompts": 2, "tries.with_bare": True}).tries.variants == (0, 1, 2)
    config = of(**{"tries.ways": "bare", "tries.samples": 4})
    assert (config.tries.variants, config.tries.asked) == ((0,), 1)
    assert of(**FEW_SHOT, **{"tries.prompts": 2}).few_shot.kept == 2


@pytest.mark.parametrize("variant", importlib.import_module("configs.leret").VARIANTS)
def test_every_variant_can_be_read(variant: str) -> None:
    LeretConfig.of(importlib.import_module("configs.leret").get_config(variant))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stages": ("sft", "script")}, "config.stages is sft, script; use some of"),
        ({"stages": ()}, "config.stages is empty"),
        ({"iterations": 0}, "config.iterations is 0; it must be at least 1"),
        ({"train.accumulation": 2}, "config.train.accumulation is 2"),
        ({"questions.train": "d,hotpotqa,train"}, "config.stages has script, whose demonstrations"),
        ({"stages": ("sft",)}, "config.tries.ways is 'styles', whose marks"),
        ({"tries.ways": "bare"}, "config.tries has one try a state"),
        (
            {"tries.samples": 2, "sampling.temperature": 0.0},
            "config.sampling.temperature is 0, so several tries",
        ),
        ({"tries.prompts": 5}, "config.tries.prompts is 5, and there are 4 styles"),
        ({"tries.max_failed_share": 1.5}, "config.tries.max_failed_share is 1.5"),
        ({"preference.beta": 0.0}, "config.preference.beta is 0.0; use a number above 0"),
        ({"preference.learning_rate": 0.0}, "config.preference.learning_rate is 0.0"),
        ({"writing.query_tokens": 2000}, "config.writing.query_tokens is 2000, and prompt and"),
        ({"writing.order": "rank"}, "config.writing.order is 'rank'; use one of hop, score"),
        ({"eval.best_by": "em"}, "config.eval.best_by is 'em'"),
        ({"questions.bridge_corpus": 10}, "config.questions.bridge_corpus is 10"),
        ({"questions.dev": ""}, "config.questions.dev is empty"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        of(**fields)


def test_an_unknown_section_is_refused() -> None:
    config = default_config()
    config.prompt = "x"
    with pytest.raises(InputError, match=r"config\.prompt is unknown"):
        LeretConfig.of(config)
