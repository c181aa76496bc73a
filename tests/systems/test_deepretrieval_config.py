"""What DeepRetrieval's config refuses, and what is computed from its fields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from configs.deepretrieval import VARIANTS, get_config
from qrag_jax.environments.query_rewriting.output import BARE, TAGGED
from qrag_jax.errors import InputError
from qrag_jax.runtime.saved_config import save_config
from qrag_jax.systems.deepretrieval_config import (
    FREE_FIELDS,
    LAYOUT,
    EvalConfig,
    RewriteConfig,
    default_config,
    help_lines,
    load_config,
)

NAMES_NO_DATA = ("ir", "smol", "beir", "pubmed", "remake")
GRPO = {"algorithm": "grpo"}


def of(**fields: Any) -> RewriteConfig:
    config = default_config()
    config.update_from_flattened_dict(fields)
    return RewriteConfig.of(config)


def with_fields(fields: dict[str, Any]) -> RewriteConfig:
    return of(**fields)


def test_steps_of_both_stages() -> None:
    both = with_fields({"script.steps": 5, "train.steps": 7, "ppo.epochs": 3, "ppo.minibatches": 2})
    assert (both.first_steps, both.train.steps) == (5, 12)
    assert both.optimizer.total_steps == 7 * 3 * 2
    only = with_fields({"stages": ("rl",), "train.steps": 7})
    assert (only.first_steps, only.train.steps, only.optimizer.total_steps) == (0, 7, 7)
    first = with_fields({"stages": ("script",), "script.steps": 5, "train.steps": 7})
    assert (first.first_steps, first.train.steps) == (5, 5)


def test_a_batch_is_of_groups() -> None:
    by_ppo = with_fields({"train.batch_size": 12})
    assert (by_ppo.rule, by_ppo.groups) == (by_ppo.ppo, 12)
    grouped = with_fields({**GRPO, "train.batch_size": 12, "grpo.members": 4, "grpo.longest": 300})
    assert (grouped.rule, grouped.groups) == (grouped.grpo, 3)
    several = with_fields({"train.batch_size": 12, "ppo.members": 3, "ppo.minibatches": 4})
    assert several.groups == 4


@pytest.mark.parametrize(
    ("measures", "depth"),
    [
        (("ndcg@10", "recall@100", "rr@5"), 100),
        (("ndcg@10",), 10),
        (("rr", "ndcg@10"), 1000),
        (("recall@3000", "ap"), 3000),
    ],
)
def test_the_depth_of_rankings_is_that_of_the_deepest_measure(
    measures: tuple[str, ...], depth: int
) -> None:
    assert EvalConfig(measures=measures, best_by=measures[0]).depth == depth


def test_a_server_that_samples_is_read_if_the_stage_needs_it() -> None:
    served = {"sampling.engine": "server", "llm.url": "http://127.0.0.1:8000/v1"}
    assert with_fields({"stages": ("script",), **served}).llm is None
    assert of().llm is None


def test_what_may_change_when_a_run_goes_on() -> None:
    names = [name for name, _, _ in help_lines()]
    for free in FREE_FIELDS:
        assert any(name == free or name.startswith(free) for name in names), free
    assert not any("reward.k".startswith(free) for free in FREE_FIELDS)


@pytest.mark.parametrize("prompt", ["rewrite_pico", "rewrite_boolean"])
@pytest.mark.parametrize("engine", ["boolean", "remote"])
def test_boolean_prompts_are_for_what_obeys_them(prompt: str, engine: str) -> None:
    config = with_fields(
        {"writing.prompt": prompt, "search.engine": engine, "stages": ("rl",), "queries.train": "a"}
    )
    assert (config.writing.kind.form, config.writing.kind.boolean) == (TAGGED, True)
    assert with_fields({}).writing.kind.form == BARE


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"stages": ()}, "config.stages is empty; use script, rl, or script,rl."),
        ({"stages": ("ppo",)}, "config.stages is ppo; use script, rl, or script,rl."),
        ({"stages": ("rl", "script")}, "config.stages is rl, script; use script, rl, or"),
        ({"algorithm": "dpo"}, "config.algorithm is 'dpo'; use ppo or grpo."),
        # queries
        ({"queries.train": ""}, "config.queries.train is empty; use 'talkative', or name parts of"),
        ({"queries.test": ""}, "config.queries.test is empty; use 'talkative', or name parts of"),
        ({"queries.held_out": 0}, "config.queries.held_out is 0; it must be at least 1"),
        ({"queries.most": -1}, "config.queries.most is -1; it must be at least 0"),
        ({"queries.made_train": 0}, "config.queries.made_train is 0; it must be at least 1"),
        ({"queries.made_test": 0}, "config.queries.made_test is 0; it must be at least 1"),
        ({"queries.made_seed": -1}, "config.queries.made_seed is -1; it must be at least 0"),
        (
            {"queries.made_train": 50, "queries.made_corpus": 25},
            "config.queries.made_corpus is 25; it must be at least 50",
        ),
        (
            {"queries.made_train": 5, "queries.made_corpus": 30},
            "config.queries.made_corpus is 30; it must be a multiple of 25, within which queries",
        ),
        ({"queries.clauses": 5}, "config.queries.clauses is 5; use 1 to 4."),
        ({"queries.clauses": 0}, "config.queries.clauses is 0; use 1 to 4."),
        # writing
        ({"writing.query_tokens": 1}, "config.writing.query_tokens is 1; it must be at least 2"),
        ({"writing.prompt": "haiku"}, "config.writing.prompt is 'haiku'; use one of rewrite_pico"),
        ({"writing.prompt": "own.txt"}, "config.writing.form is '', and the prompt own.txt does"),
        ({"writing.form": "tagged"}, "config.writing.form is 'tagged', and the prompt bare_rewr"),
        ({"writing.boolean": True}, "config.writing.boolean is True, and the prompt bare_rewrite"),
        # demonstrations
        ({"dropped.share": 1.0}, "config.dropped.share is 1.0; use a probability, 0 to less than"),
        ({"dropped.share": -0.1}, "config.dropped.share is -0.1; use a probability, 0 to less"),
        ({"dropped.rare_share": 1.0}, "config.dropped.rare_share is 1.0; use a probability"),
        ({"dropped.frequent_from": 0.0}, "config.dropped.frequent_from is 0.0; use a share above"),
        ({"dropped.kinds": ()}, "config.dropped.kinds is (); name some of any, frequent, rare"),
        ({"dropped.kinds": ("any", "any")}, "each once"),
        ({"dropped.kinds": ("any", "long")}, "config.dropped.kinds has 'long'; the kinds are any"),
        ({"dropped.least_words": 0}, "config.dropped.least_words is 0; it must be at least 1"),
        (
            {"dropped.least_words": 9, "dropped.most_words": 8},
            "config.dropped.most_words is 8; it must be at least 9",
        ),
        ({"script.steps": 0}, "config.script.steps is 0; it must be at least 1"),
        ({"script.learning_rate": 0.0}, "config.script.learning_rate is 0.0; it must be above 0."),
        (
            {"search.engine": "remote"},
            "config.stages has script, whose demonstrations are of texts that are searched, and "
            "config.search.engine 'remote' gives ids alone; set config.stages to rl.",
        ),
        # rollout: K is the staleness
        ({"rollout.attempts": 0}, "config.rollout.attempts is 0; it must be at least 1"),
        ({"rollout.staleness": -1}, "config.rollout.staleness is -1; it must be at least 0"),
        ({"rollout.truncated": "cut"}, "config.rollout.truncated is 'cut'; use one of masked, sco"),
        (
            {"rollout.max_failed_share": 1.5},
            "config.rollout.max_failed_share is 1.5; use a share, 0 to 1.",
        ),
        ({"rollout.max_failed_share": -0.5}, "config.rollout.max_failed_share is -0.5; use a sha"),
        # eval
        ({"eval.samples": -1}, "config.eval.samples is -1; it must be at least 0"),
        ({"eval.measures": ()}, "config.eval.measures is empty; name one, such as ndcg@10."),
        ({"eval.measures": ("recall",)}, "there is no measure 'recall' of rankings; use recall@k"),
        ({"eval.best_by": "recall@5"}, "config.eval.best_by is 'recall@5'; use one of ndcg@10, re"),
        # reward
        ({"reward.k": 0}, "config.reward.k is 0; it must be at least 1"),
        ({"reward.measure": "em"}, "config.reward.measure is 'em'; use one of ndcg, recall, rr"),
        ({"reward.tiers": "gold"}, "config.reward.tiers is 'gold'; use one of"),
        ({"reward.tiers": "ir"}, "config.reward.tiers is 'ir' and config.reward.gain is True"),
        # what does not go together
        (
            {"sampling.temperature": 0.0},
            "config.sampling.temperature is 0, so nothing new would be tried; use a number above 0",
        ),
        (
            {**GRPO, "grpo.members": 8, "train.batch_size": 12},
            "config.train.batch_size is 12 episodes, which are no groups of config.grpo.members, "
            "8; use a multiple of it.",
        ),
        (
            {"ppo.members": 3, "train.batch_size": 16},
            "config.train.batch_size is 16 episodes, which are no groups of config.ppo.members, 3",
        ),
        (
            {"ppo.minibatches": 8, "train.batch_size": 4},
            "config.ppo.minibatches is 8, which does not divide the 4 episodes of "
            "config.train.batch_size; use a divisor of it.",
        ),
        (
            {"ppo.minibatches": 3, "train.batch_size": 16},
            "config.ppo.minibatches is 3, which does not divide the 16 episodes of",
        ),
        (
            {**GRPO, "grpo.longest": 255, "train.batch_size": 64},
            "config.grpo.longest is 255, less than an output may have "
            "(config.writing.query_tokens is 256); raise it.",
        ),
        (
            {"rollout.query_tokens": 257},
            "config.rollout.query_tokens is 257; use 2 to 256, which is "
            "config.writing.query_tokens, or 0 for as many as that.",
        ),
        ({"rollout.query_tokens": 1}, "config.rollout.query_tokens is 1; use 2 to 256, which is"),
        (
            {**GRPO, "grpo.longest": 127, "rollout.query_tokens": 128, "train.batch_size": 64},
            "config.grpo.longest is 127, less than an output may have "
            "(config.rollout.query_tokens is 128); raise it.",
        ),
        (
            {"guards.max_kl": 0.5, "ppo.kl": 0.0},
            "config.guards.max_kl is 0.5, and no KL is measured, because config.ppo.kl is 0; set "
            "that above 0, such as 0.001, or the limit to 0.",
        ),
        (
            {**GRPO, "guards.max_kl": 0.5, "grpo.beta": 0.0, "grpo.longest": 256},
            "config.guards.max_kl is 0.5, and no KL is measured, because config.grpo.beta is 0",
        ),
        (
            {"writing.prompt": "rewrite_boolean"},
            "config.writing.prompt rewrite_boolean asks for Boolean queries, and "
            "config.search.engine bm25 reads them as words; use 'boolean' or 'remote', or another "
            "prompt.",
        ),
        (
            {"writing.prompt": "own.txt", "writing.form": "bare", "writing.boolean": True},
            "config.writing.prompt own.txt asks for Boolean queries",
        ),
        (
            {"stages": ("rl",), "search.engine": "remote", "reward.measure": "answer_rank"},
            "config.reward.measure is 'answer_rank', which reads documents, and config.search."
            "engine 'remote' gives ids alone; use ndcg, recall or rr.",
        ),
        (
            {"stages": ("rl",), "search.engine": "remote", "reward.reading_cost": 0.1},
            "config.reward.reading_cost is 0.1, and config.search.engine 'remote' does not tell",
        ),
        (
            {"stages": ("rl",), "search.engine": "remote", "reward.k": 3001},
            "config.reward.k is 3001, and a search gives 3000 documents at most "
            "(config.engine.most); lower the former, or raise the latter.",
        ),
        (
            {
                "stages": ("rl",),
                "search.engine": "remote",
                "eval.measures": ("ndcg@10", "recall@3001", "rr"),
            },
            "config.eval.measures has recall@3001, which needs 3001 documents, and a search gives "
            "3000 documents at most (config.engine.most); use recall@3000 or less, or raise the "
            "latter.",
        ),
        (
            {
                "stages": ("rl",),
                "search.engine": "remote",
                "engine.most": 999,
                "eval.measures": ("ndcg@10", "ap"),
            },
            "config.eval.measures has ap, which needs 1000 documents, and a search gives 999 "
            "documents at most (config.engine.most); use ap@999 or less, or raise the latter.",
        ),
        ({"train.accumulation": 2}, "config.train.accumulation is 2;"),
        ({"model.thinking": "maybe"}, "config.model.thinking is 'maybe'; use on, off or nothing."),
        ({"guards.action": "pray"}, "config.guards.action"),
        ({"ppo.critic": "wise"}, "config.ppo.critic"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        with_fields(fields)


def test_a_service_may_be_asked_for_all_that_it_gives() -> None:
    remote = {"stages": ("rl",), "search.engine": "remote", "eval.measures": ("ndcg@10", "rr")}
    with_fields({**remote, "engine.most": 1000, "reward.k": 1000})
    # A corpus of one's own is cut by nobody.
    deep = ("ndcg@10", "recall@5000")
    with_fields({"engine.most": 5, "reward.k": 4000, "eval.measures": deep})


def test_rules_of_learning_do_not_bind_imitation_alone() -> None:
    only = {"stages": ("script",)}
    with_fields({**only, "sampling.temperature": 0.0})
    with_fields({**only, "ppo.minibatches": 7})


@pytest.mark.parametrize("section", ["", *LAYOUT.sections])
def test_unknown_fields_are_refused(section: str) -> None:
    config = default_config()
    (config[section] if section else config)["nonesuch"] = 1
    name = f"{section}.nonesuch".removeprefix(".")
    with pytest.raises(InputError, match=re.escape(f"config.{name}")):
        RewriteConfig.of(config)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_can_be_used_or_says_what_to_name(variant: str) -> None:
    config = get_config(variant)
    assert config.is_locked
    if variant in NAMES_NO_DATA:
        for field in ("train", "test"):
            said = f"config.queries.{field} is empty; use 'talkative', or name parts of data as "
            with pytest.raises(InputError, match=f"^{re.escape(said)}path,split"):
                RewriteConfig.of(config)
            config.queries[field] = "some/folder,train"
    RewriteConfig.of(config)


def test_variants_differ_and_an_unknown_one_is_named() -> None:
    assert len({get_config(name).to_json() for name in VARIANTS}) == len(VARIANTS)
    assert get_config().to_json() == get_config("quick").to_json()
    with pytest.raises(ValueError, match="the variant 'huge' is unknown; use one of :quick, :tiny"):
        get_config("huge")


@pytest.mark.parametrize("variant", ["quick", "tiny"])
def test_a_saved_config_is_read_as_it_was(variant: str, tmp_path: Path) -> None:
    config = get_config(variant)
    save_config(config, tmp_path / "config.json")
    assert RewriteConfig.of(load_config(tmp_path / "config.json")) == RewriteConfig.of(config)
