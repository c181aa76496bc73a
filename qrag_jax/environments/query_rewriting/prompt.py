"""The one builder of the prompts that ask for a rewritten query, and what each prompt asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from qrag_jax.environments.query_rewriting.output import BARE, FORMS, TAGGED
from qrag_jax.environments.query_rewriting.task import RewriteTask
from qrag_jax.errors import InputError
from qrag_jax.llm.text.prompts import Messages, Prompt, one_line

_SECTION = "writing"
_SLOT = "query"


@dataclasses.dataclass(frozen=True, slots=True)
class PromptKind:
    """What a prompt asks for.

    Attributes:
        form: of the output, one of `output.FORMS`.
        boolean: whether it asks for AND, OR, NOT and parentheses. Then the search must obey them.
    """

    form: str
    boolean: bool = False


# Name of the package's prompt → what it asks for.
PROMPTS: Mapping[str, PromptKind] = MappingProxyType(
    {
        "rewrite_pico": PromptKind(TAGGED, boolean=True),
        "rewrite_boolean": PromptKind(TAGGED, boolean=True),
        "rewrite_bm25": PromptKind(TAGGED),
        "rewrite_dense": PromptKind(TAGGED),
        "rewrite_plain": PromptKind(BARE),
        "bare_rewrite": PromptKind(BARE),
    }
)


def prompt_kind(name: str, form: str = "", *, boolean: bool = False) -> PromptKind:
    """What the prompt asks for that a config names.

    Args:
        name: config.writing.prompt: a name in `PROMPTS`, or a file that ends in .txt.
        form: config.writing.form; a file needs it, and "" is the form of a named prompt.
        boolean: config.writing.boolean, for a file.
    """
    if name.endswith(".txt"):
        if form not in FORMS:
            raise InputError(
                f"config.{_SECTION}.form is {form!r}, and the prompt {name} does not tell what "
                f"its outputs look like; use one of {', '.join(FORMS)}."
            )
        return PromptKind(form, boolean)
    if name not in PROMPTS:
        raise InputError(
            f"config.{_SECTION}.prompt is {name!r}; use one of {', '.join(PROMPTS)}, or a .txt "
            "file."
        )
    kind = PROMPTS[name]
    if form not in ("", kind.form):
        raise InputError(
            f"config.{_SECTION}.form is {form!r}, and the prompt {name} asks for the form "
            f"{kind.form}; leave the field empty."
        )
    if boolean and not kind.boolean:
        raise InputError(
            f"config.{_SECTION}.boolean is True, and the prompt {name} asks for no Boolean query; "
            "set it to False, or use rewrite_boolean."
        )
    return kind


@dataclasses.dataclass(frozen=True)
class RewritePrompt:
    """Asks for the rewritten query of a task; it samples, trains and serves.

    A chat template is put around the messages elsewhere, once.

    Attributes:
        prompt: with the slot `query`.
    """

    prompt: Prompt

    def __post_init__(self) -> None:
        if self.prompt.slots != {_SLOT}:
            found = ", ".join(f"{{{slot}}}" for slot in sorted(self.prompt.slots)) or "none"
            raise InputError(
                f"{self.prompt.path} has the slots {found}; write {{{_SLOT}}}, and no other."
            )

    def messages(self, task: RewriteTask) -> Messages:
        """The conversation that asks for the query of a task; the original is on one line."""
        return self.prompt.fill({_SLOT: one_line(task.question)})
