"""The constants of HARR's published runs, each with the place of the public code that sets it.

The values come from GitHub zyc140345/HARR (February 2026), its scripts first, then the defaults of
its code and of the libraries that it pins. The paper (arXiv 2602.03645) reports the runs with GRPO
on HotpotQA and NQ; the script with PPO has no published result. NQ has single hops, and no source
here reads it.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published_constants import Constant
from configs.common_harr import READER, SEARCH_R1_READER

SCRIPTS, CODE, TRL = "scripts", "its dataclasses", "trl 0.18.1"
HUGGING_FACE, LLAMA_INDEX = "transformers 4.55.4", "llama-index-core 0.12.52"
FIRST_RATIO = "without dropout the first importance ratio is exactly 1"
DATA = {"hotpotqa": "hotpotqa", "two_wiki": "2wiki"}  # ours → theirs


def _shared(size: str) -> Iterator[Constant]:
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


def _grpo() -> Iterator[Constant]:
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


def _ppo() -> Iterator[Constant]:
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


# "harr_ALGORITHM:VARIANT" → its constants.
RUNS: dict[str, tuple[Constant, ...]] = {
    f"harr_grpo:{data}-{agent}-{size}": (*_shared(size), *_grpo(), *of_agent())
    for data in DATA
    for agent, of_agent in (("react", _react), ("search_r1", _search_r1))
    for size in ("0.6b", "4b")
}
RUNS["harr_ppo:hotpotqa-react-0.6b"] = (*_shared("0.6b"), *_ppo(), *_react())
