"""HARR with PPO: a query encoder learns inside an agent that searches (arXiv 2602.03645).

    qrag train --config=configs/harr_ppo.py:tiny

The variants are those of configs/harr_grpo.py: `:tiny`, `:minilm` and `:DATA-AGENT-SIZE`. Ten steps
of `:minilm` raise the answer F1 to 0.84, as measured there.
"""

from configs import harr_grpo


def get_config(arg: str = "tiny"):
    return harr_grpo.get_config(arg, "ppo")
