"""Scripts of demonstrations over the invented world, which systems imitate before they explore.

What they do, and in which style, is drawn by the shares in this file; those of a decision sum to 1.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from examples.worlds.scripts import BridgePassage, BridgeQuestion, TalkativeQuestion, renaming
from examples.worlds.sentences import content_words, draw_dropped, words_of
from qrag_jax.data.sample import Draw, Sample
from qrag_jax.environments.episode import Agent, Look, Open, Reply, Said, Speak, ToolTally, ToolTask
from qrag_jax.environments.queries import (
    BRIDGE,
    BY_HOP,
    PASSAGE,
    QUESTION,
    REWRITTEN,
    STYLES,
    Pool,
    QueryPrompt,
    QueryState,
    Searched,
    StylesConfig,
    grown,
    style_variants,
)
from qrag_jax.environments.tasks import bridge_task
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text.prompts import Messages, one_line
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, write_call
from qrag_jax.retrieval.index_folder import BM25
from qrag_jax.retrieval.own_documents import OwnRetriever
from qrag_jax.rollouts.libraries import CorpusLibrary, OwnLibrary, states_on
from qrag_jax.rollouts.token_episodes import Episode, Library, Speech, Talk, encoded, read

# Streams of `Draw`; 0 and 1 draw the questions of the two splits, 4 draws few-shot prompts, and 12
# and 13 draw talkative questions.
_TOOLS, _STYLES, _RENAMING, _REWRITING = 2, 3, 5, 14
_FINE = 1 << 53


def _point(draw: Draw) -> float:
    """A point in [0, 1); one number of the draw is used."""
    return draw.below(_FINE) / _FINE


def _at(shares: Mapping[str, float], point: float) -> str:
    """The name whose part of [0, 1) has this point; the parts lie in the order of the names."""
    possible = [name for name, share in shares.items() if share > 0]
    for name in possible[:-1]:
        point -= shares[name]
        if point < 0:
            return name
    return possible[-1]


# ---------------------------------------------------------------- tool calls

# What a demonstration does, by decision.
DECISIONS: Mapping[str, Mapping[str, float]] = {
    # The first query is the first entity's name, the question, or the words of both relations;
    "search": {"search_entity": 0.6, "search_question": 0.2, "search_relations": 0.2},
    # then the bridge's name with the second relation is searched for, the first query once more, or
    # nothing;
    "then": {"then_bridge": 0.4, "then_again": 0.2, "then_answer": 0.4},
    # the answer is what the passage gives for the second relation, or another name in it;
    "answer": {"answer_right": 0.7, "answer_other": 0.3},
    # cited are the supporting passages among those shown, all shown, or none.
    "cite": {"cite_right": 1 / 3, "cite_all": 1 / 3, "cite_none": 1 / 3},
}
REASONING = "The passages say so."  # of every demonstration
_SHOWN = re.compile(r"^Document ID: (.+)$", re.MULTILINE)


class Choices(NamedTuple):
    """What one episode does for each of the `DECISIONS`.

    `luck`, in [0, 1), picks a name where any will do.
    """

    search: str
    then: str
    answer: str
    cite: str
    luck: float


def draw_choices(seed: int, index: int) -> Choices:
    """The choices of episode `index`, from 0; they depend on the arguments only."""
    draw = Draw(seed, _TOOLS, index)
    chosen = {name: _at(shares, _point(draw)) for name, shares in DECISIONS.items()}
    return Choices(**chosen, luck=_point(draw))


@dataclasses.dataclass(frozen=True, slots=True)
class Demonstration:
    """Plays one episode of a question: a first search, perhaps a second one, and the answer.

    It knows the question's names and reads passages by script, but only those that the environment
    has shown. So it also reads a wrong passage, as if it were the right one.
    """

    question: BridgeQuestion  # what is asked
    choices: Choices  # see `draw_choices`
    form: str = HERMES  # how tool calls are written, one of `tool_calls.FORMATS`

    def say(self, shown: Sequence[str]) -> str:
        """The text of the next turn, which is one tool call.

        Args:
            shown: the texts of all tool results so far, one for each turn, oldest first.
        """
        known = {passage.id: passage for passage in self.question.passages}
        results = [[known[n] for n in _SHOWN.findall(text) if n in known] for text in shown]
        if len(results) > 1 or (results and self.choices.then == "then_answer"):
            return self._complete(results)
        query = {
            "search_entity": self.question.entity,
            "search_question": self.question.question,
            "search_relations": " ".join(self.question.relations),
        }[self.choices.search]
        if results and results[0] and self.choices.then != "then_again":
            first = results[0]
            bridge = _said(first, 0) or self._any(first[0].names[1:] or first[0].names)
            query = f"{bridge} {self.question.relations[1]}"
        return self._call("retrieve_documents", query=query)

    def _answer(self, results: Sequence[Sequence[BridgePassage]]) -> str:
        """From the last result that has passages; the entity's name where there are none."""
        result = next((result for result in reversed(results) if result), ())
        if not result:
            return self.question.entity
        right = _said(result, 1)
        if right and self.choices.answer == "answer_right":
            return right
        hit = next((passage for passage in result if passage.said[1]), result[0])
        return self._any([name for name in hit.names if name != right])

    def _complete(self, results: Sequence[Sequence[BridgePassage]]) -> str:
        seen = dict.fromkeys(passage for result in results for passage in result)
        cites = {"cite_right": lambda p: p.is_supporting, "cite_all": lambda p: True}
        cited = [p.id for p in seen if cites.get(self.choices.cite, lambda p: False)(p)]
        answer = self._answer(results)
        return self._call("complete", reasoning=REASONING, final_answer=answer, cited_doc_ids=cited)

    def _call(self, tool: str, **arguments: Any) -> str:
        return write_call(ToolCall(tool, arguments), self.form)

    def _any(self, names: Sequence[str]) -> str:
        return names[int(self.choices.luck * len(names))]


def _said(result: Sequence[BridgePassage], hop: int) -> str:
    """What the best passage that says something for the hop's relation says; "": none does."""
    return next((passage.said[hop] for passage in result if passage.said[hop]), "")


# ---------------------------------------------------------------- styles of writing a query

SHARES = dict.fromkeys(STYLES, 0.25)
# Queries → what each finds, best first.
Search = Callable[[Sequence[str]], Sequence[Pool | Failure]]


class Style(NamedTuple):
    """How a hop is written: the style's name, and whether the prompt has the style's mark.

    The marks do what few-shot prompts do for large models, and the bare prompt is the mixture.
    """

    name: str
    marked: bool

    @property
    def variant(self) -> int:
        """The number of its prompt, where `style_variants` are the variants."""
        return STYLES.index(self.name) + 1 if self.marked else 0


def draw_styles(config: StylesConfig, seed: int, index: int, hops: int) -> tuple[Style, ...]:
    """The styles of the hops of demonstration `index`, from 0, by the arguments alone."""
    draw, marked_shares = Draw(seed, _STYLES, index), SHARES
    if config.marked_bridge:
        scale = (1 - config.marked_bridge) / (1 - SHARES[BRIDGE])
        marked_shares = {name: share * scale for name, share in SHARES.items()}
        marked_shares[BRIDGE] = config.marked_bridge

    def drawn() -> Style:
        point, marked = _point(draw), draw.chance(config.marked)
        return Style(_at(marked_shares if marked else SHARES, point), marked)

    # Each hop draws its own style. The passages that it shows are those that the queries before it
    # have found. If styles kept to themselves, these would give the style away: a name finds fewer
    # passages than a question.
    return tuple(drawn() for _ in range(hops))


def styled_query(
    style: str,
    state: QueryState,
    question: BridgeQuestion,
    most_words: int = StylesConfig.most_words,
) -> str:
    """The query of a state of this question in a style; it says only what the state shows."""
    if style == QUESTION or (style == PASSAGE and not state.pool):
        return one_line(question.question)
    if style == PASSAGE:
        words = f"{question.question} {state.pool[0].text}".split()
        # A document begins with a heading, whose mark is no word.
        return " ".join([word for word in words if word != "#"][:most_words])
    first, _ = question.supporting
    if style == BRIDGE and state.hop > 1:
        for passage in state.pool:
            # Ids differ from corpus to corpus. Another question may have a passage of this title.
            if passage.title == first.title and first.text in passage.text:
                return first.said[0]
    return question.entity


class Start(NamedTuple):
    state: QueryState  # of the first hop
    question: BridgeQuestion  # the same question, with all that a script knows of it
    styles: tuple[Style, ...]  # of its hops, as many as are played


class Written(NamedTuple):
    state: QueryState  # what the query was written for, with the number of its prompt
    query: str  # what is imitated
    found: Pool  # what it found


def play_styled(
    search: Search,
    starts: Sequence[Start],
    order: str = BY_HOP,
    most_words: int = StylesConfig.most_words,
) -> list[tuple[Written, ...]]:
    """The hops of each demonstration, in the places of their starts.

    All are played side by side, with one call of the search for each hop. A search that fails ends
    its demonstration with the hop before, so it has fewer hops than styles.

    Args:
        order: of the pool, one of `queries.ORDERS`.
        most_words: see `StylesConfig`.
    """
    played: list[list[Written]] = [[] for _ in starts]
    going = dict(enumerate(starts))
    while going := {place: start for place, start in going.items() if start.styles}:
        queries = [
            styled_query(start.styles[0].name, start.state, start.question, most_words)
            for start in going.values()
        ]
        asked = zip([*going.items()], queries, search(queries), strict=True)
        for (place, start), query, hits in asked:
            if isinstance(hits, Failure):
                del going[place]
                continue
            state, (style, *left) = start.state, start.styles
            played[place].append(Written(state.asked_by(style.variant), query, hits))
            after = state.after(grown(state.pool, hits, order))
            going[place] = start._replace(state=after, styles=tuple(left))
    return [tuple(hops) for hops in played]


def draw_renamed(
    config: StylesConfig, seed: int, index: int, hops: Sequence[Written]
) -> tuple[Written, ...]:
    """The hops of demonstration `index`, in its share of cases with names spelled anew.

    The question, the passages and the queries have the same new names; ids stay.
    """
    draw = Draw(seed, _RENAMING, index)
    if not draw.chance(config.renamed):
        return tuple(hops)
    new = renaming(draw)

    def pool(hits: Pool) -> Pool:
        return tuple(hit._replace(title=new(hit.title), text=new(hit.text)) for hit in hits)

    def hop(written: Written) -> Written:
        state, question = written.state, new(written.state.question)
        state = dataclasses.replace(state, question=question, pool=pool(state.pool))
        return Written(state, new(written.query), pool(written.found))

    return tuple(map(hop, hops))


# ---------------------------------------------------------------- styles of rewriting a query

_KEPT = 0.6  # share of the words that the style some_words keeps
# The question as it is; its words without function words; a random 60 % of its words, in their
# order; the name of the entity, and the words by which it is asked about; the name, and what is
# said of it, of one clause about somebody else.
REWRITE_STYLES = dict.fromkeys(
    ("copy", "no_stop_words", "some_words", "entity", "wrong_clause"), 0.2
)


def draw_rewriting(seed: int, index: int, question: TalkativeQuestion) -> tuple[str, str]:
    """The style of demonstration `index`, from 0, and a rewriting in it."""
    draw = Draw(seed, _REWRITING, index)
    style, text = _at(REWRITE_STYLES, _point(draw)), question.question
    if style == "no_stop_words":
        text = " ".join(content_words(text))
    elif style == "some_words":
        words = words_of(text)
        kept = draw.shuffled(range(len(words)))[: max(round(_KEPT * len(words)), 1)]
        text = " ".join(words[place] for place in sorted(kept))
    elif style == "entity":
        text = f"{question.entity} {question.relation}"
    elif style == "wrong_clause":
        clause = draw.choice(question.clauses)
        text = f"{clause.name} {clause.words}"
    return style, text


# ---------------------------------------------------------------- what the systems imitate
# A script has a length, the number of its questions. `episodes` gives demonstrations `first`,
# `first` + 1 and so on, of questions of these numbers, each with its number; `talks` those on which
# a tiny model's tokenizer is trained. All depend on the arguments only.


def scripted_talk(agent: Agent, task: ToolTask, script: Demonstration, library: Library) -> Talk:
    """`script.say` gives the text of the next turn, from the texts of all tool results so far."""
    play, shown = agent.play(task), list[str]()
    turns: list[tuple[Messages, str]] = []
    step = next(play)
    while True:
        if isinstance(step, Speak):
            if turns:  # the first messages are the prompt
                shown += [text for _, text in step.messages]
            turns.append((step.messages, script.say(shown)))
            reply: Reply = Said(turns[-1][1], "stop")
        else:
            assert isinstance(step, Look | Open)
            (reply,) = read(library, [(task, step)])
        try:
            step = play.send(reply)
        except StopIteration as end:
            return Talk(end.value, tuple(turns))


def styled_episode(hop: Written, prompt: QueryPrompt, speech: Speech) -> Episode:
    """A hop of a demonstration as an episode of one turn: its prompt, its query, the stop.

    `prompt` has `style_variants`, which the numbers of prompts mean.
    """
    seen, tally = tuple(passage.id for passage in hop.found), ToolTally(turns=1, searches=1)
    ended = Searched(answer=hop.query, seen=seen, tally=tally, found=hop.found)
    try:
        episode = encoded(Talk(ended, ((prompt.messages(hop.state), hop.query),)), speech)
    except ValueError as error:
        raise InputError(
            f"a demonstration of question {hop.state.id!r} does not fit ({error}); raise "
            "config.sampling.room, or show fewer words of passages."
        ) from None
    ((turn,),) = episode.segments
    if len(turn.sampled) > speech.turn:
        raise InputError(
            f"a demonstrated query has {len(turn.sampled)} tokens, and a turn may sample "
            f"{speech.turn}; raise that number, or lower config.styles.most_words."
        )
    return episode


class _OneByOne:
    """A script whose demonstrations are played one after the other, each by its `talk`."""

    def episodes(
        self: Any, config: Any, inputs: Any, numbers: Sequence[int], first: int
    ) -> Iterator[tuple[int, Episode]]:
        for index, number in enumerate(numbers, first):
            talk = self.talk(config, inputs.agent, inputs.library, number, index)
            yield number, encoded(talk, inputs.speech)


@dataclasses.dataclass(frozen=True)
class ToolScript(_OneByOne):
    """Of RLVR: questions are answered with tools."""

    questions: Sequence[BridgeQuestion]

    def __len__(self) -> int:
        return len(self.questions)

    def talk(self, config: Any, agent: Any, library: Library, number: int, index: int) -> Talk:
        """Demonstration `index`, of question `number`."""
        question, choices = self.questions[number], draw_choices(config.seed, index)
        script = Demonstration(question, choices, config.tools.form)
        return scripted_talk(agent, bridge_task(question), script, library)

    def talks(self, config: Any, agent: Any) -> Iterator[Talk]:
        library = OwnLibrary(OwnRetriever(BM25))
        for number in range(min(600, len(self))):
            yield self.talk(config, agent, library, number, number)


@dataclasses.dataclass(frozen=True)
class QueryScript:
    """Of LeReT: queries are written in styles, hop by hop."""

    library: CorpusLibrary  # what they search
    # The questions, and what the script knows of them: all of the corpus, so more than those that
    # are tried, because a model that sees few names often learns them by heart, and not to copy.
    # (To see none twice was worse: names were copied later.)
    demonstrated: Sequence[tuple[QueryState, BridgeQuestion]]
    # The bare one and those with the marks of the styles, whatever tries are asked by
    prompt: QueryPrompt

    @classmethod
    def of(
        cls,
        questions: Sequence[BridgeQuestion],
        library: CorpusLibrary,
        gold_by: str,
        prompt: QueryPrompt,
    ) -> QueryScript:
        by_id = {question.id: question for question in questions}
        known = states_on([question.query for question in questions], library.corpus, gold_by)
        styled = dataclasses.replace(prompt, variants=style_variants())
        return cls(library, [(state, by_id[state.id]) for state in known], styled)

    def __len__(self) -> int:
        return len(self.demonstrated)

    def episodes(
        self, config: Any, inputs: Any, numbers: Sequence[int], first: int
    ) -> Iterator[tuple[int, Episode]]:
        """Each hop is an episode of its own."""
        played = zip(numbers, self._played(config, numbers, first), strict=True)
        for index, (number, hops) in enumerate(played, first):
            for hop in draw_renamed(config.styles, config.seed, index, hops):
                yield number, styled_episode(hop, self.prompt, inputs.speech)

    def talks(self, config: Any, agent: Any) -> Iterator[Talk]:
        for hops in self._played(config, range(min(300, len(self))), 0):
            turns = [(self.prompt.messages(hop.state), hop.query) for hop in hops]
            yield Talk(Searched(""), tuple(turns))

    def _played(self, config: Any, numbers: Sequence[int], first: int) -> list[tuple[Written, ...]]:
        state, writing = self.demonstrated[0][0], config.writing  # any question's state will do

        def search(queries: Sequence[str]) -> list[Pool | Failure]:
            return self.library.look([(state, Look(query, writing.k)) for query in queries])

        starts = [
            Start(
                *self.demonstrated[number],
                draw_styles(config.styles, config.seed, index, writing.hops),
            )
            for index, number in enumerate(numbers, first)
        ]
        return play_styled(search, starts, writing.order, config.styles.most_words)


@dataclasses.dataclass(frozen=True)
class RewriteScript(_OneByOne):
    """Of DeepRetrieval: queries are rewritten, or words of sentences left out."""

    given: Sequence[TalkativeQuestion | str]  # queries of which the script knows all, or sentences
    # The frequent words of these sentences' corpora, in small letters
    frequent: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.given)

    def at(self, config: Any, number: int, index: int) -> tuple[Sample, str]:
        """Demonstration `index`, of query `number`: its task, and the query to imitate.

        Of a sentence, no document is relevant.
        """
        one = self.given[number]
        if isinstance(one, str):
            task = Sample(f"sentence-{number}", one)
            return task, draw_dropped(config.dropped, config.seed, index, one, self.frequent)
        return one.judged, draw_rewriting(config.seed, index, one)[1]

    def talk(self, config: Any, agent: Any, library: Any, number: int, index: int) -> Talk:
        task, query = self.at(config, number, index)
        return Talk(Searched(query, outcome=REWRITTEN), ((agent.messages(task), query),))

    def talks(self, config: Any, agent: Any) -> Iterator[Talk]:
        """They are spread over all."""
        for number in range(0, len(self), max(len(self) // 2000, 1)):
            yield self.talk(config, agent, None, number, number)
