"""The constants of Q-RAG's published runs, each with the file of the public code that sets it.

The values come from GitHub griver/Q-RAG, from the newest version of each file that could be read.
If no file sets a constant, its value comes from the README or the paper (arXiv 2511.07328). If
another version of a file has another value, `source` says so. If our value differs on purpose,
`ours` and `why` say so. All other values must be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict


class _Same:
    """Marks a constant for which our config has the same value."""


SAME = _Same()


@dataclasses.dataclass(frozen=True)
class Constant:
    """One constant of a run.

    Attributes:
        name: a field of our config, or a name in `DERIVED`.
        theirs: the value in the published run.
        source: the file, or the text, that has this value.
        ours: our value, if it differs.
        why: the reason for the difference, in words.
    """

    name: str
    theirs: Any
    source: str
    ours: Any = SAME
    why: str = ""

    @property
    def expected(self) -> Any:
        """The value that our config must have."""
        return self.theirs if isinstance(self.ours, _Same) else self.ours


# Values that follow from several fields of our config.
DERIVED: dict[str, Callable[[ConfigDict], Any]] = {
    "transitions an update": lambda config: config.train.batch_size * config.env.max_steps,
    "transitions a micro-batch": lambda config: (
        config.train.batch_size * config.env.max_steps // config.train.accumulation
    ),
    "sources": lambda config: "+".join(sorted(config.data.sources)),
    "trained": lambda config: "adapters" if config.encoder.lora.rank else "all weights",
}

WHOLE_EPISODES = (
    "an update has whole episodes; theirs cuts the stream of parallel games after so many "
    "transitions and bootstraps there"
)
PAPER, README = "the paper", "README.md (training details)"
TRAINING, FEEDBACK = "configs/training.yaml", "configs/feedback/defaults.yaml"
GTE_TRAINING = "configs/training_gte_combined.yaml"
HOTPOTQA_TRAINING = "configs/training_hotpotqa.yaml"
MODEL = "rl/bert_predictor.py"
OWN = "the model's config.json, in train mode"
MEAN = (
    Constant("encoder.pooling", "mean", MODEL),
    Constant("encoder.normalise", False, MODEL),
    Constant("encoder.scale", 0.1, MODEL),
)


def _dropout(hidden: float, attention: float) -> tuple[Constant, ...]:
    return (
        Constant("encoder.dropout", hidden, OWN),
        Constant("encoder.attention_dropout", attention, OWN),
    )


def value(config: ConfigDict, name: str) -> Any:
    """Our value of a constant."""
    return DERIVED[name](config) if name in DERIVED else config[name]


def shared(algo: str) -> tuple[Constant, ...]:
    return (
        Constant("seed", 42, TRAINING),
        Constant("encoder.state_prefix", "", MODEL),
        Constant("encoder.chunk_prefix", "", MODEL),
        Constant("trained", "all weights", algo),
        Constant("pqn.gamma", 0.99, algo),
        Constant("pqn.learning_start", 200, TRAINING),
        Constant("policy.top_k_actions", 5, algo),
        Constant("optimizer.beta1", 0.9, algo),
        Constant("optimizer.beta2", 0.98, algo),
        Constant("optimizer.eps", 1e-6, algo),
        Constant("optimizer.clip_norm", 2.0, algo),
        Constant("optimizer.warmup_steps", 1000, algo),
    )


def _algo(
    algo: str, path: str, alpha: float, lambda_: float, tau: float, rate: float, decay: float
) -> tuple[Constant, ...]:
    return (
        *shared(algo),
        Constant("encoder.path", path, algo),
        Constant("policy.alpha", alpha, algo),
        Constant("pqn.lambda_", lambda_, algo),
        Constant("pqn.tau", tau, algo),
        Constant("optimizer.learning_rate", rate, algo),
        Constant("optimizer.weight_decay", decay, algo),
    )


def _schedule(algo: str, name: str, final_ratio: float) -> tuple[Constant, ...]:
    return (
        Constant("optimizer.schedule", name, algo),
        Constant("optimizer.final_ratio", final_ratio, algo),
    )


def _updates(
    source: str,
    micro: int,
    accumulation: int,
    steps: int,
    ours: int | None = None,
    of_steps: str = "",
) -> tuple[Constant, ...]:
    """The sizes of an update and of its micro-batches, and the number of updates.

    Args:
        source: the file that has these values.
        micro: transitions of their micro-batch.
        accumulation: micro-batches in an update.
        steps: number of updates.
        ours: transitions of our micro-batch, if theirs is no whole number of episodes.
        of_steps: source of `steps`, if it is another one.
    """
    theirs = micro * accumulation
    if ours is None:
        sizes = (
            Constant("transitions a micro-batch", micro, source),
            Constant("transitions an update", theirs, source),
        )
    else:
        sizes = (
            Constant("transitions a micro-batch", micro, source, ours, WHOLE_EPISODES),
            Constant("transitions an update", theirs, source, ours * accumulation, WHOLE_EPISODES),
        )
    return (
        *sizes,
        Constant("train.accumulation", accumulation, source),
        Constant("train.steps", steps, of_steps or source),
    )


def _environment(
    env: str,
    max_steps: int,
    positions: str,
    sort_by_index: bool,
    penalize: bool,
    of_steps: str = "",
) -> tuple[Constant, ...]:
    """Constants of the environment; `of_steps`: source of `max_steps`, if it is not `env`."""
    return (
        Constant("env.max_steps", max_steps, of_steps or env),
        Constant("env.positions", positions, env),
        Constant("env.sort_by_index", sort_by_index, env),
        Constant("reward.penalize_extra_steps", penalize, env),
    )


def _lengths(
    source: str, chunk: int, in_state: int, of_state: str = "", special: int = 2
) -> tuple[Constant, ...]:
    """The longest chunks, chunks inside a state, and questions, in tokens.

    Args:
        source: the file that has these values.
        chunk: tokens of a chunk.
        in_state: tokens of a question, and of a chunk inside a state.
        of_state: source of `in_state`, if it is another one.
        special: number of special tokens that the tokenizer adds to a text; theirs counts them.
    """
    ours, why = in_state - special, "theirs counts the special tokens of each part, ours its text"
    return (
        Constant("data.max_chunk_tokens", chunk, source),
        Constant("data.max_chunk_tokens_in_state", in_state, of_state or source, ours, why),
        Constant("data.max_question_tokens", in_state, of_state or source, ours, why),
    )


def _evaluation(source: str, every: int, samples: int = 300) -> tuple[Constant, ...]:
    return (
        Constant("train.eval_every", every, source),
        Constant("eval.samples", samples, source),
        Constant(
            "eval.best_by", "return_until_found", "train_q_rag.py and the test_env of configs"
        ),
    )


NEVER_TERMINATE = (
    Constant(
        "env.never_terminate", True, "the paper (rl/feedback/feedback.py: False if not given)"
    ),
)
CONTRIEVER_FILE = "configs/algo/pqn.yaml"
CONTRIEVER = (
    *_algo(CONTRIEVER_FILE, "facebook/contriever", 0.01, 0.65, 0.1, 5e-5, 0.01),
    *_schedule(CONTRIEVER_FILE, "linear", 0.0),
    *MEAN,
    *_dropout(0.1, 0.1),
)
BABILONG_ENV = "configs/envs/babilong.yaml"
BABILONG = (
    *_environment(BABILONG_ENV, 6, "relative", True, True),
    Constant("sources", "babilong", BABILONG_ENV),
    Constant("data.sources.babilong.task", "qa3", BABILONG_ENV),
    Constant("data.sources.babilong.chunks", 100, BABILONG_ENV),
    *_updates(TRAINING, 64, 2, 50_000, ours=66),
    *_evaluation(TRAINING, 500),
)
BABILONG_LENGTHS = _lengths(TRAINING, 256, 64)
QWEN3_FILE = "configs/algo/pqn_qwen3.yaml"
E5 = "intfloat/multilingual-e5-large"
HOTPOTQA_FILE, MUSIQUE_FILE = (
    "configs/algo/pqn_e5_hotpotqa.yaml",
    "configs/algo/pqn_e5_musique.yaml",
)
HOTPOTQA_ENV, MUSIQUE_ENV = "configs/envs/hotpotqa.yaml", "configs/envs/musique.yaml"
NIAH_ENV = "configs/envs/niah.yaml"
E5_STEPS = f"the paper ({HOTPOTQA_TRAINING}: 5,000)"
GTE_FILE, COMBINED = "configs/algo/pqn_gte.yaml", "configs/envs/combined_2.yaml"


def _gte(sources: str, where: str) -> tuple[Constant, ...]:
    return (
        *_algo(GTE_FILE, "Alibaba-NLP/gte-multilingual-base", 0.005, 0.6, 0.02, 5e-6, 1e-3),
        *_schedule(GTE_FILE, "linear", 0.1),
        *MEAN,
        *_dropout(0.1, 0.0),
        *_environment(COMBINED, 6, "none", False, True),
        Constant("sources", sources, where),
        *NEVER_TERMINATE,
        Constant("data.mixture", "size", "envs/combined_dataset.py"),
        *_lengths(GTE_TRAINING, 512, 256),
        *_updates(
            GTE_TRAINING, 16, 2, 70_000, ours=18, of_steps=f"{GTE_TRAINING} (in others 50,000)"
        ),
        *_evaluation(GTE_TRAINING, 100),
    )


RUNS: dict[str, tuple[Constant, ...]] = {
    "contriever-babilong": (*CONTRIEVER, *BABILONG, *BABILONG_LENGTHS, *NEVER_TERMINATE),
    "contriever-babilong-em": (
        *CONTRIEVER,
        *BABILONG,
        *BABILONG_LENGTHS,
        Constant("env.never_terminate", False, FEEDBACK),
        Constant("reward.name", "babilong_em", FEEDBACK),
        Constant("reward.scale", 1.0, FEEDBACK),
        Constant("reward.completion_threshold", 1.0, FEEDBACK),
        Constant("reward.staleness", 0, "rl/feedback/llm_feedback.py"),
        Constant("llm.max_tokens", 32, FEEDBACK),
        Constant("llm.temperature", 0.0, FEEDBACK),
        Constant("llm.top_p", 0.95, FEEDBACK),
        Constant("llm.concurrency", 20, FEEDBACK),
        Constant("llm.enable_thinking", False, "rl/feedback/llm_feedback.py"),
        Constant("llm.cut_off", "score", "rl/feedback/llm_feedback.py"),
        Constant("llm.server.model", "Qwen/Qwen3-1.7B", FEEDBACK),
        Constant("llm.server.memory_share", 0.4, FEEDBACK),
        Constant("llm.server.max_model_len", 2048, FEEDBACK),
        Constant("llm.server.dtype", "bfloat16", FEEDBACK),
    ),
    "contriever-niah": (
        *CONTRIEVER,
        *_environment(NIAH_ENV, 5, "none", False, True, of_steps=f"the paper ({NIAH_ENV}: 3)"),
        Constant("sources", "niah", NIAH_ENV),
        Constant("data.sources.niah.preset", "multivalue", PAPER),
        Constant("data.sources.niah.tokens", 4096, PAPER),
        *_lengths(TRAINING, 256, 64),
        *_updates(TRAINING, 64, 2, 50_000, ours=65),
        *_evaluation(TRAINING, 500),
        *NEVER_TERMINATE,
    ),
    "e5-hotpotqa": (
        *_algo(HOTPOTQA_FILE, E5, 0.05, 0.5, 0.02, 1.5e-5, 5e-4),
        *_schedule(HOTPOTQA_FILE, "quarter_cosine", 0.1),
        *MEAN,
        *_dropout(0.1, 0.1),
        *_environment(HOTPOTQA_ENV, 2, "none", False, False),
        Constant("sources", "hotpotqa", HOTPOTQA_ENV),
        *_lengths(README, 220, 128, of_state=HOTPOTQA_FILE),
        *_updates(HOTPOTQA_TRAINING, 12, 8, 10_000, of_steps=E5_STEPS),
        *_evaluation(HOTPOTQA_TRAINING, 100),
        *NEVER_TERMINATE,
    ),
    "e5-musique": (
        *_algo(MUSIQUE_FILE, E5, 0.005, 0.6, 0.02, 1e-5, 1e-3),
        *_schedule(MUSIQUE_FILE, "linear", 0.1),
        *MEAN,
        *_dropout(0.1, 0.1),
        *_environment(MUSIQUE_ENV, 4, "none", False, False),
        Constant("sources", "musique", MUSIQUE_ENV),
        *_lengths(HOTPOTQA_TRAINING, 110, 128, of_state=MUSIQUE_FILE),
        *_updates(HOTPOTQA_TRAINING, 12, 8, 10_000, of_steps=E5_STEPS),
        *_evaluation(HOTPOTQA_TRAINING, 100),
        *NEVER_TERMINATE,
    ),
    "qwen3-babilong": (
        *_algo(QWEN3_FILE, "Qwen/Qwen3-Embedding-0.6B", 0.005, 0.65, 0.02, 5e-5, 0.01),
        *_schedule(QWEN3_FILE, "linear", 0.0),
        Constant("encoder.pooling", "last", MODEL),
        Constant("encoder.normalise", True, MODEL),
        Constant("encoder.scale", 1.0, MODEL),
        *BABILONG,
        *_lengths(TRAINING, 256, 64, special=1),
        *NEVER_TERMINATE,
    ),
    "gte-hotpotqa-musique": _gte("hotpotqa+musique", COMBINED),
    "gte-hotpotqa-musique-wiki": _gte("hotpotqa+musique+two_wiki", PAPER),
}
