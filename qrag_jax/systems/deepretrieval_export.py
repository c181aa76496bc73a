"""What the card of an exported model says that learned by DeepRetrieval."""

from __future__ import annotations

from qrag_jax.environments.query_rewriting.output import TAGGED
from qrag_jax.environments.query_rewriting.prompt import prompt_kind
from qrag_jax.learners.ppo_config import NONE
from qrag_jax.systems.deepretrieval_config import NAME, PPO, RL, RewriteConfig
from qrag_jax.systems.deepretrieval_scoring import POOLED
from qrag_jax.systems.exported_system import ExportedSystem, Fields, Scores


def _told(fields: Fields) -> str:
    writing, queries = fields["writing"], fields["queries"]
    kind = prompt_kind(writing["prompt"], writing["form"], boolean=writing["boolean"])
    writes = (
        '`<think>…</think><answer>{"query": "…"}</answer>`'
        if kind.form == TAGGED
        else "the query alone"
    )
    told = (
        f"Its prompt is `config.writing.prompt={writing['prompt']}`, and its output is {writes}. "
        f"It was trained on `config.queries.train={queries['train']}`."
    )
    if RL in fields["stages"] and fields["algorithm"] == PPO and fields["ppo"]["critic"] != NONE:
        told += " PPO's critic, with its value head, is not part of this model."
    return told


def _scores(summary: Fields, checkpoint: str) -> Scores:
    found = dict(summary["collections"])
    if len(found) > 1:
        found[POOLED] = summary["pooled"]
    return {
        f"{name}, {own['scored']} queries": {
            measure: each["mean"] for measure, each in own["scores"][checkpoint].items()
        }
        for name, own in found.items()
        if checkpoint in own["scores"]
    }


DEEPRETRIEVAL = ExportedSystem(
    name=NAME,
    title="DeepRetrieval",
    learned="rewrite search queries",
    read=RewriteConfig.of,
    told=_told,
    scored="collection",
    scores=_scores,
    private=("engine.email", "engine.url", "llm.url"),
)
