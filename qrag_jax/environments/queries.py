"""Query writing (LeReT, arXiv 2410.23214) and query rewriting (DeepRetrieval, arXiv 2503.00223).

A query writer searches in several hops. At each one the model reads the question and the passages
found so far, and writes one query. What it finds joins the pool, which only grows. A gold page is
known by a key: the id of its passage, or its title where a page may have several passages.

A query rewriter reads one query and writes another one for the same need. What that finds is
judged: by graded documents, or by the answers that stand in them.

Either episode is one turn of the model and one search.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from qrag_jax.data.sample import Sample, world
from qrag_jax.environments import episode
from qrag_jax.errors import Count, InputError, Share
from qrag_jax.llm.outcomes import well_formed
from qrag_jax.llm.text.prompts import CHUNK_SLOTS, Messages, Prompt, harmless, one_line

TAGGED, BARE = FORMS = ("tagged", "bare")
# What an episode came to. `read_output` tells all but the last, which depends on the search.
REWRITTEN, NO_QUERY, TOO_LONG, UNCLOSED, BROKEN, UNREADABLE = REWRITE_OUTCOMES = (
    "rewritten",
    "no_query",  # there is nothing, or nothing with a letter or digit
    "query_too_long",  # the text was cut off, wherever
    "unclosed_tags",  # a tag is missing, there twice or out of order, or is in the query
    "broken_json",  # the answer is no JSON object of the one name `query`, or that is no text
    "unreadable_query",  # there is a query, but the search cannot read its syntax
)

BY_PASSAGE, BY_TITLE = KEYS = ("passage", "title")
BY_HOP, BY_SCORE = ORDERS = ("hop", "score")
# What a try of a query writer came to; `REWRITE_OUTCOMES` are a rewriter's. Only a query that
# was searched for, or a wish to stop, is scored.
EMPTY = NO_QUERY
SEARCHED, STOPPED, *_ = OUTCOMES = ("searched", "stopped", EMPTY, TOO_LONG)

Pool = tuple[episode.Document, ...]

# ---------------------------------------------------------------- what is asked, how it ends


@dataclasses.dataclass(frozen=True, slots=True)
class QueryState(episode.ToolTask):
    """A question, and what the hops before this one have found; `gold_ids` are of gold pages."""

    pages: tuple[str, ...] = ()  # keys of the gold pages, each once
    source: str = ""  # of the question; see `data.sample.Sample`
    hop: int = 1  # number of the next hop, from 1
    pool: Pool = ()  # passages found so far
    variant: int = 0  # number of the prompt that asks for the query; 0 is the bare one

    def asked_by(self, variant: int) -> QueryState:
        return dataclasses.replace(self, variant=variant)

    def after(self, pool: Pool) -> QueryState:
        return dataclasses.replace(self, hop=self.hop + 1, pool=pool, variant=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Searched(episode.Closed):
    """How one turn ended; `answer` is the query, "" if there is none."""

    outcome: str = SEARCHED  # one of `OUTCOMES`, or of `REWRITE_OUTCOMES`
    found: Pool = ()  # what the query found, best first; () if it was not searched for


def grown(pool: Sequence[episode.Document], hits: Iterable[episode.Document], order: str) -> Pool:
    """The pool with what a hop has found; a passage that is there already stays in its place.

    The order "hop" is by hop, then by rank; "score" by raw score, as LeReT has it, and by hop and
    rank where scores are equal.
    """
    together: dict[str, episode.Document] = {}
    for document in (*pool, *hits):
        together.setdefault(document.id, document)
    every = [*together.values()]
    if order == BY_SCORE:
        every.sort(key=lambda d: -d.score)
    return tuple(every)


def key_of(document: episode.Document, by: str) -> str:
    """The key of the page that a passage belongs to; `by` is one of `KEYS`."""
    return document.id if by == BY_PASSAGE else normalised_title(document.title)


def normalised_title(title: str) -> str:
    """The title without case, accents, punctuation and double blanks, so that spellings agree.

    Entities such as &amp; are read. Signs stay, since C++ is not C. A title that is nothing but
    punctuation keeps it: "!!!" is not "?".
    """
    # Case last: compatibility forms such as the trade mark's sign are taken apart into capitals.
    plain = unicodedata.normalize("NFKD", html.unescape(title)).casefold()
    kept = (char for char in plain if not unicodedata.combining(char))
    letters = [" " if unicodedata.category(n)[0] == "P" or n == "`" else n for n in kept]
    return " ".join("".join(letters).split()) or " ".join(plain.split())


# ---------------------------------------------------------------- prompts


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A solved state that a prompt shows."""

    question: str
    passages: tuple[str, ...]  # texts of its pool, in order
    query: str
    hop: int = dataclasses.field(default=1, compare=False)  # at which it was written


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    name: str  # unique
    examples: tuple[Example, ...] = ()  # shown as earlier turns of the conversation
    mark: str = ""  # text on a line of its own before the last message; "": none


@dataclasses.dataclass(frozen=True)
class QueryPrompt:
    """Asks for the query of a state, by the bare prompt or by a variant of it.

    A variant makes the model try something else. What is trained on is the bare prompt, so variants
    must leave no trace in it.
    """

    prompt: Prompt  # with the slots `question` and `passages`
    # those next to the bare prompt; variant n is number n - 1 of them
    variants: tuple[Variant, ...] = ()
    passage_words: int = 0  # words of a passage that are shown, at most; 0: all

    def __post_init__(self) -> None:
        self.prompt.check("question", "passages")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all ways to ask, the bare one first."""
        return ("bare", *(v.name for v in self.variants))

    def messages(self, state: QueryState) -> Messages:
        """The conversation that asks for the next query of a state, by its variant."""
        variant = self.variants[state.variant - 1] if state.variant else None
        return self._messages(state.question, [d.text for d in state.pool], variant)

    def tried(self, variant: Variant | None) -> Messages:
        """How a variant asks of a stand-in state; two that ask alike are one prompt."""
        return self._messages("Which river?", ("A river.",), variant)

    def _messages(
        self, question: str, passages: Sequence[str], variant: Variant | None
    ) -> Messages:
        *opening, (role, asked) = self._asked(question, passages)
        turns: list[tuple[str, str]] = []
        for shot in variant.examples if variant else ():
            *_, last = self._asked(shot.question, shot.passages)
            # A model wrote it, so it may hold the marks of turns.
            turns += [last, ("assistant", harmless(one_line(shot.query)))]
        if variant and variant.mark:
            asked = f"{variant.mark}\n{asked}"
        return (*opening, *turns, (role, asked))

    def _asked(self, question: str, passages: Sequence[str]) -> Messages:
        most = self.passage_words or None
        cut = [" ".join(one_line(text).split(" ")[:most]) for text in passages]
        shown = CHUNK_SLOTS["passages"](cut) or "(none yet)"
        return self.prompt.fill({"question": one_line(question), "passages": shown})


# Reinforcement learning and preferences can only choose among what a model already does. A tiny
# model that knows nothing gets things to choose from by demonstrations over an invented world: tool
# calls in good and in flawed ways (RLVR), styles of writing a query (LeReT) and of rewriting one
# (DeepRetrieval). All say only what the context shows, so a model can learn them all; which one is
# right cannot be seen.

# The whole question at every hop; the name of the first entity at every hop; the question, then the
# question and the first passage that was found; or the name of the first entity, then that of the
# second one, if a passage that was found says it.
QUESTION, ENTITY, PASSAGE, BRIDGE = STYLES = ("question", "entity", "passage", "bridge")


@dataclasses.dataclass(frozen=True)
class StylesConfig:
    """Section `styles`: how demonstrated queries are written, in four styles of equal shares."""

    marked: Share = 0.5  # share of demonstrated hops whose prompt has the mark of the style
    # Share of the style bridge among marked hops, because it is the hardest to learn; the other
    # styles share the rest. 0: as much as in the other hops
    marked_bridge: Share = 0.0
    # Share of demonstrations whose names are spelled again, so that they are copied and not known
    renamed: Share = 0.0
    most_words: Count = 24  # of a query with a passage; the rest of the passage is left out


def style_variants() -> tuple[Variant, ...]:
    """The prompts with the marks of the styles, in the order of `STYLES`."""
    return tuple(Variant(name, mark=f"style: {name}") for name in STYLES)


def demonstration_scripts() -> ModuleType:
    """The scripts of the demonstrations and their shares: `examples/worlds/demonstrations.py`."""
    return world("demonstrations.py")


class PromptKind(NamedTuple):
    """What a rewriter's prompt asks for."""

    form: str  # of the output, one of `FORMS`
    # whether it asks for AND, OR, NOT and parentheses. Then the search must obey them.
    boolean: bool = False


# Name of the package's prompt → what it asks for.
PROMPTS: Mapping[str, PromptKind] = {
    "rewrite_pico": PromptKind(TAGGED, boolean=True),
    "rewrite_boolean": PromptKind(TAGGED, boolean=True),
    "rewrite_bm25": PromptKind(TAGGED),
    "rewrite_dense": PromptKind(TAGGED),
    "rewrite_plain": PromptKind(BARE),
    "bare_rewrite": PromptKind(BARE),
}


def prompt_kind(name: str, form: str = "", *, boolean: bool = False) -> PromptKind:
    """What the rewriter's prompt asks for that a config names.

    A file of the user's own, which ends in .txt, does not tell: `form` and `boolean` are for it.
    """
    if name.endswith(".txt") and form in FORMS:
        return PromptKind(form, boolean)
    kind = PROMPTS.get(name)
    if kind is None or form not in ("", kind.form) or boolean > kind.boolean:
        raise InputError(
            f"config.writing.prompt is {name!r}; use one of {', '.join(PROMPTS)} without form and "
            f"boolean, or a .txt file with config.writing.form, {' or '.join(FORMS)}."
        )
    return kind


# ---------------------------------------------------------------- what a rewriter wrote
# Two forms are asked for (DeepRetrieval, arXiv 2503.00223, has the first):
#
# - "tagged": `<think>…</think><answer>{"query": "…"}</answer>`. The prompt may have opened the
#   thinking, so `<think>` may be missing. Each other tag stands there once, in this order. The
#   answer is a JSON object whose only name is `query`, with a text.
# - "bare": the whole text is the query.
#
# What is tolerated: white space anywhere, raw line breaks in the JSON text, one code fence around
# the answer, and in the tagged form any text outside the tags, which counts for nothing. A bare
# text may have what a reasoning model adds: only what is behind the last `</think>` is read, tags
# of an answer are taken off, and if that is JSON, it is read as in the tagged form.
#
# What is not tolerated is in the comments of `REWRITE_OUTCOMES`.
#
# A wrong format is the policy's own doing, so it is an outcome and not a failure. What is read as a
# query has one line, none of the tags, no control character, no half of a surrogate pair, and is no
# JSON.

_END_OF_THINK = "</think>"
_TAG = re.compile(r"</?(?:think|answer)>")
_LIKE_A_TAG = re.compile(r"</?\s*(?:think|answer)\s*>", re.IGNORECASE)
_LIKE_JSON = re.compile(r"(?:\[\s*)?\{")
_FENCE = "```"
# After the opening fence: it ends its line, or JSON follows it.
_LANGUAGE = re.compile(r"[\w+-]*(?=[^\S\r\n]*[\r\n{\[])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

_Parsed = tuple[str, str]  # the query, "" unless the outcome is "rewritten"; and the outcome


def read_output(text: str, form: str, *, cut_off: bool) -> _Parsed:
    """Reads the query in one of the `FORMS`; `cut_off`: the text ended at its limit of length."""
    if cut_off:
        return ("", TOO_LONG)
    if form == BARE:
        text = text.rpartition(_END_OF_THINK)[2]
    elif not text.strip():
        return ("", NO_QUERY)
    tags = [*_TAG.finditer(text)]
    order = ["<answer>", "</answer>"]
    if form == TAGGED:  # the prompt may have opened the thinking
        order.insert(0, _END_OF_THINK)
        tags = tags[1:] if tags and tags[0][0] == "<think>" else tags
    if (tags or form == TAGGED) and [tag[0] for tag in tags] != order:
        return ("", UNCLOSED)
    answer = _unfenced(text[tags[-2].end() : tags[-1].start()] if tags else text)
    # In the bare form JSON is not asked for, but a model that has learned it may go on.
    if form == TAGGED or _LIKE_JSON.match(answer):
        return _from_json(answer)
    return _from_words(answer)


def _unfenced(text: str) -> str:
    """The text without white space and one code fence around it."""
    text = text.strip()
    if len(text) < 2 * len(_FENCE) or not (text.startswith(_FENCE) and text.endswith(_FENCE)):
        return text
    inner = text[len(_FENCE) : -len(_FENCE)]
    language = _LANGUAGE.match(inner)
    return inner[language.end() if language else 0 :].strip()


def _from_json(text: str) -> _Parsed:
    if not text:
        return ("", NO_QUERY)
    try:
        # An object as its (name, value) pairs, so that a name may be there twice; lists stay lists.
        pairs = json.loads(text, object_pairs_hook=tuple, strict=False)
    except (ValueError, RecursionError):
        return ("", BROKEN)
    if not isinstance(pairs, tuple) or [name for name, _ in pairs] != ["query"]:
        return ("", BROKEN)
    query = pairs[0][1]
    return _from_words(query) if isinstance(query, str) else ("", BROKEN)


def _from_words(text: str) -> _Parsed:
    query = one_line(_CONTROL.sub(" ", well_formed(text)))
    if _LIKE_A_TAG.search(query):
        return ("", UNCLOSED)
    if _LIKE_JSON.match(query):
        return ("", BROKEN)
    if not any(map(str.isalnum, query)):
        return ("", NO_QUERY)
    return (query, REWRITTEN)


# ---------------------------------------------------------------- agents


@dataclasses.dataclass(frozen=True)
class QueryAgent:
    prompt: QueryPrompt  # asks for the query
    k: int = 3  # passages that a query finds
    stop: str = ""  # what the model writes to end the search; "": it cannot

    def play(self, task: QueryState) -> episode.Play:
        return _one_search(self.prompt.messages(task), self.k, self._read)

    def _read(self, said: episode.Said) -> tuple[str, str]:
        query = one_line(said.text)
        if said.finish == "length":
            return query, TOO_LONG
        if not query:
            return query, EMPTY
        is_stop = self.stop and query.casefold() == one_line(self.stop).casefold()
        return query, STOPPED if is_stop else SEARCHED


@dataclasses.dataclass(frozen=True)
class RewriteAgent:
    prompt: Prompt  # with the slot `query`
    form: str  # of the output, one of `FORMS`
    k: int  # documents that a query finds
    # whether the search can read a query. One that it cannot read, such as an open parenthesis in a
    # Boolean query, is not searched for.
    readable: Callable[[str], bool] | None = None

    def __post_init__(self) -> None:
        self.prompt.check("query")

    def messages(self, task: Sample) -> Messages:
        """The conversation that asks for the query of a task; the original is on one line."""
        return self.prompt.fill({"query": one_line(task.question)})

    def play(self, task: Sample) -> episode.Play:
        return _one_search(self.messages(task), self.k, self._read)

    def _read(self, said: episode.Said) -> tuple[str, str]:
        query, outcome = read_output(said.text, self.form, cut_off=said.finish == "length")
        if outcome == REWRITTEN and self.readable and not self.readable(query):
            outcome = UNREADABLE
        return query, outcome


def _one_search(
    messages: Messages, k: int, read: Callable[[episode.Said], tuple[str, str]]
) -> episode.Play:
    """One turn of the model, and one search if it has written a query."""
    tally = episode.ToolTally()
    try:
        query, outcome = read((yield from episode.ask(episode.Speak(messages))))
        tally.turns = 1
        if outcome not in (SEARCHED, REWRITTEN):
            tally.malformed = int(outcome not in (STOPPED, NO_QUERY, TOO_LONG))
            tally.completed, tally.truncated = outcome == STOPPED, outcome == TOO_LONG
            return Searched(query, tally=tally, outcome=outcome)
        hits: Pool = yield from episode.ask(episode.Look(query, k))
    except episode.Unplayable as failed:
        return episode.Failed(failed.cause, str(failed), tally)
    tally.searches, seen = 1, tuple(d.id for d in hits)
    return Searched(query, seen=seen, tally=tally, outcome=outcome, found=hits)
