"""The agents that a HARR config can name, put together from their prompts and limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qrag_jax.environments.rag.episode import Agent
from qrag_jax.environments.rag.planner import Planner
from qrag_jax.environments.rag.react import ReAct
from qrag_jax.environments.rag.reading import Reader
from qrag_jax.environments.rag.scripted import Scripted
from qrag_jax.environments.rag.search_r1 import SearchR1
from qrag_jax.errors import InputError
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.chat_text import HAS_SPECIAL_TOKENS, chat_tokenizer, in_template, templated
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Messages, Prompt
from qrag_jax.systems.harr_config import (
    OWN,
    PLANNER,
    REACT,
    SCRIPTED,
    SEARCH_R1,
    AgentConfig,
    HarrConfig,
)
from qrag_jax.systems.harr_inputs import Asked

# The prompts of each agent, by its arguments' names.
PROMPTS: Mapping[str, dict[str, str]] = {
    SCRIPTED: {},
    OWN: {},
    REACT: {"planner": "rag_planner", "final": "rag_final", "reader": "rag_qa"},
    PLANNER: {"steps": "rag_steps", "synthesis": "rag_synthesis", "reader": "rag_qa"},
    SEARCH_R1: {"prompt": "rag_search_r1"},
}


def load_prompts(config: AgentConfig) -> dict[str, Prompt]:
    """The agent's prompts; those in the folder `config.prompts` replace ours of the same name."""
    wanted, folder = PROMPTS[config.name], config.prompts
    paths = {name: Path(folder).expanduser() / f"{file}.txt" for name, file in wanted.items()}
    own = {name: str(path) for name, path in paths.items() if folder and path.exists()}
    if folder and not own:
        files = ", ".join(f"{file}.txt" for file in wanted.values()) or "no prompts"
        raise InputError(
            f"config.agent.prompts: {folder} has none of the prompts of the {config.name} agent "
            f"({files}); name the files so, or leave the field empty."
        )
    return {name: prompts.load(own.get(name, file)) for name, file in wanted.items()}


def llm_agent(config: HarrConfig, generation: Generation) -> Agent:
    """The agent with a language model that the config names."""
    agent = config.agent
    loaded: dict[str, Any] = load_prompts(agent)
    if "reader" in loaded:
        loaded["reader"] = Reader(loaded["reader"], generation)
    if agent.name == SEARCH_R1:
        extra = {} if agent.chat_template else HAS_SPECIAL_TOKENS
        return SearchR1(
            **loaded,
            chat_text=_chat_text(config, generation),
            generation=generation,
            limits=agent.limits,
            extra=extra,
        )
    if agent.name == PLANNER:
        return Planner(**loaded, generation=generation, limits=agent.limits)
    return ReAct(**loaded, generation=generation, limits=agent.limits)


def scripted_agent(config: AgentConfig, questions: Sequence[Asked]) -> Scripted:
    """The agent that follows the data's own decompositions."""
    apart = {each.gold.id: each.question.decomposition for each in questions}
    known = {name: each for name, each in apart.items() if each is not None}
    return Scripted(known, config.limits)


def _chat_text(config: HarrConfig, generation: Generation) -> Callable[[Messages], str]:
    """How the first prompt becomes the text that the model continues."""
    llm = config.llm
    assert llm is not None
    if config.agent.chat_template:
        return in_template(config.agent.chat_template)
    tokenizer = llm.tokenizer or (llm.server.model if llm.server is not None else "")
    if not tokenizer:
        raise InputError(
            "the search_r1 agent sends a text, for which it needs the model's chat template: give "
            "its folder in config.llm.tokenizer, or the template in config.agent.chat_template."
        )
    return templated(chat_tokenizer(tokenizer), generation.enable_thinking)
