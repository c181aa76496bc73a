"""Episodes of a language model with tools: tokens in, tokens out, side by side."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.worlds import demonstrations
from examples.worlds.demonstrations import (
    Demonstration,
    Style,
    draw_renamed,
    play_styled,
    scripted_talk,
    styled_episode,
)
from qrag_jax.environments.episode import Closed, Failed, Play, Speak, ToolTally, ToolTask
from qrag_jax.environments.queries import (
    BRIDGE,
    PASSAGE,
    QUESTION,
    QueryPrompt,
    StylesConfig,
    grown,
    style_variants,
)
from qrag_jax.environments.tasks import bridge_task
from qrag_jax.environments.tool_functions import ToolFunctions
from qrag_jax.environments.tools import COMPLETE, GET, RETRIEVE, ToolAgent
from qrag_jax.errors import InputError
from qrag_jax.llm.outcomes import Failure
from qrag_jax.llm.text import prompts
from qrag_jax.llm.text.tool_calls import HERMES, ToolCall, write_call
from qrag_jax.retrieval.own_documents import OwnRetriever
from qrag_jax.rollouts import token_episodes
from qrag_jax.rollouts.libraries import OwnLibrary
from qrag_jax.rollouts.token_episodes import AgentRollout, Episode, Speech, Start
from qrag_jax.rollouts.trajectories import DONE, TRUNCATED
from qrag_jax.runtime.interrupt import StopSignal
from tests.environments.trying import EXPERT, WorldSearch, tiny_speech, world, world_state
from tests.rollouts.token_setup import ScriptedSampler

QUESTIONS = world(4)
TASKS = [bridge_task(question) for question in QUESTIONS]
LIBRARY = OwnLibrary(OwnRetriever("bm25"))
AGENT = ToolAgent(prompts.load("bare_question"), top_n=1, most=1, max_turns=4)


@pytest.fixture(scope="module")
def speech() -> Speech:
    return tiny_speech(turn=200, room=900)


def says(speech: Speech, say: Callable[[str], str | Failure]) -> ScriptedSampler:
    return ScriptedSampler(speech.tokenizer, say, letters=True)


def starts(tasks: Sequence[ToolTask], each: int = 1) -> list[Start]:
    return [
        Start(task, np.array([number, member], np.uint32))
        for number, task in enumerate(tasks)
        for member in range(each)
    ]


def script(question: Any) -> Demonstration:
    return Demonstration(question, EXPERT)


def expert(text: str) -> str:
    """The expert's next turn after a conversation."""
    (question,) = [each for each in QUESTIONS if each.question in text]
    shown = [part.partition("</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]
    return script(question).say(shown)


def rollout(speech: Speech, sampler: Any, agent: Any = AGENT, **options: Any) -> AgentRollout:
    library = options.pop("library", LIBRARY)
    return AgentRollout(
        agent, stop=StopSignal(), sampler=sampler, speech=speech, library=library, **options
    )


def one_episode(
    speech: Speech, say: Callable[[str], str | Failure] = expert, agent: Any = AGENT, **options: Any
) -> Episode:
    (episode,) = rollout(speech, says(speech, say), agent, **options).play(starts(TASKS[:1]))
    return episode


def ids_of(segment: Sequence[Any]) -> np.ndarray:
    return np.concatenate([np.r_[turn.observed, turn.sampled] for turn in segment])


@pytest.mark.parametrize("in_rounds", [True, False])
def test_sampled_ids_stay_as_they_are(speech: Speech, in_rounds: bool) -> None:
    sampler, scaffold = says(speech, expert), speech.scaffold
    sampler.in_rounds = in_rounds
    played = rollout(speech, sampler).play(starts(TASKS, 2))
    for start, episode in zip(starts(TASKS, 2), played, strict=True):
        assert episode.status == DONE
        (segment,) = episode.segments
        question = QUESTIONS[int(start.key[0])]
        talk = scripted_talk(AGENT, start.task, script(question), LIBRARY)
        assert talk.ended == episode.ended
        assert episode.ended.tally.searches == 2
        for number, (turn, (messages, text)) in enumerate(zip(segment, talk.turns, strict=True)):
            assert speech.text(turn.sampled) == text
            canonical = speech.tokenizer(text, add_special_tokens=False).input_ids
            assert turn.sampled.tolist()[:-1] != canonical  # and nobody changed them
            before = segment[number - 1].sampled
            observed = scaffold.after(before, messages) if number else scaffold.opening(messages)
            np.testing.assert_array_equal(turn.observed, observed)
    sampler.check(played)
    if in_rounds:
        assert [len(asked) for asked in sampler.asked] == [8, 8, 8]


def test_a_script_is_encoded_as_a_tokenizer_does(speech: Speech) -> None:
    talk = scripted_talk(AGENT, TASKS[0], script(QUESTIONS[0]), LIBRARY)
    episode = token_episodes.encoded(talk, speech)
    ids = ids_of(episode.segments[0])
    messages = [
        {"role": role, "content": content}
        for before, text in talk.turns
        for role, content in (*before, ("assistant", text))
    ]
    expected = speech.tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
    assert speech.tokenizer.decode(ids) == expected
    ((turn,),) = token_episodes.all_sampled(episode).segments
    np.testing.assert_array_equal(ids_of([turn]), ids)
    assert len(turn.observed) == 1
    with pytest.raises(ValueError):
        token_episodes.encoded(talk, dataclasses.replace(speech, room=50))


def test_a_failure_is_played_again_and_ends_the_episode(speech: Speech) -> None:
    seen = list[str]()

    def fails_at_first(text: str) -> str | Failure:
        seen.append(text)
        first = QUESTIONS[0].question in text
        if QUESTIONS[1].question in text or (
            first and sum(QUESTIONS[0].question in each for each in seen) == 1
        ):
            return Failure("timeout", "no reply within 3 s.")
        return expert(text)

    sampler = says(speech, fails_at_first)
    playing = rollout(speech, sampler)
    one, other, third, _ = playing.play(starts(TASKS))
    assert (one.attempts, one.status) == (2, DONE)
    assert (other.attempts, other.status, other.segments) == (2, "timeout", ())
    assert isinstance(other.ended, Failed)
    assert (third.attempts, third.status) == (1, DONE)
    assert playing.counts.failed == 3
    # Another attempt has other draws.
    requests = [request for together in sampler.asked for request in together]
    of_other = [r for r in requests if QUESTIONS[1].question in speech.tokenizer.decode(r.ids)]
    assert len({request.key.tobytes() for request in of_other}) == 2
    dead = types.SimpleNamespace(look=lambda asked: [Failure("server", "status 500")] * len(asked))
    episode = one_episode(speech, library=dead, attempts=3)
    assert (episode.status, episode.attempts) == ("server", 3)


def test_documents_are_opened(speech: Speech) -> None:
    agent = ToolAgent(prompts.load("bare_question"), tools=(RETRIEVE, GET, COMPLETE))

    def both(text: str) -> str:
        if "Document ID: 4" in text:
            return write_call(ToolCall(COMPLETE, {"final_answer": "x"}), HERMES)
        calls = [ToolCall(GET, {"doc_id": "4"}), ToolCall(GET, {"doc_id": "none"})]
        return "\n".join(write_call(call, HERMES) for call in calls)

    episode = one_episode(speech, both, agent)
    assert episode.ended.seen == ("4",)
    assert 'no document with the id "none"' in speech.text(episode.segments[0][1].observed)


def test_functions_of_a_file_are_called(speech: Speech, tmp_path: Path) -> None:
    """By a policy that reads the results and did not sample them."""
    functions = ToolFunctions("examples/tools.py", tmp_path / "log", seconds=30.0, most=300)
    agent = ToolAgent(prompts.load("rlvr_tools"), functions=functions.schemas)
    expressions = ("6 * 7", "1 / 0", 7)

    def calculates(text: str) -> str:
        if "<tool_response>" in text:
            fields = {"reasoning": "Sums.", "final_answer": "42", "cited_doc_ids": ["1"]}
            return write_call(ToolCall(COMPLETE, fields), HERMES)
        calls = [ToolCall("calculate", {"expression": each}) for each in expressions]
        return "\n".join(write_call(call, HERMES) for call in calls)

    sampler, wide = says(speech, calculates), dataclasses.replace(speech, turn=600, room=6000)
    played = rollout(wide, sampler, agent, functions=functions).play(starts(TASKS))
    functions.end()
    sampler.check(played)
    for episode in played:
        assert episode.ended.tally == ToolTally(
            turns=2, malformed=1, calls=2, failed_calls=1, completed=True
        )
        (first, second) = episode.segments[0]
        assert all(
            name in speech.text(first.observed) for name in ("calculate", "look_up", RETRIEVE)
        )
        read = speech.text(second.observed).split("</tool_response>")
        assert all(
            text in part for text, part in zip(("42", "ZeroDivisionError", "expression"), read)
        )


def test_an_episode_ends_where_its_room_does(speech: Speech) -> None:
    (first, second, _) = one_episode(speech).segments[0]
    before = len(ids_of([first]))
    for room, turns, finish in (
        (before - 3, 1, "length"),  # inside the first turn
        (before + len(second.observed), 1, "stop"),  # no room for one token more
        (before + len(second.observed) + 5, 2, "length"),
    ):
        cut = one_episode(dataclasses.replace(speech, room=room))
        assert cut.status == TRUNCATED
        (segment,) = cut.segments
        assert (len(segment), segment[-1].finish) == (turns, finish)
        assert len(ids_of(segment)) <= room
    with pytest.raises(InputError, match=r"config\.sampling\.room"):
        one_episode(dataclasses.replace(speech, room=len(first.observed)))


def test_a_rewritten_segment_has_other_draws(speech: Speech) -> None:
    """Its positions were drawn at before; the turns of one segment lie at others."""

    class Asks:
        def play(self, task: ToolTask) -> Play:
            yield Speak((("user", task.question),))
            yield Speak((("tool", "nothing"),))
            yield Speak((("user", "Again."),))
            return Closed("")

    scaffold = dataclasses.replace(speech.scaffold, append_only=False)
    speech = dataclasses.replace(speech, scaffold=scaffold)
    sampler = says(speech, lambda _: "x")
    (episode,) = rollout(speech, sampler, Asks()).play(starts(TASKS[:1]))
    assert [len(segment) for segment in episode.segments] == [2, 1]
    first, second, third = (request.key.tolist() for (request,) in sampler.asked)
    assert first == second != third


def test_a_demonstration_is_what_a_policy_would_sample(speech: Speech) -> None:
    """Each hop is one turn; all of its query trains, and nothing else."""
    prompt = QueryPrompt(prompts.load("bare_query"), style_variants())
    styles = Style(BRIDGE, True), Style(PASSAGE, False)
    start = demonstrations.Start(world_state(QUESTIONS[0]), QUESTIONS[0], styles)
    (hops,) = play_styled(WorldSearch(QUESTIONS), [start])
    for hop, is_marked in zip(hops, (True, False), strict=True):
        ((turn,),) = styled_episode(hop, prompt, speech).segments
        opening = speech.scaffold.opening(prompt.messages(hop.state))
        np.testing.assert_array_equal(turn.observed, opening)
        ids = speech.tokenizer(hop.query, add_special_tokens=False).input_ids
        assert turn.sampled.tolist() == [*ids, speech.scaffold.stop_ids[0]]
        assert ("style: bridge" in speech.tokenizer.decode(turn.observed)) == is_marked
    for wrong, named in (({"room": 60}, "room"), ({"turn": 5}, r"config\.styles\.most_words")):
        small = dataclasses.replace(speech, **wrong)
        with pytest.raises(InputError, match=named):
            [styled_episode(hop, prompt, small) for hop in hops]


def test_renamed_demonstrations_stay_true() -> None:
    """What a style says with the new names, it says of a state with the new names."""
    prompt, asked = QueryPrompt(prompts.load("bare_query")), world(12)
    styles = (Style(QUESTION, False), Style(BRIDGE, False))
    played = play_styled(
        WorldSearch(asked),
        [demonstrations.Start(world_state(each), each, styles) for each in asked],
    )
    for number, hops in enumerate(played):
        changed = draw_renamed(StylesConfig(renamed=1.0), 0, number, hops)
        for old, new in zip(hops, changed, strict=True):
            assert new.query != old.query
            assert new.state.pages == old.state.pages
            ((_, before),) = prompt.messages(old.state)
            ((_, after),) = prompt.messages(new.state)
            # Words stand for each other one to one, in the prompt and in the query.
            read = {*zip(f"{before} {old.query}".split(), f"{after} {new.query}".split())}
            assert len(read) == len({one for one, _ in read}) == len({two for _, two in read})
        # What one hop found is what the next one shows, with the same names.
        assert changed[1].state.pool == grown(changed[0].state.pool, changed[0].found, "hop")
