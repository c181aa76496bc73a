"""RLVR: a language model learns to answer questions by searching with tools (bdsaglam/rlvr).

    qrag train --config=configs/rlvr.py:quick

`:quick` needs no download and no server: a decoder of 1.8 million weights, made here, imitates
scripted demonstrations of an invented world, which are flawed on purpose, and then learns by GRPO.
In 19 minutes on 2 cores of an AMD EPYC (2026-11-28) GRPO raises exact match from 0.05 to 0.27.
`:tiny` is the same in a minute; `:smol` trains adapters on SmolLM2-135M-Instruct (`make llm`) in
the same way, in hours. `:verifiers --config.env.verifiers=ID` trains in an environment of the
package verifiers (docs/rlvr.md). `:qwen25` is RLVR as published, `:qwen3` the same with Qwen3-1.7B;
both are for GPUs, and want MuSiQue: --config.questions.train='FOLDER,answerable,train', and dev
likewise. `:qwen25,X_0830` has the reward that RLVR had on that day (`RUBRICS`).
"""

from collections.abc import Callable
from functools import partial

from ml_collections import ConfigDict

from configs import common
from qrag_jax.feedback.rubric import PARTS
from qrag_jax.systems.rlvr.config import default_config


def get_config(arg: str = "quick") -> ConfigDict:
    name, _, rubric = arg.partition(",")
    config = common.variant(default_config(), name, VARIANTS)
    return common.variant(config, rubric, RUBRICS)


def _made_here(config: ConfigDict) -> None:
    """Minutes on two cores: the tiny model, whole weights, which can copy from the start."""
    config.model.tiny.weights = "examples/copying_heads.py:with_copying_heads"
    config.tools.update(prompt="bare_question", top_n=1, most=1, max_turns=4, turn_tokens=96)
    config.sampling.update(temperature=1.0, room=640, chunk=64)
    config.sft.update(steps=2500, batch_size=8, learning_rate=2e-3, observed=True)
    config.grpo.update(members=8, clip_low=0.2, clip_high=0.28, longest=384)
    config.train.update(steps=200, batch_size=8)
    config.optimizer.update(learning_rate=3e-4, clip_norm=1.0, warmup_steps=5, schedule="linear")
    config.optimizer.update(beta2=0.98, matrices="muon")
    config.train.update(eval_every=500, checkpoint_every=100, log_every=10)


def _tiny(config: ConfigDict) -> None:
    """A minute, to see that all of it runs; it learns hardly anything."""
    config.model.tiny.update(layers=2, hidden=64, heads=2, key_heads=1, intermediate=128, vocab=600)
    config.questions.update(bridge_train=64, bridge_dev=8)
    config.sft.update(steps=6, batch_size=4)
    config.grpo.members = 4
    config.train.update(steps=4, batch_size=2, eval_every=5, checkpoint_every=5, log_every=1)


def _smol(config: ConfigDict) -> None:
    """Adapters on a genuine small model."""
    config.model.path = "smollm2"
    config.model.lora.update(rank=16, alpha=32.0)
    # Untrained it calls no tool, so all rewards are 0: it imitates the form first.
    config.tools.update(prompt="bare_question", top_n=1, most=1, max_turns=4, turn_tokens=96)
    # Rows beyond a batch's 16 episodes would be computed for nothing.
    config.sampling.update(temperature=1.0, room=768, chunk=64, rows=16)
    config.sft.update(steps=40, batch_size=8, learning_rate=1e-3)
    config.grpo.update(members=8, clip_low=0.2, clip_high=0.28, longest=384)
    config.train.update(steps=20, batch_size=2, eval_every=20, checkpoint_every=10, log_every=2)
    config.optimizer.update(learning_rate=1e-4, clip_norm=1.0, warmup_steps=2)
    config.eval.samples = 64


def _verifiers(config: ConfigDict) -> None:
    """GRPO in somebody else's environment: 20 steps of the tiny model, to see that all of it runs.

    A model that knows something is --config.model.path=smollm2 (`make llm`) or another chat model.
    """
    config.env.verifiers = "musique-multihop"  # our own; without one, other questions are asked
    config.stages = ("grpo",)
    config.model.tiny.weights = "examples/copying_heads.py:with_copying_heads"
    config.tools.update(turn_tokens=64)
    config.sampling.update(temperature=1.0, room=1024, chunk=64)
    config.grpo.update(members=8, clip_low=0.2, clip_high=0.28, longest=1024)
    config.train.update(steps=20, batch_size=2, eval_every=20, checkpoint_every=10, log_every=2)
    config.optimizer.update(learning_rate=3e-4, clip_norm=1.0, warmup_steps=2)
    config.eval.update(samples=16, best_by="reward")


def _published(config: ConfigDict) -> None:
    """RLVR's last commit: 64 episodes an update, 8 of each of 8 questions, r 16.

    Three things differ (docs/published.md): MiniLM scores where theirs asks a server of
    bge-reranker-v2-m3, no batch is played ahead, and no top-p of 0.95 cuts the distribution, whose
    log-probabilities would be others.
    """
    config.model.remat = "layers"
    config.model.lora.update(rank=16, alpha=32.0)
    config.model.lora.targets = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("up_proj", "down_proj", "gate_proj"),
    )
    config.stages = ("grpo",)
    config.questions.update(
        train="bdsaglam/musique,answerable,train", dev="bdsaglam/musique-mini,answerable,validation"
    )
    config.tasks.easy_first = True
    config.tools.update(top_n=2, turn_tokens=1024, truncated="masked")
    config.search.update(engine="interleaved", encoder="minilm")
    config.sampling.update(temperature=0.5, room=9344, chunk=512)
    config.grpo.update(members=8, longest=9344)  # its max_seq_len
    config.train.update(steps=2492, batch_size=8, eval_every=100, checkpoint_every=100)


def _qwen25(config: ConfigDict) -> None:
    config.model.path = "Qwen/Qwen2.5-7B-Instruct"


def _qwen3(config: ConfigDict) -> None:
    config.model.update(path="Qwen/Qwen3-1.7B", thinking="off")


VARIANTS = {
    "quick": (_made_here,),
    "tiny": (_made_here, _tiny),
    "smol": (_smol,),
    "verifiers": (_verifiers,),
    "qwen25": (_published, _qwen25),
    "qwen3": (_published, _qwen3),
}


def _rubric(
    hops: str, scales: str, divisor: float, **weights: float
) -> tuple[Callable[[ConfigDict], None]]:
    fields = dict.fromkeys(PARTS, 0.0) | weights
    fields |= {"hops": hops, "scales": scales, "divisor": divisor}
    return (lambda config: config.rubric.update(fields),)


# RLVR's rewards, each from the day in 2025 that its name says; `F` is older, and `head`, the
# default, the last. Where there is a divisor, it is the sum of the weights. `F` had two parts more,
# which need other things than an episode: the share of English words in the thoughts (0.2), and
# rewards of its tools' own.
_0830 = partial(_rubric, em=1.0, f1=0.9, recall=1.0, precision=0.4, citation=0.6, format=0.1)
RUBRICS: common.Variants = {
    "": (),
    "head": (),
    "F": _rubric("times_half", "answer", 1.0, em=1.0, f1=1.0, recall=1.0, citation=1.0),
    "R_0808": _rubric("times_half_up_to_1", "answer", 1.0, em=0.5, f1=0.5, recall=0.5),
    "X_0809": _rubric("over", "answer", 1.0, em=0.5, f1=0.5, recall=0.3, citation=0.2),
    "X_0809b": _rubric("over", "answer", 3.0, em=1.0, f1=0.9, citation=0.6, recall=0.4, format=0.1),
    "X_0830": _0830("over", "answer", 4.0),
    "X_0913": _0830("times_half", "all", 4.0),
    "H_1002": _rubric(
        "times_half",
        "all",
        3.7,
        em=1.0,
        f1=0.8,
        recall=0.6,
        precision=0.4,
        citation_f1=0.8,
        format=0.1,
    ),
}
