"""The speech of a run whose policy is a language model: between its text and its ids."""

from __future__ import annotations

from qrag_jax.errors import InputError
from qrag_jax.llm.text.scaffolds import scaffold_of
from qrag_jax.models.first_language_model import FirstLanguageModel
from qrag_jax.rollouts.token_episodes import Speech
from qrag_jax.systems.token_config import TokenConfig


def speech_of(config: TokenConfig, model: FirstLanguageModel, turn: int) -> Speech:
    """Between the text and the ids of a model.

    Args:
        turn: most tokens that a turn may sample.

    Raises:
        InputError: the model has fewer positions than an episode may have tokens.
    """
    thinking = {"": None, "on": True, "off": False}[config.model.thinking]
    loaded, room = model.loaded, config.sampling.room
    if room > loaded.model.max_positions:
        raise InputError(
            f"config.sampling.room is {room}, but {model.folder} has "
            f"{loaded.model.max_positions} positions; lower it."
        )
    return Speech(loaded.tokenizer, scaffold_of(loaded.tokenizer, thinking=thinking), turn, room)
