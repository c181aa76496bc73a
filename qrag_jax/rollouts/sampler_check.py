"""Whether a server that samples has the model, the tokenizer and the temperature of the trainer."""

from __future__ import annotations

import numpy as np

from qrag_jax.errors import InputError

TOLERANCE = 0.1  # nats a token; bfloat16 on both sides makes some hundredths
_ROUNDING = 1e-3  # nats a token; below it, nothing tells two temperatures apart


def check_log_probs(
    server: np.ndarray,
    trainer: np.ndarray,
    trainer_at_one: np.ndarray,
    *,
    temperature: float,
    tolerance: float = TOLERANCE,
) -> float:
    """Compares log-probabilities of the same sampled tokens, in nats; use it on a first batch.

    vLLM gives raw log-probabilities, those at temperature 1, unless it was told otherwise. Where
    the policy is sure of most tokens, both kinds lie within the tolerance; so the server's are also
    taken for raw if they are less than half as far from the trainer's at temperature 1.

    Args:
        server: `[S]`, as the server gave them.
        trainer: `[S]`, of the trainer at the temperature of sampling, by the same weights.
        trainer_at_one: `[S]`, of the trainer at temperature 1.
        temperature: of sampling.
        tolerance: the highest mean distance.

    Returns:
        The mean distance of `server` and `trainer`.

    Raises:
        ValueError: the arrays are empty, or are not of the same tokens.
    """
    if not server.shape == trainer.shape == trainer_at_one.shape or not server.size:
        raise ValueError("log-probabilities of the same tokens are compared, of one at least.")
    distance, at_one = _distance(server, trainer), _distance(server, trainer_at_one)
    if at_one < distance / 2 and distance > _ROUNDING and at_one <= tolerance:
        raise InputError(
            f"the server gives raw log-probabilities: they are {distance:.3g} nats a token from "
            f"the trainer's at the temperature {temperature:g}, and {at_one:.3g} at 1; start vLLM "
            "with --logprobs-mode processed_logprobs (config.llm.server.publish=True does)."
        )
    if not distance <= tolerance:  # nor NaN
        raise InputError(
            f"the server's log-probabilities are {distance:.3g} nats a token from the trainer's, "
            f"more than {tolerance:g}; serve the model's folder that is trained, with its "
            "tokenizer, and sample by the version that was published last."
        )
    return distance


def check_adapted(server: np.ndarray, adapted: np.ndarray, plain: np.ndarray) -> None:
    """Refuses a server that leaves out the adapters that were handed over to it.

    Args:
        server: `[S]`, as the server gave them.
        adapted: `[S]`, of the trainer by the same adapters.
        plain: `[S]`, of the trainer without adapters.
    """
    distance, without = _distance(server, adapted), _distance(server, plain)
    if without < distance / 2 and distance > _ROUNDING:
        raise InputError(
            f"the server answers without the adapters that were handed over: it is {distance:.3g} "
            f"nats a token from the trainer with them, and {without:.3g} from the trainer without; "
            "use a vLLM that has LoRA for this model, or set config.sampling.engine to device."
        )


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).mean())
