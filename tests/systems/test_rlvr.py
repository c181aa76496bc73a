"""RLVR put together: questions, model, tools, rewards, and updates of a small run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.data.generators.synthetic import Split
from qrag_jax.environments.tools.documents import TasksConfig, bridge_task
from qrag_jax.environments.tools.episode import Closed, Failed, ToolTally
from qrag_jax.errors import InputError
from qrag_jax.evaluators.tool_scores import means, score_rows
from qrag_jax.feedback.own_rubric import OwnRubric
from qrag_jax.feedback.rubric import preset
from qrag_jax.feedback.service import FeedbackLost
from qrag_jax.learners.ppo_config import TokenPPOConfig
from qrag_jax.learners.preference_config import PreferenceConfig
from qrag_jax.learners.token_config import SFTConfig, TokenGRPOConfig
from qrag_jax.learners.token_policy import ReadTokens
from qrag_jax.models import smollm2
from qrag_jax.rollouts.corpus_library import CorpusLibrary
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.rollouts.trajectories import DONE, BatchRules, TokenTrajectory, token_batch
from qrag_jax.runtime.dry_run import program_lines
from qrag_jax.runtime.interrupt import StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import rlvr
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.rlvr import Rlvr
from qrag_jax.systems.rlvr_config import RlvrConfig, default_config
from qrag_jax.systems.token_stages import StageRules, make_stage

MEMBERS, SFT_STEPS = 3, 2


def small(**fields: Any) -> ConfigDict:
    config = default_config()
    config.model.tiny.update(layers=1, hidden=32, heads=2, key_heads=1, head_dim=16)
    config.model.tiny.update(copies=False, intermediate=32, vocab=420, positions=700)
    config.questions.update(bridge_train=16, bridge_dev=4)
    config.eval.part = "all"
    config.tools.update(prompt="bare_question", top_n=1, most=1, max_turns=3, turn_tokens=16)
    config.sampling.update(room=640, chunk=64)
    config.sft.update(steps=SFT_STEPS, batch_size=4)
    config.grpo.update(members=MEMBERS, longest=64)
    config.train.update(steps=2, batch_size=2, eval_every=2, checkpoint_every=1, log_every=1)
    for name, value in fields.items():
        *sections, field = name.split("__")
        part = config
        for section in sections:
            part = part[section]
        part[field] = value
    return config


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rlvr]:
    config = small()
    with (
        Run.open(tmp_path_factory.mktemp("rlvr") / "run", 0.0) as run,
        rlvr.open_system(config, run) as made,
    ):
        yield made


def played(system: Rlvr, step: int) -> list[TokenTrajectory]:
    numbers = system._order.at(step).numbers.tolist()
    return system._play(system.first_state().params, numbers, step, StopSignal())


def test_demonstrations_come_first_and_are_named_so(system: Rlvr) -> None:
    given = played(system, 0)
    assert [each.facts["scripted"] for each in given] == [True] * 4
    assert all(each.status == DONE for each in given)
    assert all(turn.log_probs.sum() == 0 for each in given for turn in each.segments[0])
    assert "imitating 4 scripted demonstrations, then 2 steps of GRPO" in system.line
    texts = [system.inputs.speech.text(turn.sampled) for turn in given[0].segments[0]]
    assert "retrieve_documents" in texts[0]
    assert "complete" in texts[-1]


def test_each_stage_has_its_own_order(system: Rlvr) -> None:
    imitated = [system._order.at(step).numbers.tolist() for step in range(SFT_STEPS)]
    asked = [system._order.at(step).numbers.tolist() for step in (SFT_STEPS, SFT_STEPS + 1)]
    assert [len(each) for each in (*imitated, *asked)] == [4, 4, 2, 2]
    assert len({number for batch in imitated for number in batch}) == 8


def test_groups_have_one_question_and_draws_of_their_own(system: Rlvr) -> None:
    given = played(system, SFT_STEPS)
    assert [each.member for each in given] == [0, 1, 2] * 2
    assert len({each.question for each in given}) == 2
    drawn = {each.segments[0][0].sampled.tobytes() for each in given}
    assert len(drawn) == 2 * MEMBERS
    again = played(system, SFT_STEPS)
    assert [each.to_json() for each in again] == [each.to_json() for each in given]
    assert json.loads(json.dumps(given[0].to_json()))["facts"]["tally"]["turns"] >= 1


@pytest.mark.parametrize(
    ("algorithm", "divisor"),
    [(SFTConfig(), 1), (PreferenceConfig(), 1), (TokenGRPOConfig(), 0.1), (TokenPPOConfig(), 0.1)],
)
def test_rewards_alone_divide_logits_by_the_temperature(
    system: Rlvr, algorithm: Any, divisor: float
) -> None:
    sampling = dataclasses.replace(system.config.sampling, temperature=0.1)
    rules = StageRules(
        kind="",
        algorithm=algorithm,
        parts=system.stages[0].parts,
        weights=(1.0,),
        schedule=lambda step: step,
        make_update=lambda policy: None,
        first=0,
    )
    config = dataclasses.replace(system.config, sampling=sampling)
    stage = make_stage(config, system.mesh, system.inputs.model, rules)
    hidden, head = np.eye(2, 8, dtype=np.float32), np.eye(3, 8, dtype=np.float32)
    found = ReadTokens(stage.policy.vocabulary)(hidden, head, (), np.array([0, 0]))
    expected = jax.nn.log_softmax(hidden @ head.T / divisor)[:, 0]
    np.testing.assert_allclose(found.log_probs, expected, atol=1e-5)


def test_easy_questions_come_first_in_a_training(system: Rlvr) -> None:
    hops = [4, 2, 3, 2, 4, 1, 2, 3] * 2
    tasks = zip(system.inputs.train, hops, strict=True)
    train = [dataclasses.replace(task, hops=each) for task, each in tasks]
    made = dataclasses.replace(
        system,
        config=dataclasses.replace(system.config, tasks=TasksConfig(easy_first=True)),
        inputs=dataclasses.replace(system.inputs, train=train),
    )
    numbers = np.concatenate([made._order.at(SFT_STEPS + n).numbers for n in range(16)])
    assert [hops[n] for n in numbers[:16]] == sorted(hops)  # from any step on, as after a resume
    assert [hops[n] for n in numbers[16:]] != sorted(hops)


def test_stages_follow_each_other_with_moments_of_their_own(system: Rlvr) -> None:
    state, losses = system.first_state(), []
    system._step = None
    for step in range(SFT_STEPS):
        state, metrics = system.update(state, system._batch(played(system, step)))
        losses.append(float(metrics["loss"]))
        assert "return" not in metrics
    assert losses[1] < losses[0]
    assert _moments(state.opt_state) > 0
    # Groups whose rewards are equal teach nothing: only the moments' new start is seen.
    given = played(system, SFT_STEPS)
    flat = [_with_reward(each, 0.5) for each in given]
    before = jax.device_get(state.params)
    state, metrics = system.update(state, system._batch(flat))
    assert float(metrics["return"]) == 0.5
    assert float(metrics["flat_groups"]) == 1
    assert _moments(state.opt_state) == 0
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    assert int(state.step) == SFT_STEPS + 1
    differing = [_with_reward(each, each.member / 2) for each in given]
    state, metrics = system.update(state, system._batch(differing))
    assert float(metrics["flat_groups"]) == 0
    assert float(metrics["clip_fraction"]) == 0
    assert _moments(state.opt_state) > 0
    # The sampler's log-probabilities are those of the weights it was given: the first ones.
    assert float(metrics["sampler_kl"]) > 0


def _with_reward(each: TokenTrajectory, reward: float) -> TokenTrajectory:
    return dataclasses.replace(each, parts={**each.parts, "reward": reward})


def _moments(opt_state: Any) -> float:
    leaves = [x for x in jax.tree.leaves(opt_state) if getattr(x, "ndim", 0) > 1]
    return sum(float(np.abs(np.asarray(leaf)).sum()) for leaf in leaves)


def test_the_sampler_and_the_learner_agree(system: Rlvr) -> None:
    system._step = SFT_STEPS + 1
    given = [_with_reward(each, each.member / 2) for each in played(system, SFT_STEPS)]
    _, metrics = system.update(system.first_state(), system._batch(given))
    assert float(metrics["sampler_kl"]) < 1e-6
    # A CPU with units for matrices has factors of bfloat16, by dtype=auto.
    exact = system.stages[-1].policy.trunk.precision.products == np.float32
    assert abs(float(metrics["sampler_largest_ratio"]) - 1) < (1e-3 if exact else 1e-2)


def test_evaluation_and_programs(system: Rlvr) -> None:
    found = system.evaluate(system.first_state(), 0, StopSignal())
    assert "on 4 questions" in found.line
    assert {"eval/em", "eval/reward", "eval/turns"} <= set(found.metrics)
    lines = list(program_lines(system.programs()))
    assert [line.split(":")[0].strip() for line in lines[:2]] == [
        "update by StageSFTConfig",
        "update by TokenGRPOConfig",
    ]


def test_scores_are_means_over_what_did_not_fail(system: Rlvr) -> None:
    task = system.inputs.train[0]
    right = Closed(task.answers[0], task.gold, task.gold, 3, ToolTally(turns=3, completed=True))
    wrong = Closed("", (), task.gold[:1], 0, ToolTally(turns=1))
    ended = [right, wrong, Failed("timeout", "no reply.")]
    episodes = [TokenEpisode(each, (), 1) for each in ended]
    scores = means(score_rows([task] * 3, episodes, preset("head")), 3)
    assert scores["em"] == 0.5
    assert scores["recall"] == 0.75
    assert scores["turns"] == 2
    assert scores["failed_share"] == pytest.approx(1 / 3)
    assert scores["reward"] == pytest.approx((1.0 + (0.5 + 0.4) / 4) / 2)


def test_adapters_learn_and_the_base_stays(tmp_path: Path) -> None:
    config = small(model__lora__rank=4, stages=("grpo",), grpo__beta=0.1)
    with Run.open(tmp_path / "run", 0.0) as run, rlvr.open_system(config, run) as system:
        state = system.first_state()
        given = [_with_reward(each, each.member / 2) for each in played(system, 0)]
        after, metrics = system.update(state, system._batch(given))
        assert float(metrics["grad_norm"]) > 0
        assert float(metrics["kl"]) == 0
        leaves = jax.tree.leaves(after.params)
        assert {leaf.shape[-1] for leaf in leaves} | {leaf.shape[-2] for leaf in leaves} >= {4}


RUBRIC = """
calls = 0

def score(question, answers, answer, parts):
    global calls
    calls += 1
    if calls % 3 == 0:
        raise RuntimeError("every third call fails")
    return 100 + parts["format"]

def fails(question, answers, answer, parts):
    return float("nan")
"""


def test_a_rubric_of_a_file_outside_the_package(
    system: Rlvr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my_rubric.py"
    path.write_text(RUBRIC)
    settings = RlvrConfig.of(small(rubric__path=f"{path}:score")).rubric
    monkeypatch.setattr(system, "_rubric", settings.load())
    given = played(system, SFT_STEPS)
    assert len(given) == 6
    for number, each in enumerate(given, 1):
        if number % 3:
            assert each.parts["reward"] == 100 + each.parts["format"]
        else:
            assert (each.status, dict(each.parts), each.failed) == ("raised", {}, True)
            assert "RuntimeError: every third call fails" in each.facts["message"]
    batch = token_batch(given, BatchRules(MEMBERS, ("reward",), "scored", 700))
    assert batch.scored.tolist() == [True, True, False] * 2
    assert system._unscored == 2
    monkeypatch.setattr(system, "_rubric", OwnRubric.load(f"{path}:fails"))
    with pytest.raises(FeedbackLost, match=r"6 of 6 episodes have no reward .*nan for .*no finite"):
        played(system, SFT_STEPS)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rubric__path": "mine"}, r"config\.rubric\.path is 'mine'; write FILE\.py:FUNCTION"),
        ({"stages": ()}, r"config\.stages is empty; use sft, grpo, or sft,grpo"),
        ({"stages": ("ppo",)}, r"config\.stages is ppo"),
        ({"stages": ("grpo", "sft")}, r"config\.stages is grpo, sft"),
        ({"grpo__members": 1}, r"config\.grpo\.members is 1; it must be at least 2"),
        ({"sampling__temperature": 0.0}, "the episodes of a group would be alike"),
        ({"grpo__longest": 47}, r"config\.grpo\.longest is 47"),  # 3 turns of 16 tokens
        ({"questions__train": "a,b,train"}, "whose demonstrations are of the questions 'bridge'"),
        ({"tools__form": "python"}, r"config\.tools\.form is 'python'; use "),
        ({"tools__retriever": "tfidf"}, r"config\.tools\.retriever is 'tfidf'; use "),
        ({"tools__truncated": "no"}, r"config\.tools\.truncated is 'no'; use one of"),
        ({"rubric__preset": "tail"}, r"config\.rubric\.preset is 'tail'; use one of"),
        ({"train__accumulation": 2}, r"config\.train\.accumulation is 2"),
        ({"eval__best_by": "luck"}, r"config\.eval\.best_by is 'luck'; use "),
        ({"model__thinking": "maybe"}, r"config\.model\.thinking is 'maybe'; use on, off"),
        ({"sft__steps": 0}, r"config\.sft\.steps is 0; it must be at least 1"),
    ],
)
def test_wrong_settings(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        rlvr.check(small(**fields))


def test_the_longest_episode_is_that_of_the_room_and_of_dr_grpo_alone() -> None:
    rlvr.check(small(grpo__longest=48))
    rlvr.check(small(grpo__longest=40, sampling__room=40))
    rlvr.check(small(grpo__longest=1, grpo__aggregation="bnpo"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sampling__room": 900}, r"config\.sampling\.room is 900, but .* has 700 positions"),
        ({"sampling__room": 20}, r"the prompt of question 'bridge-.* has \d+ tokens, and config"),
        ({"tools__retriever": "semantic"}, "needs something that scores documents"),
        ({"tools__tools": ("search",)}, r"config\.tools\.tools is search; name some of"),
        ({"tools__prompt": "nothing"}, "nothing"),
        ({"model__path": "no/such/folder"}, "no such folder"),
        ({"model__lora__rank": 2, "model__lora__targets": ("w",)}, r"config\.model\.lora\.targets"),
        ({"stages": ("grpo",), "questions__train": "./no.jsonl,x,train"}, "no.jsonl"),
    ],
)
def test_wrong_inputs(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = small(**fields)
    rlvr.check(config)
    with (
        Run.open(tmp_path / "run", 0.0) as run,
        pytest.raises(InputError, match=said),
        rlvr.open_system(config, run),
    ):
        pass


def test_a_corpus_is_searched_by_all_questions(tmp_path: Path) -> None:
    splits: tuple[Split, ...] = ("train", "train", "dev", "dev")
    tasks = [bridge_task(bridge_question(0, each, n % 2)) for n, each in enumerate(splits)]
    source, index = tmp_path / "passages.jsonl", tmp_path / "index"
    texts = [each.text for task in tasks[:3] for each in task.documents]
    lines = [json.dumps({"id": f"p{n}", "text": text}) for n, text in enumerate(texts)]
    source.write_text("\n".join(lines))
    index_corpus(source, index, None, IndexSettings(engine="bm25"))
    fields = {"questions__bridge_train": 2, "questions__bridge_dev": 2, "stages": ("grpo",)}
    config = small(tools__corpus=str(index), train__steps=1, **fields)
    with Run.open(tmp_path / "run", 0.0) as run, rlvr.open_system(config, run) as system:
        inputs = system.inputs
        assert isinstance(inputs.library, CorpusLibrary)
        assert inputs.data["corpus"] == inputs.library.corpus.digest
        assert [len(task.gold_ids) for task in (*inputs.train, *inputs.dev)] == [2, 2, 2, 0]
        assert not any(task.documents for task in inputs.train)
        given = played(system, 0)
        state, metrics = system.update(system.first_state(), system._batch(given))
        assert int(state.step) == 1
        assert np.isfinite(float(metrics["loss"]))


def test_a_model_that_is_not_here_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(smollm2.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(smollm2, "DEFAULT_CACHE", tmp_path / "cache")
    with (
        Run.open(tmp_path / "run", 0.0) as run,
        pytest.raises(InputError, match=r"config\.model\.path"),
        rlvr.open_system(small(model__path="smollm2"), run),
    ):
        pass
