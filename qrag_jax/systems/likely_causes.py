"""Why a training may not learn: for each system, the fields to look at first, the likeliest first.

The kinds are those of `runtime.not_learning`; docs/troubles.md says more about each.
"""

from __future__ import annotations

from collections.abc import Mapping

from qrag_jax.runtime.not_learning import (
    EQUAL_Q,
    FLAT,
    FLAT_GROUPS,
    NO_ENTROPY,
    NO_GRADIENT,
    ONE_RETURN,
    SKIPPED,
    WORSE,
)

_RATE = "--config.optimizer.learning_rate"
_GROUPS_ARE_EQUAL = (
    "the questions are too easy or too hard for the policy, too few draws (--config.grpo.members)"
)
_SKIPPED = f"{_RATE} is too high, --config.model.dtype"
_LANGUAGE_MODEL = {
    WORSE: f"{_RATE} is too high, the reward pays for something else than the score",
    NO_GRADIENT: "all rewards are equal (--config.grpo.members)",
    SKIPPED: _SKIPPED,
}

CAUSES: Mapping[str, Mapping[str, str]] = {
    "q_rag": {
        FLAT: (
            f"{_RATE} is too low (or --config.optimizer.warmup_steps too long), the reward is "
            "rarely given (--config.reward.name), --config.train.steps is too small"
        ),
        WORSE: f"{_RATE} is too high, --config.policy.alpha is too high",
        NO_ENTROPY: "--config.policy.alpha is too low for the size of the rewards",
        EQUAL_Q: f"the encoder's vectors have become equal, so {_RATE} is too high",
        SKIPPED: f"{_RATE} is too high, --config.encoder.dtype",
        NO_GRADIENT: "all Q-values fit the rewards already, so the rewards are all equal",
        ONE_RETURN: "the reward is never given, or always (--config.reward.name, the data's facts)",
    },
    "harr": {
        FLAT: (
            f"{_RATE} is too low, the agent answers alike whatever it reads, few questions have "
            "rewards that vary (qrag filter_data finds those)"
        ),
        WORSE: f"{_RATE} is too high, --config.reward.mixture pays for something else",
        NO_ENTROPY: "--config.policy.tau is too low, no bonus (grpo.entropy or ppo.entropy)",
        SKIPPED: f"{_RATE} is too high, --config.encoder.dtype",
        NO_GRADIENT: "all rewards of each group are equal; see qrag filter_data",
        FLAT_GROUPS: f"{_GROUPS_ARE_EQUAL}, --config.policy.tau is too low; see qrag filter_data",
        ONE_RETURN: "the agent never answers right, or its reward does not depend on what it reads",
    },
    "rlvr": {
        **_LANGUAGE_MODEL,
        FLAT: (
            f"{_RATE} is too low, the untrained model never gets a reward (begin with the stage "
            "sft), --config.rubric.preset, --config.tools.retriever finds nothing"
        ),
        NO_ENTROPY: f"--config.sampling.temperature is too low, {_RATE} is too high",
        FLAT_GROUPS: f"{_GROUPS_ARE_EQUAL}, --config.sampling.temperature is too low",
        ONE_RETURN: "no episode ends well (--config.tools.turn_tokens, --config.tools.max_turns)",
    },
    "leret": {
        **_LANGUAGE_MODEL,
        FLAT: (
            "--config.preference.learning_rate is too low, too few pairs (--config.tries.samples, "
            "--config.tries.prompts), all tries find the same"
        ),
        WORSE: (
            "--config.preference.learning_rate is too high, --config.preference.beta is too low"
        ),
        NO_GRADIENT: "all pairs are equal (--config.pairs.pairing)",
        SKIPPED: "--config.preference.learning_rate is too high, --config.model.dtype",
    },
    "deepretrieval": {
        **_LANGUAGE_MODEL,
        FLAT: (
            f"{_RATE} is too low, the reward is of too coarse a measure (--config.reward.measure), "
            "the original queries find all there is"
        ),
        NO_ENTROPY: f"--config.sampling.temperature is too low, {_RATE} is too high",
        FLAT_GROUPS: (
            f"{_GROUPS_ARE_EQUAL}, a coarse --config.reward.measure, --config.sampling.temperature "
            "is too low"
        ),
        ONE_RETURN: "no query is readable (--config.writing.query_tokens, --config.writing.prompt)",
    },
}
