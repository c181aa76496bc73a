"""Names an environment that ships in verifiers (below 0.4): puzzles of the package reasoning-gym.

The class has no `load_environment` of its own. The whole text is the answer, so that a model that
knows nothing gets a small reward now and then.
"""

from typing import Any

import verifiers as vf
from verifiers.legacy.envs.integrations.reasoninggym_env import ReasoningGymEnv


def load_environment(gym: str = "letter_counting", count: int = 64, seed: int = 0) -> Any:
    """See `ReasoningGymEnv`."""
    environment = ReasoningGymEnv(
        gym,
        num_train_examples=count,
        num_eval_examples=16,
        system_prompt="Answer with a number alone.",
        parser=vf.Parser(),
        seed=seed,
    )
    return environment
