"""Search-R1 (Jin et al., 2025): one growing text, which the model continues after each search.

The model thinks between <think> tags and asks between <search> tags. What is found is put after
that, between <information> tags, until the model writes its answer between <answer> tags. The text
goes to the raw completions endpoint: the chat template is applied once, to the first prompt, by
`chat_text` here, and never again by the server.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

from qrag_jax.environments.episode import (
    MALFORMED_CALL,
    Hop,
    Limits,
    Reply,
    Seen,
    Step,
    Task,
    Unplayable,
)
from qrag_jax.environments.rag.trail import SearchingAgent, Trail
from qrag_jax.llm.outcomes import READ, UNREAD, Answer, CompletionRequest
from qrag_jax.llm.text.extraction import NoAnswer
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Messages, Prompt, harmless, one_line

TAGS = ("think", "search", "information", "answer")
STOP = ("</search>", "</answer>")
_ACTION = re.compile(r"<(search|answer)>((?:(?!</?(?:search|answer)>).)*)</\1>", re.DOTALL)
_OPEN = re.compile(r"<(search|answer)>(?:(?!</?(?:search|answer)>).)*\Z", re.DOTALL)
_TAG = re.compile(rf"</?(?:{'|'.join(TAGS)})>")

CORRECTION = (
    "\nThat was not a valid step. To search, I have to write a query between <search> and "
    "</search>. To answer, I have to write the answer between <answer> and </answer>. I will try "
    "once more.\n"
)
LAST = "\nI have no searches left, so I will now give my answer.\n<answer>"


class Turn(NamedTuple):
    """One reply of the model."""

    text: str  # the reply up to the end of its action; all of it if it has none
    action: str  # "search", "answer" or ""
    content: str  # what stands between the action's tags
    thought: str  # the text before the action, without tags


@dataclasses.dataclass(frozen=True)
class SearchR1(SearchingAgent):
    """Plays episodes of one growing text.

    The history's answer of a hop is what the model thought of that hop's passages, that is, in its
    next reply: each search is made with the evidence of all hops before it. A reply without a
    search or an answer is followed by a correction, and takes one of the turns. At the limit the
    answer is forced: the text goes on with an opened <answer>.

    Attributes:
        prompt: of one message, with the slot `question`.
        chat_text: turns the messages into the text that the model continues (`generation`).
        generation: how replies are sampled; `max_tokens` counts for each turn.
        limits: both count.
        extra: further fields of the requests, such as `chat_text.HAS_SPECIAL_TOKENS`.
    """

    prompt: Prompt
    chat_text: Callable[[Messages], str]
    generation: Generation
    limits: Limits = dataclasses.field(default_factory=Limits)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt.fill({"question": ""})

    def answer(self, task: Task, trail: Trail) -> Generator[Step, Reply, str]:
        """See `SearchingAgent`."""
        text = self.chat_text(self.prompt.fill({"question": task.question}))
        sub_query = thought = ""
        for _ in range(self.limits.max_turns):
            turn = read((yield from trail.ask(self._request(text, STOP, _reads_turn))))
            thought = turn.thought or thought
            if turn.action == "answer":
                _note(trail, sub_query, thought)
                return turn.content
            if not turn.action:
                text += turn.text + CORRECTION
                continue
            _note(trail, sub_query, thought)
            if trail.searches == self.limits.max_hops:
                text += turn.text[: turn.text.rindex("<search>")]
                break
            sub_query, thought = turn.content, ""
            passages = yield from trail.search(sub_query)
            text += f"{turn.text}\n\n<information>{informed(passages)}</information>\n\n"
        _note(trail, sub_query, thought)
        if not trail.searches:
            raise Unplayable(MALFORMED_CALL, "no reply of the model had a search or an answer.")
        request = self._request(text + LAST, STOP[1:], _reads_forced)
        return (yield from trail.final_answer(request, forced))

    def _request(
        self, text: str, stop: tuple[str, ...], reads: Callable[[Answer], str]
    ) -> CompletionRequest:
        of = self.generation
        return CompletionRequest(
            text,
            temperature=of.temperature,
            max_tokens=of.max_tokens,
            top_p=of.top_p,
            seed=of.seed,
            extra={**self.extra, "stop": list(stop)},
            reads=reads,
        )


def _note(trail: Trail, sub_query: str, thought: str) -> None:
    """Adds the last search as a hop, unless it is one already."""
    if len(trail.hops) < trail.searches:
        trail.hops.append(Hop(sub_query, thought))


def read(answer: Answer) -> Turn:
    """Takes a reply apart at its first action.

    Servers leave out the closing tag at which they stopped; it is put back. A search or an answer
    that was cut off, or that is empty, is no action.
    """
    text = answer.text
    if answer.finish_reason == "stop" and (opened := _OPEN.search(text)):
        text += f"</{opened[1]}>"
    found = _ACTION.search(text)
    if found is None or not any(map(str.isalnum, found[2])):
        return Turn(text, "", "", _thought(text))
    upto = text[: found.end()]
    return Turn(upto, found[1], one_line(found[2]), _thought(text[: found.start()]))


def informed(passages: tuple[Seen, ...]) -> str:
    """The passages as Search-R1's models know them: a line each, unable to end their place."""
    return "\n".join(
        f"Doc {number}(Title: {_inserted(passage.title)}) {_inserted(passage.text)}"
        for number, passage in enumerate(passages, 1)
    )


def forced(answer: Answer) -> str | NoAnswer:
    """The answer in a reply to `LAST`."""
    text, closed, _ = answer.text.partition("</answer>")
    if answer.finish_reason == "length" and not closed:
        return NoAnswer("cut_off", "the final answer was cut off; raise max_tokens.")
    said = _thought(text)
    if not any(map(str.isalnum, said)):
        return NoAnswer("no_text", "there is no text to read an answer from.")
    return said


def _reads_turn(answer: Answer) -> str:
    return READ if read(answer).action else UNREAD


def _reads_forced(answer: Answer) -> str:
    return UNREAD if isinstance(forced(answer), NoAnswer) else READ


def _thought(text: str) -> str:
    return one_line(_TAG.sub(" ", text))


def _inserted(text: str) -> str:
    return one_line(harmless(text, TAGS))
