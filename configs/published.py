"""Q-RAG's published runs (arXiv 2511.07328), with each constant as in its public code.

    qrag train --config=configs/published.py:e5-hotpotqa --config.data.path=FOLDER

The variant names the encoder and the data: `:contriever-babilong` (qa3; other tasks with
`--config.data.sources.babilong.task=qa1`), `:contriever-babilong-em` (rewards of a language model),
`:contriever-niah`, `:e5-hotpotqa`, `:e5-musique`, `:qwen3-babilong`, `:gte-hotpotqa-musique` and
`:gte-hotpotqa-musique-wiki`. The default is `:e5-hotpotqa`; `:tiny` runs in seconds, offline.

Encoders are used as in the public code; `configs/hotpotqa.py` and the others use them as their
makers recommend. docs/published.md lists every constant of the public code with its file, our value
and what differs. The YAML files named below are files of the public code.

The runs need a GPU of 80 GB. Encoders come from the hub or from `--config.encoder.path=FOLDER`.
Cost and scores were not measured here.
"""

from __future__ import annotations

from collections.abc import Callable

from ml_collections import ConfigDict

from configs import common


def base(*sources: str) -> ConfigDict:
    """The settings that all published runs share."""
    config = common.get_config(*sources)
    config.encoder.dtype = "float32"
    config.env.never_terminate = True
    config.policy.top_k_actions = 5
    config.pqn.update(gamma=0.99, learning_start=200)
    config.optimizer.update(beta1=0.9, beta2=0.98, eps=1e-6, clip_norm=2.0, warmup_steps=1000)
    config.eval.samples = 300
    config.eval.best_by = "return_until_found"  # the reward in Q-RAG's evaluations
    return config


def lengths(config: ConfigDict, chunk: int, in_state: int, special: int = 2) -> None:
    """Sets the lengths of a chunk row and of each part of a state (the question is one), in tokens.

    Args:
        chunk: tokens of a chunk row.
        in_state: tokens of each part of a state, as Q-RAG's code counts them.
        special: special tokens ([CLS] and [SEP]) that Q-RAG's code counts in each part of a state;
            ours counts only the text.
    """
    config.data.max_chunk_tokens = chunk
    config.data.max_chunk_tokens_in_state = in_state - special
    config.data.max_question_tokens = in_state - special


def updates(config: ConfigDict, micro: int, accumulation: int, steps: int, every: int) -> None:
    """Sets the size and the number of updates, and that between evaluations and checkpoints.

    An update has whole episodes, so a micro-batch has about `micro` transitions.
    """
    episodes = max(round(micro / config.env.max_steps), 1)
    config.train.update(batch_size=episodes * accumulation, accumulation=accumulation, steps=steps)
    config.train.update(eval_every=every, checkpoint_every=every)


def mean(config: ConfigDict, path: str) -> None:
    """Embeds by the mean of the last hidden states divided by 10, not normalised, without prefixes.

    The model's own dropout stays on.
    """
    config.encoder.path = path
    config.encoder.update(pooling="mean", normalise=False, scale=0.1)
    config.encoder.update(dropout=0.1, attention_dropout=0.1)


def contriever(config: ConfigDict) -> None:
    mean(config, "facebook/contriever")
    common.contriever_constants(config)


def e5(config: ConfigDict) -> None:
    mean(config, "intfloat/multilingual-e5-large")
    config.reward.penalize_extra_steps = False


def babilong(config: ConfigDict, special: int = 2) -> None:
    """configs/envs/babilong.yaml and configs/training.yaml; for `special` see `lengths`."""
    config.data.sources.babilong.update(task="qa3", chunks=100)
    config.env.update(max_steps=6, sort_by_index=True, positions="relative")
    lengths(config, 256, 64, special)
    updates(config, micro=64, accumulation=2, steps=50_000, every=500)


def by_answers(config: ConfigDict) -> None:
    """Rewards from answers of Qwen3-1.7B: configs/feedback/defaults.yaml."""
    config.env.never_terminate = False
    config.reward.name = "babilong_em"
    config.reward.update(scale=1.0, completion_threshold=1.0, staleness=0)
    config.llm.update(
        max_tokens=32, temperature=0.0, top_p=0.95, concurrency=20, enable_thinking=False
    )
    config.llm.cut_off = "score"
    config.llm.server.update(
        model="Qwen/Qwen3-1.7B", memory_share=0.4, max_model_len=2048, dtype="bfloat16"
    )


def niah(config: ConfigDict) -> None:
    """configs/envs/niah.yaml: multi-value needles in 4,000 tokens."""
    config.data.sources.niah.update(preset="multivalue", tokens=4096)
    config.env.max_steps = 5
    lengths(config, 256, 64)
    updates(config, micro=64, accumulation=2, steps=50_000, every=500)


def hotpotqa(config: ConfigDict) -> None:
    """configs/algo/pqn_e5_hotpotqa.yaml and configs/envs/hotpotqa.yaml."""
    config.env.max_steps = 2
    lengths(config, 220, 128)
    common.constants(config, alpha=0.05, lambda_=0.5, rate=1.5e-5, decay=5e-4, final=0.1)
    config.optimizer.schedule = "quarter_cosine"
    updates(config, micro=12, accumulation=8, steps=10_000, every=100)


def musique(config: ConfigDict) -> None:
    """configs/algo/pqn_e5_musique.yaml and configs/envs/musique.yaml."""
    config.env.max_steps = 4
    lengths(config, 110, 128)
    common.constants(config, alpha=0.005, lambda_=0.6, rate=1e-5, decay=1e-3, final=0.1)
    updates(config, micro=12, accumulation=8, steps=10_000, every=100)


def qwen3_babilong(config: ConfigDict) -> None:
    """configs/algo/pqn_qwen3.yaml: all weights are trained, and texts have no prefix."""
    config.encoder.path = "Qwen/Qwen3-Embedding-0.6B"
    config.encoder.update(pooling="last", normalise=True, scale=1.0)
    common.constants(config, alpha=0.005, lambda_=0.65, rate=5e-5, decay=0.01, final=0.0)
    babilong(config, special=1)  # its tokenizer adds a special token only at the end


def gte(config: ConfigDict) -> None:
    """configs/algo/pqn_gte.yaml, configs/envs/combined_2.yaml, training_gte_combined.yaml."""
    mean(config, "Alibaba-NLP/gte-multilingual-base")
    config.encoder.attention_dropout = 0.0
    config.data.mixture = "size"
    config.env.max_steps = 6
    lengths(config, 512, 256)
    common.constants(config, alpha=0.005, lambda_=0.6, rate=5e-6, decay=1e-3, final=0.1)
    updates(config, micro=16, accumulation=2, steps=70_000, every=100)


# Variant → its sources, and the changes, in their order.
RUNS: dict[str, tuple[tuple[str, ...], tuple[Callable[[ConfigDict], None], ...]]] = {
    "contriever-babilong": (("babilong",), (contriever, babilong)),
    "contriever-babilong-em": (("babilong",), (contriever, babilong, by_answers)),
    "contriever-niah": (("niah",), (contriever, niah)),
    "e5-hotpotqa": (("hotpotqa",), (e5, hotpotqa)),
    "e5-musique": (("musique",), (e5, musique)),
    "qwen3-babilong": (("babilong",), (qwen3_babilong,)),
    "gte-hotpotqa-musique": (("hotpotqa", "musique"), (gte,)),
    "gte-hotpotqa-musique-wiki": (("hotpotqa", "musique", "two_wiki"), (gte,)),
}


def get_config(arg: str = "") -> ConfigDict:
    """Config of a published run, a key of `RUNS`, or "tiny"; "" is "e5-hotpotqa"."""
    usual = RUNS["e5-hotpotqa"]
    sources, _ = RUNS.get(arg, usual)
    known = {name: changes for name, (_, changes) in RUNS.items()}
    return common.variant(
        base(*sources), arg, {"": usual[1], "tiny": (*usual[1], common.tiny), **known}
    )
