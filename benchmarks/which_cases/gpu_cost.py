"""What the trainings that the papers report would take on H100s, row by row: derived, never run.

Updates are programs that XLA compiled for H100s, with their estimated times
(`benchmarks/RESULTS.md`, "Compiled for an H100", "Published recipes"). What was not compiled is
derived from one that was, or from its products at that one's share of the peak. A language model's
tokens cost at least one reading of its weights each, for all rows of a device together: a floor.
GPU-hours are hours times GPUs.
"""

from __future__ import annotations

import dataclasses

from benchmarks.gpu import DOLLARS_AN_HOUR
from benchmarks.report import markdown
from qrag_jax.runtime.device_speeds import speeds_of

_H100 = speeds_of("NVIDIA H100 80GB HBM3")
_TYPE = "bf16"
# Weights, as the models' pages tell them.
_LLAMA_8B, _QWEN_7B, _QWEN_3B, _E5_LAYERS = 8.03e9, 7.62e9, 3.09e9, 0.30e9


@dataclasses.dataclass(frozen=True)
class GpuCost:
    """A training on H100s.

    Attributes:
        row: of the suite.
        recipe: what is trained, and how long.
        update_hours: GPU-hours of the updates.
        sampling_hours: GPU-hours of a language model's tokens, at least.
        derived: from what, and how.
        besides: what is in none of these figures.
    """

    row: str
    recipe: str
    update_hours: float
    sampling_hours: float
    derived: str
    besides: str = ""

    @property
    def dollars(self) -> float:
        """At `DOLLARS_AN_HOUR` of each GPU."""
        return (self.update_hours + self.sampling_hours) * DOLLARS_AN_HOUR


def updates(steps: int, seconds: float, devices: int = 1) -> float:
    """GPU-hours of so many updates."""
    return steps * seconds * devices / 3600


def products(flops: float, share: float) -> float:
    """GPU-hours of products at a share of the bfloat16 peak."""
    assert _H100 is not None
    return flops / (_H100.products[_TYPE] * share) / 3600


def readings(weights: float, count: float) -> float:
    """GPU-hours in which a device reads all weights, two bytes each, so many times."""
    assert _H100 is not None
    return 2 * weights * count / _H100.bandwidth / 3600


def costs() -> list[GpuCost]:
    """All rows that train."""
    pair_tokens = 2 * 90_447 * (2 * 130 + 25)  # two gold pairs a question, a negative each
    hops = 2 * (512 + 64)  # tokens of a pair of queries, each with its prompt
    tries = 90_447 * 2 * 4 * 64 / 64  # two hops, four prompts, 64 tokens, 64 rows side by side
    return [
        GpuCost(
            "MiniLM, contrastive",
            "E5-large, three epochs of HotpotQA's 90,447 questions",
            products(3 * pair_tokens * 6 * _E5_LAYERS, 0.29),
            0,
            "products, at the 29 % of the peak of Q-RAG's update of the same encoder",
        ),
        GpuCost(
            "Q-RAG",
            "`two_wiki.py:contriever`, 50,000 × 32 questions",
            updates(50_000, 0.179),
            0,
            "compiled: 179 ms an update",
            "evaluations",
        ),
        GpuCost(
            "Q-RAG",
            "`published.py:e5-hotpotqa`, 10,000 × 48 questions, float32",
            updates(10_000, 6.14),
            0,
            "compiled: 6,140 ms an update (655 in bfloat16)",
            "evaluations",
        ),
        GpuCost(
            "HARR, GRPO",
            "Qwen3-Embedding-4B, LoRA, 100 steps",
            updates(100, 7.71),
            0,
            "compiled: 7,710 ms an update",
            "the agent's language model: the paper's runs took 1.1 to 3.1 hours of eight A100s",
        ),
        GpuCost(
            "HARR, PPO",
            "Qwen3-Embedding-0.6B, LoRA, 313 steps of 32 episodes",
            updates(313, 4.84 / 4),
            0,
            "compiled: 4,840 ms for four times as many episodes",
            "the agent's language model, as above",
        ),
        GpuCost(
            "RLVR",
            "`rlvr.py:qwen25`, Qwen2.5-7B, LoRA, 2,492 steps of 64 episodes",
            updates(2_492, 0.957, devices=8),
            8 * readings(_QWEN_7B, 2_492 * 768),
            "compiled: 957 ms on each of eight, 8 episodes of 3,584 tokens each; 768 drawn tokens",
            "searches; longer episodes",
        ),
        GpuCost(
            "LeReT",
            "`leret.py:llama3`, Llama-3-8B whole, 11,000 × 8 and 90,000 × 4 pairs",
            products((11_000 * 8 * hops / 2 * 6 + 90_000 * 4 * hops * 8) * _LLAMA_8B, 0.66),
            readings(_LLAMA_8B, tries),
            "products, at the 66 % of the peak of the update of Qwen3-Embedding-8B, 576 tokens a "
            "query; the reference's forward pass is in it",
            "searches",
        ),
        GpuCost(
            "DeepRetrieval",
            "`deepretrieval.py:beir`, Qwen2.5-3B, PPO, 2,000 steps of 64 queries",
            updates(2_000, 2.604 * _QWEN_3B / _QWEN_7B, devices=4),
            4 * readings(_QWEN_3B, 2_000 * 512),
            "compiled: 2,604 ms on each of eight for 16 queries of Qwen2.5-7B with LoRA, by the "
            "weights; 512 drawn tokens",
            "searches; weights that are trained whole",
        ),
    ]


def table() -> str:
    """A section in Markdown."""
    rows = [
        [
            each.row,
            each.recipe,
            f"{each.update_hours:.2g}",
            f"{each.sampling_hours:.2g}" if each.sampling_hours else "",
            f"{each.dollars:.2g}" if each.dollars < 10 else f"{each.dollars:.0f}",
            each.derived,
            each.besides,
        ]
        for each in costs()
    ]
    header = ["row", "training as reported", "GPU-hours, updates", "tokens drawn, at least"]
    header += [f"dollars, at {DOLLARS_AN_HOUR:g} an hour", "derived from", "not in it"]
    return (
        "### What a GPU run of each row would cost\n\n"
        "Estimates for H100s; no GPU has run any of these trainings. Expect 1.3 to 1.7 times as "
        'long: so it was for eight programs on an H200 (`benchmarks/RESULTS.md`, "GPU"). Searches '
        "without training need no GPU.\n\n" + markdown(header, rows)
    )
