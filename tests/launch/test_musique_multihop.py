"""The package musique_multihop: without JAX and verifiers its rewards are ours; with them, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from qrag_jax.environments.episode import Closed, Look, Said, Speak
from qrag_jax.environments.tools import ToolAgent
from qrag_jax.feedback.rubric import PRESETS, score
from qrag_jax.llm.text import prompts
from qrag_jax.retrieval.own_documents import OwnRetriever
from qrag_jax.rollouts.libraries import OwnLibrary
from tests.entry_points import ROOT
from tests.environments.verifiers_pythons import needs_verifiers
from tests.support.stored_episodes import DOCUMENTS, PROMPT, RUBRIC, SEED, TURNS, stored, stories

PACKAGE = ROOT / "launch" / "musique_multihop"
COUNT = 12
PLAYS = f"""
import json, sys
from musique_multihop.questions import Questions, Settings
texts, data = json.load(sys.stdin)
questions = Questions(Settings(
    count={COUNT}, seed={SEED}, top_n={DOCUMENTS}, most={DOCUMENTS}, max_turns={TURNS},
    prompt={PROMPT!r}, rubric={RUBRIC!r},
))
rewards = []
for task, turns in zip(questions.tasks(), texts):
    work = questions.begin(task)
    for text in turns:
        if work.closed is None:
            work.said(text)
    rewards.append(questions.rewards(work.closed or work.break_off(), task)[0])
of_data = Questions(Settings(questions=data + ",own,train"))
splits = [[task.id for task in of_data.tasks(split)] for split in ("train", "dev")]
unwanted = sorted(name for name in sys.modules if name.split(".")[0] in ("jax", "verifiers"))
print(json.dumps([rewards, splits, unwanted]))
"""


def rewards_here(told: Any) -> list[float]:
    agent = ToolAgent(prompts.load(PROMPT), max_turns=TURNS, top_n=DOCUMENTS, most=DOCUMENTS)
    library, rubric, found = OwnLibrary(OwnRetriever("bm25")), PRESETS[RUBRIC], []
    for story in told:
        play, texts = agent.play(story.task), iter(story.texts)
        step = next(play)
        try:
            while True:
                if isinstance(step, Speak):
                    step = play.send(Said(next(texts), "stop"))
                else:
                    assert isinstance(step, Look)
                    step = play.send(library.look([(story.task, step)])[0])
        except StopIteration as end:
            closed = end.value
        assert isinstance(closed, Closed)
        found.append(rubric.reward(score(closed, story.task), story.task.hops))
    return found


def test_its_rewards_are_ours_and_no_question_is_trained_on_and_scored(tmp_path: Path) -> None:
    told, names = stories(COUNT), [f"q{number}" for number in range(60)]
    row = {"chunks": ["a", "b"], "support": [0], "answers": ["a"]}
    rows = [{"id": name, "question": f"{name}?", **row} for name in names]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = os.pathsep.join([str(ROOT), str(PACKAGE / "src")])
    done = subprocess.run(
        [sys.executable, "-c", PLAYS],
        input=json.dumps([[story.texts for story in told], str(data)]),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, (train, dev), unwanted = json.loads(done.stdout.splitlines()[-1])
    assert unwanted == []
    assert found == rewards_here(told)
    assert len(set(found)) > 3
    assert min(len(train), len(dev)) > 0
    assert sorted([*train, *dev]) == sorted(names)


@needs_verifiers
def test_its_rewards_are_ours_over_verifiers(tmp_path: Path) -> None:
    found = stored(tmp_path, COUNT)
    assert found["verifiers"] == found["in process"]
