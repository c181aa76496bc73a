"""The package musique_multihop: without JAX and verifiers its rewards are ours; with them, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.entry_points import ROOT
from tests.machine import needs_verifiers
from tests.support.stored_episodes import DOCUMENTS, PROMPT, SEED, TURNS, stored, stories
from tests.support.worlds import write_lines

PACKAGE = ROOT / "launch" / "musique_multihop"
COUNT = 12
PLAYS = f"""
import json, sys
from musique_multihop.questions import Questions, Settings, Work
texts, data = json.load(sys.stdin)
questions = Questions(Settings(
    count={COUNT}, seed={SEED}, top_n={DOCUMENTS}, most={DOCUMENTS}, max_turns={TURNS},
    prompt={PROMPT!r},
))
rewards = []
for task, turns in zip(questions.tasks(), texts):
    work = Work(questions, task)
    for text in turns:
        work.said(text)
    rewards.append(questions.rewards(work.end(), task)[0])
of_data = Questions(Settings(questions=data + ",own,train"))
wrong = []
for given in ({{"emm": 1.0}}, {{"hops": "twice"}}):
    try:
        Questions(Settings(rubric=given))
    except ValueError as error:
        wrong.append(str(error))
splits = [[task.id for task in of_data.tasks(split)] for split in ("train", "dev")]
unwanted = sorted(name for name in sys.modules if name.split(".")[0] in ("jax", "verifiers"))
print(json.dumps([rewards, splits, unwanted, wrong]))
"""


def test_its_rewards_are_ours_and_no_question_is_trained_on_and_scored(tmp_path: Path) -> None:
    episodes, names = stories(COUNT), [f"q{number}" for number in range(60)]
    row = {"chunks": ["a", "b"], "support": [0], "answers": ["a"]}
    rows = [{"id": name, "question": f"{name}?", **row} for name in names]
    data = write_lines(tmp_path / "train.jsonl", rows)
    path = os.pathsep.join([str(ROOT), str(PACKAGE / "src")])
    done = subprocess.run(
        [sys.executable, "-c", PLAYS],
        input=json.dumps([[story.texts for story in episodes], str(data)]),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, (train, dev), unwanted, wrong = json.loads(done.stdout.splitlines()[-1])
    assert unwanted == []
    assert [message.partition(" ")[0] for message in wrong] == ["rubric.emm", "rubric.hops"]
    assert found == stored(tmp_path / "here", episodes)
    assert len(set(found)) > 3
    assert min(len(train), len(dev)) > 0
    assert sorted([*train, *dev]) == sorted(names)


@needs_verifiers
def test_its_rewards_are_ours_over_verifiers(tmp_path: Path) -> None:
    episodes = stories(COUNT)
    assert stored(tmp_path / "verifiers", episodes, verifiers=True) == stored(
        tmp_path / "here", episodes
    )
