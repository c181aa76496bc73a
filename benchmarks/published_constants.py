"""The constants of published runs, each with the file of the public code that sets it.

Q-RAG's come from GitHub griver/Q-RAG, from the newest version of each file that could be read. If
no file sets a constant, its value comes from the README or the paper (arXiv 2511.07328). If another
version of a file has another value, `source` says so. If our value differs on purpose, `ours` and
`why` say so. All other values must be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from configs.common_harr import READER, SEARCH_R1_READER


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
    "episodes an update": lambda config: (
        config.train.batch_size * config[config.get("algorithm", "grpo")].members
    ),
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


_Q_RAG: dict[str, tuple[Constant, ...]] = {
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


# HARR: GitHub zyc140345/HARR (February 2026), its scripts first, then the defaults of its code and
# of the libraries that it pins. The paper (arXiv 2602.03645) reports the runs with GRPO on HotpotQA
# and NQ; the script with PPO has no published result. NQ has single hops; no source here reads it.
SCRIPTS, CODE, TRL = "scripts", "its dataclasses", "trl 0.18.1"
HUGGING_FACE, LLAMA_INDEX = "transformers 4.55.4", "llama-index-core 0.12.52"
FIRST_RATIO = "without dropout the first importance ratio is exactly 1"


def _harr(size: str) -> Iterator[Constant]:
    yield Constant("seed", 42, TRL)
    yield Constant("encoder.path", f"Qwen/Qwen3-Embedding-{size.upper()}", SCRIPTS)
    yield Constant("encoder.pooling", "last", CODE)
    yield Constant("encoder.normalise", True, CODE)
    yield Constant("encoder.lora.targets", "all-linear", SCRIPTS)
    yield Constant("encoder.lora.dropout", 0.05, SCRIPTS, 0.0, FIRST_RATIO)
    yield Constant(
        "encoder.dtype", "float16", SCRIPTS, "auto", "bfloat16 on GPUs, which needs no loss scaling"
    )
    yield Constant("state.stateful", True, SCRIPTS)
    yield Constant("state.instruction", True, CODE)
    yield Constant("state.max_tokens", 1024, CODE)
    yield Constant("policy.pool", 30, CODE)
    yield Constant("policy.passages", 3, CODE)
    yield Constant("optimizer.beta1", 0.9, HUGGING_FACE)
    yield Constant("optimizer.beta2", 0.999, HUGGING_FACE)
    yield Constant("optimizer.eps", 1e-8, HUGGING_FACE)
    yield Constant("optimizer.weight_decay", 0.0, HUGGING_FACE)
    yield Constant("optimizer.clip_norm", 1.0, HUGGING_FACE)
    yield Constant("optimizer.warmup_steps", 0, HUGGING_FACE)
    yield Constant(
        "eval.samples", 16, CODE, 500, "16 questions are too few to choose a checkpoint by"
    )


def _harr_grpo() -> Iterator[Constant]:
    yield Constant("encoder.lora.rank", 32, SCRIPTS)
    yield Constant("encoder.lora.alpha", 64.0, SCRIPTS)
    yield Constant("policy.tau", 0.05, SCRIPTS)
    yield Constant("grpo.members", 8, SCRIPTS)
    yield Constant("grpo.clip_low", 0.2, TRL)
    yield Constant("grpo.clip_high", 0.2, TRL)
    yield Constant("grpo.beta", 0.0, SCRIPTS)
    yield Constant("grpo.aggregation", "bnpo", TRL)
    yield Constant("grpo.scaled", True, TRL)
    yield Constant("grpo.epochs", 1, SCRIPTS)
    yield Constant("grpo.minibatches", 1, SCRIPTS)
    yield Constant("train.batch_size", 16, SCRIPTS)
    yield Constant("train.steps", 100, SCRIPTS)
    yield Constant("reward.mixture", "f1=1", SCRIPTS)
    yield Constant("optimizer.learning_rate", 1e-5, SCRIPTS)
    yield Constant("optimizer.schedule", "constant", SCRIPTS)
    yield Constant(
        "questions.kept", "filtered", SCRIPTS, "", "give the file of qrag filter_data in this field"
    )


def _harr_ppo() -> Iterator[Constant]:
    yield Constant("encoder.lora.rank", 16, SCRIPTS)
    yield Constant("encoder.lora.alpha", 32.0, SCRIPTS)
    yield Constant("policy.tau", 0.02, SCRIPTS)
    yield Constant("ppo.members", 1, CODE)
    yield Constant("ppo.gamma", 1.0, TRL)
    yield Constant("ppo.lambda_", 0.95, TRL)
    yield Constant("ppo.clip_low", 0.2, TRL)
    yield Constant("ppo.clip_high", 0.2, TRL)
    yield Constant("ppo.value_clip", 0.2, TRL)
    yield Constant("ppo.kl", 0.005, SCRIPTS)
    yield Constant("ppo.entropy", 0.0, CODE)
    yield Constant("ppo.whiten", True, CODE)
    yield Constant("ppo.epochs", 1, SCRIPTS)
    yield Constant("ppo.minibatches", 1, SCRIPTS)
    yield Constant("ppo.critic_learning_rate", 1e-4, SCRIPTS)
    yield Constant("train.batch_size", 32, SCRIPTS)
    yield Constant("train.steps", 313, SCRIPTS)
    yield Constant("reward.mixture", "rouge_l=1", CODE)
    yield Constant("optimizer.learning_rate", 1e-4, SCRIPTS)
    yield Constant("optimizer.schedule", "linear", HUGGING_FACE)
    yield Constant("optimizer.final_ratio", 0.0, HUGGING_FACE)
    yield Constant("questions.kept", "", SCRIPTS)


def _react() -> Iterator[Constant]:
    yield Constant("agent.name", "react", SCRIPTS)
    # max_iterations is 5, which counts replies, and the fifth fails.
    yield Constant("agent.max_hops", 3, LLAMA_INDEX)
    yield Constant("llm.server.model", READER, SCRIPTS)
    yield Constant("llm.server.max_model_len", 4096, SCRIPTS)
    yield Constant("llm.temperature", 0.1, LLAMA_INDEX)
    yield Constant("llm.seed", 42, CODE)
    yield Constant("llm.enable_thinking", False, CODE)


def _search_r1() -> Iterator[Constant]:
    yield Constant("agent.name", "search_r1", SCRIPTS)
    yield Constant("agent.max_turns", 5, CODE)
    yield Constant("llm.server.model", SEARCH_R1_READER, SCRIPTS)
    yield Constant("llm.server.max_model_len", 4096, SCRIPTS)
    yield Constant("llm.temperature", 0.7, CODE)
    yield Constant("llm.max_tokens", 512, CODE)
    yield Constant("llm.seed", 42, CODE)


# LeReT: GitHub sher222/LeReT (October 2024) and dspy-ai 2.4.12, which it pins; arXiv 2410.23214.
LERET, DSPY = "train.py and its configs", "create_preference_dataset.py, dspy-ai"
LERET_LLAMA3 = (
    Constant("model.path", "meta-llama/Meta-Llama-3-8B-Instruct", LERET),
    Constant("seed", 0, LERET),
    Constant("sampling.temperature", 0.0, "the client of Together's API"),
    Constant("sampling.room", 2048, "README.md"),
    Constant(
        "writing.query_tokens", 1024, DSPY, 48, "theirs reasons before the query, ours writes it"
    ),
    Constant("writing.hops", 2, DSPY),
    Constant("writing.k", 3, DSPY),
    Constant("writing.order", "score", DSPY),
    Constant("tries.prompts", 3, DSPY),
    Constant("tries.with_bare", True, DSPY),
    Constant("tries.samples", 1, DSPY),
    Constant("few_shot.candidates", 12, DSPY),
    Constant("few_shot.demonstrations", 3, DSPY),
    Constant("few_shot.bootstrap_questions", 50, DSPY),
    Constant("few_shot.rank_questions", 50, DSPY),
    Constant("search.engine", "colbert", DSPY, "bm25", "no engine here scores by late interaction"),
    Constant("search.gold_by", "title", "metrics"),
    Constant("reward.measure", "ap", "metrics"),
    Constant("pairs.pairing", "adjacent", DSPY),
    Constant("sft.learning_rate", 1e-7, "README.md"),
    Constant("sft.batch_size", 8, "README.md"),
    Constant("preference.loss", "ipo", "README.md"),
    Constant("preference.beta", 0.05, "README.md"),
    Constant("preference.averaged", False, LERET),
    Constant("preference.learning_rate", 1e-7, "README.md"),
    Constant("preference.batch_size", 4, "README.md"),
    Constant("optimizer.beta1", 0.0, "RMSprop, torch 2.3.0"),
    Constant("optimizer.beta2", 0.99, "RMSprop, torch 2.3.0"),
    Constant("optimizer.eps", 1e-8, "RMSprop, torch 2.3.0"),
    Constant("optimizer.schedule", "constant", LERET),
    Constant("optimizer.warmup_steps", 150, LERET),
    Constant("optimizer.clip_norm", 10.0, LERET),
    Constant("iterations", 1, LERET),
    Constant("eval.greedy", True, "run_evals.py"),
)

# DeepRetrieval: GitHub pat-jj/DeepRetrieval (May 2025), the scripts of SciFact by BM25 and of
# PubMed; arXiv 2503.00223.
SCIFACT, PUBMED, VERL = "the script of SciFact", "the script of PubMed", "scripts"


def _deepretrieval(
    source: str, temperature: float, tokens: int, tiers: str, k: int
) -> Iterator[Constant]:
    yield Constant("model.path", "Qwen/Qwen2.5-3B-Instruct", source)
    yield Constant("sampling.temperature", temperature, source)
    yield Constant("writing.query_tokens", tokens, source)
    yield Constant("reward.tiers", tiers, source)
    yield Constant("reward.k", k, source)
    yield Constant("reward.gain", False, source)
    yield Constant("algorithm", "ppo", VERL)
    yield Constant("episodes an update", 64, VERL)
    yield Constant("ppo.minibatches", 4, "scripts (SciFact's 128 of a batch of 64 is a mistake)")
    yield Constant("ppo.epochs", 1, VERL)
    yield Constant("ppo.critic", "own", VERL)
    yield Constant("ppo.kl", 0.001, VERL)
    yield Constant("ppo.kl_in", "reward", VERL)
    yield Constant("ppo.clip_low", 0.2, VERL)
    yield Constant("ppo.clip_high", 0.2, VERL)
    yield Constant("ppo.value_clip", 0.5, VERL)
    yield Constant("ppo.entropy", 0.001, VERL)
    yield Constant("ppo.gamma", 1.0, VERL)
    yield Constant("ppo.lambda_", 1.0, VERL)
    yield Constant("ppo.whiten", True, VERL)
    yield Constant("ppo.critic_learning_rate", 1e-5, VERL)
    yield Constant("optimizer.learning_rate", 1e-6, VERL)
    yield Constant("optimizer.schedule", "constant", VERL)
    yield Constant("optimizer.warmup_steps", 0, VERL)
    yield Constant("optimizer.clip_norm", 1.0, VERL)


DEEPRETRIEVAL_BEIR = (
    *_deepretrieval(SCIFACT, 0.6, 512, "ir", 50),
    Constant("search.k1", 1.2, SCIFACT),
    Constant("search.b", 0.75, SCIFACT),
    Constant("search.stemmer", "porter", "Lucene's EnglishAnalyzer"),
    Constant(
        "search.stop_words", "Lucene's 33", "Lucene's EnglishAnalyzer", "english", "a longer list"
    ),
    Constant("train.steps", 1200, "100 epochs of 809 queries"),
    Constant("eval.best_by", "ndcg@10", SCIFACT),
)

# RLVR: GitHub bdsaglam/rlvr (February 2026), train_musique.py; verifiers 0.1.4, which it uses.
RLVR, VERIFIERS = "train_musique.py", "verifiers 0.1.4"
RLVR_QWEN25 = (
    Constant("model.path", "Qwen/Qwen2.5-7B-Instruct", RLVR),
    Constant("model.lora.rank", 16, RLVR),
    Constant("model.lora.alpha", 32.0, RLVR),
    Constant("episodes an update", 64, RLVR),
    Constant("grpo.members", 8, RLVR),
    Constant("grpo.aggregation", "dr_grpo", RLVR),
    Constant("grpo.longest", 9344, RLVR),
    Constant("grpo.beta", 0.0, RLVR),
    Constant("grpo.epochs", 1, RLVR),
    Constant("grpo.scaled", False, RLVR),
    Constant("grpo.clip_low", 0.2, VERIFIERS),
    Constant("grpo.clip_high", 0.2, VERIFIERS),
    Constant("train.steps", 2492, "an epoch of 19,938 questions"),
    Constant("train.eval_every", 100, RLVR),
    Constant("tasks.easy_first", True, "vf_musique"),
    Constant("tasks.noise_rate", 1.0, "vf_musique"),
    Constant("tools.max_turns", 10, "vf_musique"),
    Constant("tools.top_n", 2, "vf_musique"),
    Constant("tools.turn_tokens", 1024, RLVR),
    Constant("tools.retriever", "interleaved", "vf_musique"),
    Constant(
        "tools.encoder", "BAAI/bge-reranker-v2-m3", "services", "minilm", "it needs no server"
    ),
    Constant("tools.truncated", "masked", VERIFIERS),
    Constant("tools.staleness", 1, VERIFIERS, 0, "the device that learns samples, by its weights"),
    Constant("rubric.preset", "head", "vf_musique"),
    Constant("sampling.temperature", 0.5, RLVR),
    Constant("sampling.room", 9344, RLVR),
    Constant("optimizer.learning_rate", 1e-5, RLVR),
    Constant("optimizer.schedule", "constant", RLVR),
    Constant("optimizer.warmup_steps", 10, RLVR),
    Constant("optimizer.beta1", 0.9, RLVR),
    Constant("optimizer.beta2", 0.99, RLVR),
    Constant("optimizer.clip_norm", 0.1, RLVR),
    Constant("seed", 42, RLVR),
)

# "CONFIG:VARIANT" → its constants.
RUNS: dict[str, tuple[Constant, ...]] = {
    **{f"published:{name}": constants for name, constants in _Q_RAG.items()},
    **{
        f"harr_grpo:{data}-{agent}-{size}": (*_harr(size), *_harr_grpo(), *of_agent())
        for data in ("hotpotqa", "two_wiki")
        for agent, of_agent in (("react", _react), ("search_r1", _search_r1))
        for size in ("0.6b", "4b")
    },
    "harr_ppo:hotpotqa-react-0.6b": (*_harr("0.6b"), *_harr_ppo(), *_react()),
    "leret:llama3": LERET_LLAMA3,
    "deepretrieval:beir": DEEPRETRIEVAL_BEIR,
    "deepretrieval:pubmed": tuple(_deepretrieval(PUBMED, 1.0, 500, "engines", 3000)),
    "rlvr:qwen25": RLVR_QWEN25,
}
