"""Q-RAG's published runs (arXiv 2511.07328), constant by constant, as its public code has them.

    python -m qrag_jax.train --config=configs/published.py:e5-hotpotqa --config.data.path=FOLDER

The variant names the encoder and the data: `:contriever-babilong` (qa3; other tasks with
`--config.data.sources.babilong.task=qa1`), `:contriever-babilong-em` (rewards of a language model),
`:contriever-niah`, `:e5-hotpotqa`, `:e5-musique`, `:qwen3-babilong`, `:gte-hotpotqa-musique` and
`:gte-hotpotqa-musique-wiki`. Without one it is `:e5-hotpotqa`; `:tiny` runs in seconds, offline.
Encoders are used as the public code uses them (docs/published.md has every constant with its file,
ours, and what differs); `configs/hotpotqa.py` and the others use them as their makers say.
They need a GPU of 80 GB, and come from the hub or `--config.encoder.path=FOLDER`; their cost and
scores were not measured here.
"""

from __future__ import annotations

from collections.abc import Callable

from ml_collections import ConfigDict

from configs import common
from qrag_jax.systems.q_rag_config import complete


def questions(transitions: int, max_steps: int, accumulation: int) -> int:
    """Questions in an update of about so many transitions: of whole episodes, and the nearest
    number that splits into equal micro-batches."""
    return max(round(transitions / (max_steps * accumulation)), 1) * accumulation


def base(*sources: str) -> ConfigDict:
    """What all of them share."""
    config = common.get_config(*sources)
    config.encoder.dtype = "float32"
    config.env.never_terminate = True
    config.policy.top_k_actions = 5
    config.pqn.update(gamma=0.99, learning_start=200)
    config.optimizer.update(beta1=0.9, beta2=0.98, eps=1e-6, clip_norm=2.0, warmup_steps=1000)
    config.eval.samples = 300
    config.eval.best_by = "return_until_found"  # their reward of an evaluation
    return config


def lengths(config: ConfigDict, chunk: int, in_state: int, special: int = 2) -> None:
    """Tokens of a chunk row, and of each part of a state, the question among them.

    Args:
        special: tokens that theirs counts in a part of a state, [CLS] and [SEP]; ours counts text.
    """
    config.data.max_chunk_tokens = chunk
    config.data.max_chunk_tokens_in_state = in_state - special
    config.data.max_question_tokens = in_state - special


def updates(config: ConfigDict, micro: int, accumulation: int, steps: int, every: int) -> None:
    """Transitions of a micro-batch and how many make an update; updates between evaluations."""
    batch = questions(micro * accumulation, config.env.max_steps, accumulation)
    config.train.update(batch_size=batch, accumulation=accumulation, steps=steps)
    config.train.update(eval_every=every, checkpoint_every=every)


def mean(config: ConfigDict, path: str) -> None:
    """The mean of the last hidden states over 10, not normalised, without prefixes; the model's own
    dropout stays on."""
    config.encoder.path = path
    config.encoder.update(pooling="mean", normalise=False, scale=0.1)
    config.encoder.update(dropout=0.1, attention_dropout=0.1)


def contriever(config: ConfigDict) -> None:
    """configs/algo/pqn.yaml."""
    mean(config, "facebook/contriever")
    config.policy.alpha = 0.01
    config.pqn.update(lambda_=0.65, tau=0.1)
    config.optimizer.update(
        learning_rate=5e-5, weight_decay=0.01, schedule="linear", final_ratio=0.0
    )


def babilong(config: ConfigDict, special: int = 2) -> None:
    """configs/envs/babilong.yaml and configs/training.yaml; `special` as of `lengths`."""
    config.data.sources.babilong.update(task="qa3", chunks=100)
    config.env.update(max_steps=6, sort_by_index=True, positions="relative")
    lengths(config, 256, 64, special)
    updates(config, micro=64, accumulation=2, steps=50_000, every=500)


def contriever_babilong() -> ConfigDict:
    """BabiLong with rewards from the supporting facts."""
    config = base("babilong")
    contriever(config)
    babilong(config)
    return config


def contriever_babilong_em() -> ConfigDict:
    """The same with rewards from the answers of Qwen3-1.7B: configs/feedback/defaults.yaml."""
    config = contriever_babilong()
    config.env.never_terminate = False
    config.reward.name = "babilong_em"
    complete(config)
    config.reward.update(scale=1.0, completion_threshold=1.0, staleness=0)
    config.llm.update(
        max_tokens=32, temperature=0.0, top_p=0.95, concurrency=20, enable_thinking=False
    )
    config.llm.cut_off = "score"
    config.llm.server.update(
        model="Qwen/Qwen3-1.7B", memory_share=0.4, max_model_len=2048, dtype="bfloat16"
    )
    return config


def contriever_niah() -> ConfigDict:
    """configs/envs/niah.yaml: multi-value needles in 4,000 tokens."""
    config = base("niah")
    contriever(config)
    config.data.sources.niah.update(preset="multivalue", tokens=4096)
    config.env.max_steps = 5
    lengths(config, 256, 64)
    updates(config, micro=64, accumulation=2, steps=50_000, every=500)
    return config


def e5_hotpotqa() -> ConfigDict:
    """configs/algo/pqn_e5_hotpotqa.yaml and configs/envs/hotpotqa.yaml."""
    config = base("hotpotqa")
    mean(config, "intfloat/multilingual-e5-large")
    config.env.max_steps = 2
    config.reward.penalize_extra_steps = False
    lengths(config, 220, 128)
    config.policy.alpha = 0.05
    config.pqn.update(lambda_=0.5, tau=0.02)
    config.optimizer.update(
        learning_rate=1.5e-5, weight_decay=5e-4, schedule="quarter_cosine", final_ratio=0.1
    )
    updates(config, micro=12, accumulation=8, steps=10_000, every=100)
    return config


def e5_musique() -> ConfigDict:
    """configs/algo/pqn_e5_musique.yaml and configs/envs/musique.yaml."""
    config = base("musique")
    mean(config, "intfloat/multilingual-e5-large")
    config.env.max_steps = 4
    config.reward.penalize_extra_steps = False
    lengths(config, 110, 128)
    config.policy.alpha = 0.005
    config.pqn.update(lambda_=0.6, tau=0.02)
    config.optimizer.update(
        learning_rate=1e-5, weight_decay=1e-3, schedule="linear", final_ratio=0.1
    )
    updates(config, micro=12, accumulation=8, steps=10_000, every=100)
    return config


def qwen3_babilong() -> ConfigDict:
    """configs/algo/pqn_qwen3.yaml: all weights are trained, and no text is put before others."""
    config = base("babilong")
    config.encoder.path = "Qwen/Qwen3-Embedding-0.6B"
    config.encoder.update(pooling="last", normalise=True, scale=1.0)
    config.policy.alpha = 0.005
    config.pqn.update(lambda_=0.65, tau=0.02)
    config.optimizer.update(
        learning_rate=5e-5, weight_decay=0.01, schedule="linear", final_ratio=0.0
    )
    babilong(config, special=1)  # its tokenizer ends a text and does not open it
    return config


def gte_hotpotqa_musique(*more: str) -> ConfigDict:
    """configs/algo/pqn_gte.yaml, configs/envs/combined_2.yaml, training_gte_combined.yaml; `more`
    sources in the heap."""
    config = base("hotpotqa", "musique", *more)
    mean(config, "Alibaba-NLP/gte-multilingual-base")
    config.encoder.attention_dropout = 0.0
    config.data.mixture = "size"
    config.env.max_steps = 6
    lengths(config, 512, 256)
    config.policy.alpha = 0.005
    config.pqn.update(lambda_=0.6, tau=0.02)
    config.optimizer.update(
        learning_rate=5e-6, weight_decay=1e-3, schedule="linear", final_ratio=0.1
    )
    updates(config, micro=16, accumulation=2, steps=70_000, every=100)
    return config


def gte_hotpotqa_musique_wiki() -> ConfigDict:
    """The same with 2WikiMultihopQA in the heap."""
    return gte_hotpotqa_musique("two_wiki")


RUNS: dict[str, Callable[[], ConfigDict]] = {
    "contriever-babilong": contriever_babilong,
    "contriever-babilong-em": contriever_babilong_em,
    "contriever-niah": contriever_niah,
    "e5-hotpotqa": e5_hotpotqa,
    "e5-musique": e5_musique,
    "qwen3-babilong": qwen3_babilong,
    "gte-hotpotqa-musique": gte_hotpotqa_musique,
    "gte-hotpotqa-musique-wiki": gte_hotpotqa_musique_wiki,
}


def get_config(arg: str = "") -> ConfigDict:
    """Config of a published run, a key of `RUNS`, or "tiny"; "" is "e5-hotpotqa"."""
    arg = arg or "e5-hotpotqa"
    if arg == "tiny":
        return common.tiny(e5_hotpotqa()).lock()
    return (
        RUNS[arg]().lock()
        if arg in RUNS
        else common.variant(base("hotpotqa"), arg, ("tiny", *RUNS))
    )
