"""Agents that answer a question by searching a corpus in several steps.

- ReAct (Yao et al., 2023) is one conversation: the planner's own replies, and after each search one
  line of the reader. It never sees a passage. After the last search it is asked for an answer from
  what the reader said.
- The planner of sub-questions sees in each step the question with the steps so far, and replies
  with a JSON object: ASK a sub-question, or STOP. A last call puts the answers together.
- Search-R1 (Jin et al., 2025) is one growing text, which the model continues after each search. It
  thinks between <think> tags and asks between <search> tags. What is found is put after that,
  between <information> tags, until the model writes its answer between <answer> tags. The text goes
  to the raw completions endpoint: the chat template is applied once, to the first prompt.
- Without a language model: one that follows decompositions, and one in a user's own code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

from qrag_jax.data.sample import Passage, Sample
from qrag_jax.environments import episode
from qrag_jax.environments.episode import Hop, Steps, Task, Unplayable, line_of
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Answer, ChatRequest, CompletionRequest, Failure, reads_by
from qrag_jax.llm.text.extraction import bare_line, last_object
from qrag_jax.llm.text.generation import Generation
from qrag_jax.llm.text.prompts import Messages, Prompt, harmless, one_line
from qrag_jax.metrics.answers import normalise
from qrag_jax.runtime import own_code
from qrag_jax.runtime.own_code import OwnCode


class Trail:
    """What an agent has done in one episode. What fails raises `Unplayable`."""

    def __init__(self) -> None:
        self.hops: list[Hop] = []  # the retrievals whose passages have been read
        self.searches = 0  # number of retrievals

    def ask(self, request: ChatRequest | CompletionRequest) -> Steps[Answer]:
        answer: Answer = yield from episode.ask(episode.Complete(request, shared=not self.searches))
        return answer

    def search(self, sub_query: str) -> Steps[tuple[Passage, ...]]:
        passages = yield from episode.ask(episode.Retrieve(sub_query, tuple(self.hops)))
        self.searches += 1
        return tuple(passages)


class SearchingAgent:
    """What all these agents are: `answer` plays the steps of one episode."""

    def answer(self, task: Task, trail: Trail) -> Steps[str]:
        """The answer. What cannot be played raises `Unplayable`."""
        raise NotImplementedError

    def play(self, task: Task) -> episode.Play:
        """One episode; it fails without a retrieval, since the retriever has no part in it."""
        trail = Trail()
        try:
            answer = yield from self.answer(task, trail)
            if not trail.searches:
                raise Unplayable(episode.NO_RETRIEVAL, "the model answered without a search.")
        except Unplayable as why:
            return episode.Failed(why.cause, str(why), history=tuple(trail.hops))
        return episode.Closed(answer, history=tuple(trail.hops))


def listed(hops: list[Hop]) -> str:
    """The hops as a model reads them, two lines each; "none" if there are none."""
    lines = [
        f"{number}. {one_line(hop.sub_query)}\n   {hop.status}: {one_line(hop.answer)}"
        for number, hop in enumerate(hops, 1)
    ]
    return "\n".join(lines) or "none"


def read_evidence(sub_query: str, said: str | Failure) -> Hop | None:
    """What a reader's reply says; None if it has no status and answer, or FOUND without one."""
    evidence = None if isinstance(said, Failure) else last_object(said, ("status", "answer"))
    if evidence is None:
        return None
    status = "_".join(str(evidence["status"]).upper().replace("-", " ").replace("_", " ").split())
    text = "" if evidence["answer"] is None else evidence["answer"]
    if isinstance(text, int | float) and not isinstance(text, bool):
        text = str(text)
    if status not in episode.STATUSES or not isinstance(text, str):
        return None
    text = one_line(text)
    if status == episode.FOUND and not text:
        return None
    return Hop(sub_query, text, status)


# ---------------------------------------------------------------- with a planner and a reader

# What a model might go on with after a search: the reader's line, which it has not seen.
STOP = ("\nObservation", "\nFOUND:", "\nNOT_FOUND:", "\nAMBIGUOUS:")
_ACTION = re.compile(
    r"^[ \t*_`#>-]*(search|(?:final )?answer)[ \t*_`]*[:：][ \t*_`]*", re.IGNORECASE | re.MULTILINE
)
_OF_READER = ("question", "passages")  # slots of its prompt
_malformed = partial(Failure, episode.MALFORMED_CALL)
_ENDLESS = _malformed("Your thinking did not end; think in fewer words.")
_not_searched = partial(Failure, episode.NO_RETRIEVAL)


class Move(NamedTuple):
    """What a reply asks for: a search, or else that the text is the answer."""

    text: str  # "": there is enough for an answer
    searches: bool
    said: str = ""  # the reply up to there


@dataclasses.dataclass(frozen=True)
class Asking(SearchingAgent):
    """Plays episodes in which a model asks one sub-query after the other.

    A second call of it says what the passages found answer to the bare sub-query: the history is
    the retriever's.
    """

    SLOTS: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]  # of the first two prompts
    EXTRA: ClassVar[Mapping[str, Any]] = {}  # further fields of the requests for a step
    planner: Prompt  # asks for a step
    final: Prompt  # asks for the answer at the limit
    reader: Prompt  # asks what passages say
    generation: Generation  # how replies are sampled
    max_hops: int  # most retrievals

    def __post_init__(self) -> None:
        prompts, slots = (self.planner, self.final, self.reader), (*self.SLOTS, _OF_READER)
        for prompt, names in zip(prompts, slots, strict=True):
            prompt.check(*names)

    def _asks(self, prompt: Prompt, question: str, hops: list[Hop]) -> Messages:
        every = {"question": question, "max_hops": str(self.max_hops)}
        every |= dict.fromkeys(("searches", "steps"), listed(hops))
        return prompt.fill({slot: every[slot] for slot in prompt.slots})

    def answer(self, task: Task, trail: Trail) -> Steps[str]:
        talk = self._asks(self.planner, task.question, [])
        while len(trail.hops) < self.max_hops:
            move = yield from self._move(trail, talk)
            if not move.searches and move.text:
                return move.text
            if not move.searches:
                break
            hop = yield from self._hop(trail, move.text)
            talk = self._next(task, trail, talk, move, hop)
        messages = self._asks(self.final, task.question, trail.hops)
        request = self.generation.request(messages, self.generation.reads_answer)
        answer = yield from trail.ask(request)
        return episode.usable(self.generation.final_answer(answer))

    def _hop(self, trail: Trail, sub_query: str) -> Steps[Hop]:
        """Searches, reads what is found, and adds the hop to the trail.

        A reply that cannot be read counts as AMBIGUOUS with the answer "".
        """
        passages = yield from trail.search(sub_query)
        lines = [f"[{number}] {line_of(passage)}" for number, passage in enumerate(passages, 1)]
        texts = {"question": sub_query, "passages": "\n".join(lines) or "none"}

        def read(answer: Answer) -> Hop | None:
            return read_evidence(sub_query, self.generation.said(answer))

        answer = yield from trail.ask(
            self.generation.request(self.reader.fill(texts), reads_by(read))
        )
        hop = read(answer) or Hop(sub_query, "", episode.AMBIGUOUS)
        trail.hops.append(hop)
        return hop

    def _move(self, trail: Trail, talk: Messages) -> Steps[Move]:
        """What the model's reply asks for; if it is wrong, the model is corrected once."""

        def read(answer: Answer) -> Move | Failure:
            said, cut_off = self.generation.said(answer), answer.finish_reason == "length"
            return _ENDLESS if isinstance(said, Failure) else self._read(trail, said, cut_off)

        for _ in range(2):
            request = self.generation.request(talk, reads_by(read), **self.EXTRA)
            answer = yield from trail.ask(request)
            move = read(answer)
            if isinstance(move, Move):
                return move
            wrong = move
            again = ("user", f"{wrong.message} Reply again.")
            talk = (*talk, ("assistant", harmless(answer.text)), again)
        raise Unplayable(wrong.cause, f"the model was corrected, and still: {wrong.message}")

    def _next(self, task: Task, trail: Trail, talk: Messages, move: Move, hop: Hop) -> Messages:
        """What the planner reads after a hop: all steps so far."""
        return self._asks(self.planner, task.question, trail.hops)

    def _read(self, trail: Trail, said: str, cut_off: bool) -> Move | Failure:
        """What a reply asks for, or what is wrong with it, which the model reads."""
        raise NotImplementedError


class ReAct(Asking):
    SLOTS = ("question", "max_hops"), ("question", "searches")
    EXTRA: ClassVar[Mapping[str, Any]] = {"stop": [*STOP]}

    def _next(self, task: Task, trail: Trail, talk: Messages, move: Move, hop: Hop) -> Messages:
        line = f"{hop.status}: {hop.answer}".rstrip()
        return (*talk, ("assistant", harmless(move.said)), ("user", harmless(line)))

    def _read(self, trail: Trail, said: str, cut_off: bool) -> Move | Failure:
        match = _ACTION.search(said)
        if match is None:
            return _malformed(
                'Your reply has no line that begins with "Search:" or "Answer:"; write one of them '
                "below your thought."
            )
        text, newline, _ = said[match.end() :].lstrip().partition("\n")
        searches = match[1].lower() == "search"
        name = "Search" if searches else "Answer"
        bare = bare_line(one_line(text))
        if not any(map(str.isalnum, bare)):
            return _malformed(f'There is nothing after "{name}:"; write it on the same line.')
        if cut_off and not newline:
            return _malformed(f"Your {name.lower()} was cut off; use fewer words.")
        if not searches and not trail.searches:
            return _not_searched("You have not searched yet; search once at least.")
        upto = said[: match.start()].strip()
        return Move(bare, searches, f"{upto}\n{name}: {bare}".strip())


class Planner(Asking):
    SLOTS = ("question", "steps", "max_hops"), ("question", "steps")

    def _read(self, trail: Trail, said: str, cut_off: bool) -> Move | Failure:
        """The sub-question, or the end; the strategy only makes the model think of other ways."""
        action_json = last_object(said, ("action",))
        if action_json is None:
            return _malformed('Your reply has no JSON object with an "action".')
        action = str(action_json["action"]).strip().upper()
        if action == "STOP":
            if trail.searches:
                return Move("", searches=False)
            return _not_searched("You have not asked anything yet; ASK once at least.")
        sub_query = action_json.get("sub_query")
        if action != "ASK":
            return _malformed('The "action" of your reply is neither ASK nor STOP.')
        if not isinstance(sub_query, str) or not any(map(str.isalnum, sub_query)):
            return _malformed('Your reply has no sub-question in "sub_query".')
        return Move(one_line(sub_query), searches=True)


# ---------------------------------------------------------------- Search-R1

TAGS = ("think", "search", "information", "answer")
R1_STOP = ("</search>", "</answer>")
_R1_ACTION = re.compile(r"<(search|answer)>((?:(?!</?(?:search|answer)>).)*)</\1>", re.DOTALL)
_OPEN = re.compile(r"<(search|answer)>(?:(?!</?(?:search|answer)>).)*\Z", re.DOTALL)
_TAG = re.compile(rf"</?(?:{'|'.join(TAGS)})>")

CORRECTION = (
    "\nThat was not a valid step. To search, I have to write a query between <search> and "
    "</search>. To answer, I have to write the answer between <answer> and </answer>. I will try "
    "once more.\n"
)
LAST = "\nI have no searches left, so I will now give my answer.\n<answer>"


class R1Turn(NamedTuple):
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
    """

    prompt: Prompt  # of one message, with the slot `question`
    # turns the messages into the text that the model continues (`generation`)
    chat_text: Callable[[Messages], str]
    generation: Generation  # how replies are sampled; `max_tokens` counts for each turn
    max_hops: int  # most retrievals; behind them the final answer is asked for
    max_turns: int  # most replies of the model before that, unusable ones included

    def __post_init__(self) -> None:
        self.prompt.check("question")

    def answer(self, task: Task, trail: Trail) -> Steps[str]:
        text = self.chat_text(self.prompt.fill({"question": task.question}))
        sub_query = thought = ""
        reads = reads_by(lambda answer: read_turn(answer).action or None)
        for _ in range(self.max_turns):
            request = self.generation.continuation(text, reads, stop=[*R1_STOP])
            turn = read_turn((yield from trail.ask(request)))
            thought = turn.thought or thought
            if turn.action == "answer":
                _note(trail, sub_query, thought)
                return turn.content
            if not turn.action:
                text += turn.text + CORRECTION
                continue
            _note(trail, sub_query, thought)
            if trail.searches == self.max_hops:
                text += turn.text[: turn.text.rindex("<search>")]
                break
            sub_query, thought = turn.content, ""
            passages = yield from trail.search(sub_query)
            text += f"{turn.text}\n\n<information>{informed(passages)}</information>\n\n"
        _note(trail, sub_query, thought)
        if not trail.searches:
            raise Unplayable(episode.MALFORMED_CALL, "no reply had a search or an answer.")
        request = self.generation.continuation(text + LAST, reads_by(forced), stop=[*R1_STOP[1:]])
        return episode.usable(forced((yield from trail.ask(request))))


def _note(trail: Trail, sub_query: str, thought: str) -> None:
    """Adds the last search as a hop, unless it is one already."""
    if len(trail.hops) < trail.searches:
        trail.hops.append(Hop(sub_query, thought))


def read_turn(answer: Answer) -> R1Turn:
    """Takes a reply apart at its first action.

    Servers leave out the closing tag at which they stopped; it is put back. A search or an answer
    that was cut off, or that is empty, is no action.
    """
    text = answer.text
    if answer.finish_reason == "stop" and (opened := _OPEN.search(text)):
        text += f"</{opened[1]}>"
    match = _R1_ACTION.search(text)
    if match is None or not any(map(str.isalnum, match[2])):
        return R1Turn(text, "", "", _thought(text))
    upto = text[: match.end()]
    return R1Turn(upto, match[1], one_line(match[2]), _thought(text[: match.start()]))


def informed(passages: tuple[Passage, ...]) -> str:
    """The passages as Search-R1's models know them: a line each, unable to end their place."""
    return "\n".join(
        f"Doc {number}(Title: {_inserted(passage.title)}) {_inserted(passage.text)}"
        for number, passage in enumerate(passages, 1)
    )


def forced(answer: Answer) -> str | Failure:
    """The answer in a reply to `LAST`."""
    text, closed, _ = answer.text.partition("</answer>")
    if answer.finish_reason == "length" and not closed:
        return Failure("cut_off", "the final answer was cut off; raise max_tokens.")
    said = _thought(text)
    if not any(map(str.isalnum, said)):
        return Failure("no_text", "there is no text to read an answer from.")
    return said


def _thought(text: str) -> str:
    return one_line(_TAG.sub(" ", text))


def _inserted(text: str) -> str:
    return one_line(harmless(text, TAGS))


# ---------------------------------------------------------------- without a language model
# The first asks the sub-questions that the data set's makers wrote, and it knows the right answer
# of each: "reading" means to look whether that answer stands in the passages. So it shows what a
# retriever learns, quickly and without a server, and not what an agent can do.
#
# The second is a Python generator that searches, by the path of its file:
#
#     def agent(question, max_searches):
#         passages = yield question                      # a search; it is sent a list of texts
#         name = first_name(passages)
#         passages = yield f"Where was {name} born?", name  # and what the search before it said
#         return first_place(passages)                   # the answer
#
# It yields the text to search for, or a pair of it and what the passages before say, which becomes
# part of the state that the query encoder reads. An episode in which it raises, searches too often,
# or gives something else fails: it has no reward, and is counted. It runs in this process: there is
# no sandbox.

PATH = "config.agent.path"
_TAKES = ("question", "max_searches")
_JOINED = re.compile(r"[-‐‑–—−/]")  # "French-American" says "French"


@dataclasses.dataclass(frozen=True)
class Scripted(SearchingAgent):
    """Plays episodes by the sub-questions of the data.

    A sub-question whose answer stands in the passages found has the status FOUND, else NOT_FOUND,
    and is asked again. If the retrievals are used up before all answers are found, the agent gives
    up with the answer "". Otherwise its answer is that of the last hop or, where the hops' answers
    are compared, the data's own.
    """

    # By the question's id; `data.loading` keeps no question without one, or with more than
    # `max_hops` hops.
    questions: Mapping[str, Sample]
    max_hops: int  # most retrievals

    def answer(self, task: Task, trail: Trail) -> Steps[str]:
        whole, answers = self.questions[task.id], list[str]()
        for hop in whole.hops:
            sub_query, reply = hop.filled(answers), ""
            while not reply:
                if trail.searches == self.max_hops:
                    return ""
                passages = yield from trail.search(sub_query)
                reply = named(hop.answers, map(line_of, passages))
                status = episode.FOUND if reply else episode.NOT_FOUND
                trail.hops.append(Hop(sub_query, reply, status))
            answers.append(reply)
        chained = normalise(answers[-1]) in map(normalise, whole.answers)
        return answers[-1] if chained else whole.answers[0]


def named(answers: Iterable[str], texts: Iterable[str]) -> str:
    """The first answer that one of the texts has as whole words, in normal form; else ""."""
    padded = [f" {_words(text)} " for text in texts]
    for answer in answers:
        words = _words(answer)
        if words and any(f" {words} " in text for text in padded):
            return answer
    return ""


def _words(text: str) -> str:
    return normalise(_JOINED.sub(" ", text))


@dataclasses.dataclass(frozen=True)
class OwnAgent(SearchingAgent):
    code: OwnCode
    max_hops: int  # most retrievals

    @classmethod
    def load(cls, path: str, max_hops: int) -> OwnAgent:
        code = own_code.load(path, PATH, _TAKES)
        if not inspect.isgeneratorfunction(code.function):
            raise InputError(f"{PATH} is {path}, which is no generator; yield the searches.")
        return cls(code, max_hops)

    def answer(self, task: Task, trail: Trail) -> Steps[str]:
        most, texts, last, ended = self.max_hops, None, "", False
        steps = self.code.function(question=task.question, max_searches=most)
        with contextlib.closing(steps):
            while True:
                try:
                    step = steps.send(texts)
                except StopIteration as end:
                    ended, step = True, end.value
                except (Exception, SystemExit) as error:
                    raise self._wrong(f"raised {own_code.reason_of(error)}") from error
                if ended and not isinstance(step, str):
                    raise self._wrong(f"returned {step!r:.60}, no text")
                # The answer is also what the last passages say.
                query, read = (step, step) if ended else self._asked(step)
                if trail.searches:
                    trail.hops.append(Hop(last, read))
                if ended:
                    return query
                if trail.searches == most:
                    raise self._wrong(f"searched more than {most} times (config.agent.max_hops)")
                last, passages = query, (yield from trail.search(query))
                texts = [*map(line_of, passages)]

    def _asked(self, step: Any) -> tuple[str, str]:
        """The text to search for, and what the passages before say."""
        query, read = step if isinstance(step, tuple) and len(step) == 2 else (step, "")
        if not isinstance(query, str) or not isinstance(read, str) or not query.strip():
            raise self._wrong(f"yielded {step!r:.60}, no text to search for")
        return query, read

    def _wrong(self, what: str) -> Unplayable:
        return Unplayable(episode.OWN_CODE, f"{self.code.spec} {what}.")
