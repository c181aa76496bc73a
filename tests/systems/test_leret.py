"""LeReT put together: demonstrations, tries, what is learned from them, and their files."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.data.generators.bridge_world import bridge_question
from qrag_jax.environments.tools.episode import Look
from qrag_jax.errors import InputError
from qrag_jax.feedback.preference_pairs import PairsConfig, pairs_of
from qrag_jax.feedback.tries import StateKey, Try
from qrag_jax.rollouts.token_episodes import TokenEpisode
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.interrupt import Stopped, StopSignal
from qrag_jax.runtime.run import Run
from qrag_jax.systems import leret
from qrag_jax.systems.indexing import IndexSettings, index_corpus
from qrag_jax.systems.leret import Leret
from qrag_jax.systems.leret_config import PREFERENCE, SCRIPT, SFT
from qrag_jax.systems.leret_experience import LessonExperience
from qrag_jax.systems.leret_tries import Iteration, TryMaker
from qrag_jax.systems.saved_token_run import digest_of_weights
from qrag_jax.systems.token_system import EVALUATED
from tests.systems.query_play import PAIR_STEPS, SCRIPT_STEPS, SFT_STEPS, opened, small

pytestmark = pytest.mark.long

FIRST_SFT, FIRST_PAIRS = SCRIPT_STEPS, SCRIPT_STEPS + SFT_STEPS
PERIOD = SFT_STEPS + PAIR_STEPS
STOP = StopSignal()


@dataclasses.dataclass
class Trained:
    """A run that went through all stages.

    Attributes:
        system: its.
        states: the state before each step, on the host, and the last one.
        batches: what each step learned from.
        samples: the questions and epochs of each step.
        metrics: of each step.
    """

    system: Leret
    states: list[Any]
    batches: list[Any]
    samples: list[np.ndarray]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with opened(small(), tmp_path_factory.mktemp("leret") / "run") as system:
        experience, state = LessonExperience(system, 0), system.first_state()
        made = Trained(system, [], [], [], [])
        for number in range(system.train.steps):
            made.states.append(jax.device_get(state))
            batch = experience.next(state, number, STOP)
            made.batches.append(jax.device_get(batch))
            made.samples.append(experience.samples)
            state, metrics = system.update(state, batch)
            made.metrics.append({name: float(value) for name, value in metrics.items()})
        made.states.append(jax.device_get(state))
        yield made


def texts(system: Leret, blocks: Any) -> list[str]:
    """What is learned from, an episode each."""
    episodes = sorted({int(each) for each in blocks.episode[blocks.valid]})
    return [
        system.inputs.speech.text(blocks.target[blocks.valid & (blocks.episode == each)])
        for each in episodes
    ]


def tries_of(system: Leret, iteration: int) -> list[Try]:
    folder = system.workdir / "tries" / f"iteration-{iteration}"
    rows = [
        json.loads(line)
        for hop in (1, 2)
        for line in (folder / f"hop-{hop}.jsonl").read_text().splitlines()
    ]
    return [Try.from_json(row) for row in rows if "part" not in row]


def again(trained: Trained, workdir: Path) -> LessonExperience:
    """The experience of a run that was killed and goes on in a copy of its folder."""
    shutil.copytree(trained.system.workdir, workdir, dirs_exist_ok=True)
    system = dataclasses.replace(trained.system, workdir=workdir)
    system._step = None
    return LessonExperience(system, 0)


# ---------------------------------------------------------------- stages


def test_demonstrations_come_first(trained: Trained) -> None:
    system = trained.system
    assert "12 steps of imitating scripted styles; then 2 × tries by 2 prompts × 4" in system.line
    shown = texts(system, trained.batches[0].blocks)
    assert len(shown) == 4 * 2  # questions, hops
    asked = " ".join(system.inputs.train[n].question for n in trained.samples[0][:, 0])
    assert any(query.split()[0] in asked for query in shown)
    assert trained.metrics[SCRIPT_STEPS - 1]["loss"] < trained.metrics[0]["loss"] - 1


def test_a_later_stage_has_moments_of_its_own(trained: Trained) -> None:
    kept = Checkpoints(trained.system.workdir, read_only=True)
    stages = trained.system.config.plan
    assert [each.kind for each in stages] == [SCRIPT, SFT, PREFERENCE, SFT, PREFERENCE]
    for stage in stages[1:]:
        before, after = trained.states[stage.first], trained.states[stage.first + 1]
        params = kept.restore_params_of(stage.first, before.params)
        jax.tree.map(np.testing.assert_array_equal, params, before.params)
        counts = [x for x in jax.tree.leaves(after.opt_state) if np.shape(x) == ()]
        assert set(map(int, counts)) == {1}
        assert int(after.step) == stage.first + 1
        rate = trained.metrics[stage.first]["learning_rate"]
        assert rate == pytest.approx(getattr(trained.system.config, stage.kind).learning_rate)


def test_samples_are_questions_of_the_run(trained: Trained) -> None:
    system = trained.system
    made = {each.question for each in tries_of(system, 1) if each.reward}
    for number in range(FIRST_SFT, FIRST_PAIRS + PAIR_STEPS):
        questions = trained.samples[number][:, 0].tolist()
        assert len(questions) == 4  # of a batch, however few lessons there are
        assert set(questions) <= made
    assert system._names(questions) == [system.inputs.train[n].id for n in questions]


def test_the_programs_of_a_dry_run(trained: Trained) -> None:
    programs = trained.system.programs()
    assert [each.name for each in programs] == [
        "update of script",
        "update of sft",
        "update of preference",
    ]
    blocks = programs[2].arguments[1].blocks
    assert blocks.room.shape[1:3] == (256, 256)
    for each in programs:
        state, metrics = jax.eval_shape(each.function, *each.arguments)
        assert {"loss", "skipped"} <= metrics.keys()
        shapes = [[leaf.shape for leaf in jax.tree.leaves(s)] for s in (state, each.arguments[0])]
        assert shapes[0] == shapes[1]


# ---------------------------------------------------------------- tries


def test_every_try_has_a_draw_of_its_own(trained: Trained) -> None:
    maker = trained.system.tries
    states = {StateKey(n, 1, 0): state for n, state in enumerate(maker.questions)}
    parts = maker._parts(states)
    assert [len(part) for part in parts] == [3 * 2 * 4] * 2
    assert [each.state.variant for each in parts[0][:8]] == [1] * 4 + [2] * 4
    keys = [
        tuple(start.key.tolist())
        for iteration in (1, 2)
        for hop in (1, 2)
        for part in parts
        for start in maker._starts(iteration, hop, part)
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * 48
    (other,) = maker._starts(1, 1, parts[1][5:6])
    assert tuple(other.key.tolist()) == keys[24 + 5]  # whatever else is in the part


def test_the_next_states_grow_from_tries(trained: Trained) -> None:
    system = trained.system
    found = system.tries.iteration(1, None, weights_of(trained, FIRST_SFT), STOP)
    assert [each.to_json() for each in found.tries] == [
        each.to_json() for each in tries_of(system, 1)
    ]
    assert len([at for at in found.states if at.hop == 1]) == 6
    later = [at for at in found.states if at.hop == 2]
    assert later
    by_key = {each.key: each for each in found.tries}
    for at in later:
        parent = by_key[found.grown_from[at]]
        state = found.states[at]
        assert (parent.question, parent.hop, state.hop) == (at.question, 1, 2)
        assert tuple(each.id for each in state.pool) == parent.pool
        assert [each.score for each in state.pool] == [score for _, score in parent.found]
    # Each try is what its query finds, whoever searches.
    each = next(each for each in found.tries if each.hop == 2 and each.searched)
    state = found.states[each.at]
    (searched,) = system.inputs.library.look([(state, Look(each.query, 4))])
    assert not isinstance(searched, Exception)
    assert tuple((one.id, one.score) for one in searched) == each.found  # type: ignore[union-attr]


def weights_of(trained: Trained, step: int) -> str:
    return digest_of_weights(trained.states[step].params)


def maker_in(trained: Trained, workdir: Path) -> TryMaker:
    return dataclasses.replace(trained.system.tries, workdir=workdir)


def player(trained: Trained, calls: list[int], stop_at: int = 0) -> Callable[..., Any]:
    """Plays by the weights of the first tries; is told to stop in call number `stop_at`."""
    system, state = trained.system, trained.states[FIRST_SFT]
    play = system.by_device(jax.device_put(state.params, system.param_shardings), STOP)

    def counted(starts: Sequence[Any]) -> list[TokenEpisode]:
        calls.append(len(starts))
        if len(calls) == stop_at:
            raise Stopped("SIGTERM")
        return play(starts)

    return counted


@pytest.mark.parametrize("stop_at", [2, 3])
def test_tries_that_were_broken_off_go_on(trained: Trained, tmp_path: Path, stop_at: int) -> None:
    maker, weights = maker_in(trained, tmp_path), weights_of(trained, FIRST_SFT)
    calls: list[int] = []
    with pytest.raises(Stopped):
        maker.iteration(1, player(trained, calls, stop_at), weights, STOP)
    found = maker.iteration(1, player(trained, calls), weights, STOP)
    assert len(calls) == 1 + 4  # parts of 3 questions; only the one that was broken off is repeated
    assert [each.to_json() for each in found.tries] == [
        each.to_json() for each in tries_of(trained.system, 1)
    ]
    kept = tmp_path / "tries" / "iteration-1" / "hop-2.jsonl"
    own = trained.system.workdir / "tries" / "iteration-1" / "hop-2.jsonl"
    assert kept.read_bytes() == own.read_bytes()


def test_other_iterations_and_weights_give_other_tries(trained: Trained, tmp_path: Path) -> None:
    maker, weights = maker_in(trained, tmp_path), weights_of(trained, FIRST_SFT)
    one = maker.iteration(1, player(trained, []), weights, STOP).tries
    two = maker.iteration(2, player(trained, []), weights, STOP).tries
    assert [each.sampled for each in one] != [each.sampled for each in two]
    with pytest.raises(InputError, match="was begun with another weights; bring that back, or del"):
        maker.iteration(1, player(trained, []), "other", STOP)


def test_tries_of_other_settings_are_refused(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained.system.workdir / "tries", tmp_path / "tries")
    maker, weights = maker_in(trained, tmp_path), weights_of(trained, FIRST_SFT)
    for name in ("model", "corpus", "search", "prompts"):
        other = dataclasses.replace(maker, record={**maker.record, name: "another"})
        with pytest.raises(InputError, match=f"with another {name}; bring that back, or bring"):
            other.iteration(1, None, weights, STOP)
    path = tmp_path / "tries" / "iteration-1" / "hop-1.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))
    with pytest.raises(InputError, match=r"hop-1.jsonl has other tries than were asked for; bring"):
        maker.iteration(1, None, weights, STOP)
    path.write_text("".join(lines[:25]))
    with pytest.raises(InputError, match="bring the file back, or begin a new --workdir"):
        maker.iteration(1, None, weights, STOP)
    path.unlink()
    with pytest.raises(InputError, match=r"hop-1.jsonl is missing; bring the file back"):
        maker.iteration(1, None, weights, STOP)


# ---------------------------------------------------------------- lessons


def learned(trained: Trained, iteration: int) -> tuple[list[Any], Iteration]:
    """The pairs and targets of all states, made anew."""
    system = trained.system
    step = FIRST_SFT + (iteration - 1) * PERIOD
    found = system.tries.iteration(iteration, None, weights_of(trained, step), STOP)
    by_state: dict[StateKey, list[Try]] = {}
    for each in found.tries:
        by_state.setdefault(each.at, []).append(each)
    config = PairsConfig(degenerate=("[1]",))
    return [pairs_of(own, config, (42, iteration)) for own in by_state.values()], found


def bare(system: Leret, found: Iteration, at: StateKey) -> np.ndarray:
    messages = system.inputs.agent.prompt.messages(found.states[at].asked_by(0))
    return system.inputs.speech.scaffold.opening(messages)


def rows_of(blocks: Any) -> list[list[int]]:
    """The tokens of the rows of all blocks, shared ones included."""
    rows = []
    members = blocks.lengths.shape[1] // blocks.shared.shape[1]
    for number in range(len(blocks.tokens)):
        at = 0
        for group, shared in enumerate(blocks.shared[number]):
            prompt = blocks.tokens[number, at : at + shared].tolist()
            at += shared
            for length in blocks.lengths[number, group * members : (group + 1) * members]:
                if length:
                    own = blocks.tokens[number, at : at + length - shared].tolist()
                    rows.append(prompt + own)
                    at += length - shared
    return rows


@pytest.mark.parametrize("iteration", [1, 2])
def test_the_best_queries_are_imitated_behind_the_bare_prompt(
    trained: Trained, iteration: int
) -> None:
    states, found = learned(trained, iteration)
    best = [
        [*bare(trained.system, found, each.at), *each.queries[each.target].sampled]
        for each in states
        if each.target is not None
    ]
    assert best
    first = FIRST_SFT + (iteration - 1) * PERIOD
    shown = [row for n in range(SFT_STEPS) for row in rows_of(trained.batches[first + n].blocks)]
    assert len(shown) == 4 * SFT_STEPS
    assert all(row in best for row in shown)
    ids = trained.batches[first].blocks
    assert int(ids.learned.sum()) == sum(
        len(row) - _prompt_length(row, best, trained, states, found) for row in rows_of(ids)
    )


def _prompt_length(row: Any, best: Any, trained: Trained, states: Any, found: Any) -> int:
    place = best.index(row)
    at = [each.at for each in states if each.target is not None][place]
    return len(bare(trained.system, found, at))


def test_pairs_have_the_winner_first_and_one_prompt(trained: Trained) -> None:
    states, found = learned(trained, 1)
    every = {
        (
            (*opening, *each.queries[pair.winner].sampled),
            (*opening, *each.queries[pair.loser].sampled),
        )
        for each in states
        if each.pairs
        for opening in [bare(trained.system, found, each.at)]
        for pair in each.pairs
    }
    rewards = {each.at: each for each in states}
    assert all(
        each.queries[pair.winner].reward > each.queries[pair.loser].reward
        for each in rewards.values()
        for pair in each.pairs
    )
    for number in range(FIRST_PAIRS, FIRST_PAIRS + PAIR_STEPS):
        rows = [tuple(row) for row in rows_of(trained.batches[number].blocks)]
        assert len(rows) == 2 * 4
        assert set(zip(rows[::2], rows[1::2])) <= every


def test_the_reference_is_the_log_probability_of_each_query(trained: Trained) -> None:
    system, folder = trained.system, trained.system.workdir / "tries" / "iteration-1"
    states, found = learned(trained, 1)
    kept = json.loads((folder / "reference.json").read_text())["log_probs"]
    params, expected = trained.states[FIRST_PAIRS].params, []
    trunk = system.inputs.model.loaded.model
    rows = [
        (bare(system, found, each.at), each.queries[place].sampled)
        for each in states
        for pair in each.pairs
        for place in pair[:2]
    ]
    width = max(len(opening) + len(query) for opening, query in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, (opening, query) in zip(tokens, rows, strict=True):
        row[: len(opening) + len(query)] = [*opening, *query]
    lengths = np.array([len(opening) + len(query) for opening, query in rows], np.int32)
    logits = np.asarray(trunk.logits(params, jnp.asarray(tokens), jnp.asarray(lengths)))
    for row, (opening, query) in zip(logits, rows, strict=True):
        wanted = row[len(opening) - 1 : len(opening) + len(query) - 1].astype(np.float64)
        wanted -= np.log(np.exp(wanted).sum(axis=1, keepdims=True))
        expected.append(wanted[np.arange(len(query)), list(query)].sum())
    assert len(kept) == len(expected) >= 2
    np.testing.assert_allclose(kept, expected, atol=2e-3)
    # The policy has not moved yet, so all margins are 0, and the loss is that of h = 0.
    assert trained.metrics[FIRST_PAIRS]["margin"] == pytest.approx(0, abs=1e-3)
    beta = system.config.preference.beta
    assert trained.metrics[FIRST_PAIRS]["loss"] == pytest.approx((1 / (2 * beta)) ** 2, rel=1e-3)


def test_a_resumed_run_learns_from_the_same(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TryMaker, "_starts", None)  # nothing is played again
    monkeypatch.setattr(LessonExperience, "_log_probs", None)
    for number in (FIRST_SFT + 1, FIRST_PAIRS, FIRST_PAIRS + PERIOD + 1):
        experience = again(trained, tmp_path / str(number))
        batch = experience.next(trained.states[number], number, STOP)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(batch), trained.batches[number])
        np.testing.assert_array_equal(experience.samples, trained.samples[number])


@pytest.mark.parametrize(
    ("name", "text", "number", "told"),
    [
        ("start.json", None, FIRST_SFT + 1, r"start\.json is missing or damaged; bring it back"),
        ("start.json", "{", FIRST_SFT + 1, r"start\.json is missing or damaged; bring it back"),
        ("start.json", '{"weights": "x"}', FIRST_SFT, "were made by other weights than those of"),
        ("start.json", '{"weights": "x"}', FIRST_PAIRS, "another weights; bring that back, or br"),
        ("reference.json", None, FIRST_PAIRS + 1, r"reference\.json is missing, damaged or of"),
        ("reference.json", '{"log_probs": ["x"]}', FIRST_PAIRS + 1, "is missing, damaged or of"),
        ("reference.json", "[1, 2", FIRST_PAIRS + 1, r"other pairs; bring it back, or begin a"),
        ("hop-2.jsonl", None, FIRST_PAIRS, r"hop-2\.jsonl is missing; bring the file back, or beg"),
    ],
)
def test_lost_files_are_named(
    trained: Trained, tmp_path: Path, name: str, text: str | None, number: int, told: str
) -> None:
    experience = again(trained, tmp_path)
    path = tmp_path / "tries" / "iteration-1" / name
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=told):
        experience.next(trained.states[number], number, STOP)


def test_a_reference_that_is_damaged_at_the_start_is_made_again(
    trained: Trained, tmp_path: Path
) -> None:
    experience = again(trained, tmp_path)
    path = tmp_path / "tries" / "iteration-1" / "reference.json"
    whole = path.read_text()
    path.write_text(whole[:100])
    state = jax.device_put(trained.states[FIRST_PAIRS])
    experience.next(state, FIRST_PAIRS, STOP)
    assert path.read_text() == whole


# ---------------------------------------------------------------- nothing to learn from


def with_tries(trained: Trained, workdir: Path, change: Callable[[Try], Try]) -> LessonExperience:
    """The experience of a run whose first tries are others."""
    experience = again(trained, workdir)
    system, maker = experience._system, trained.system.tries
    found = maker.iteration(1, None, weights_of(trained, FIRST_SFT), STOP)
    changed = found._replace(tries=[change(each) for each in found.tries])

    class Given:
        def iteration(self, *_: Any) -> Iteration:
            return changed

    system.__dict__["tries"] = Given()
    return experience


def test_ties_everywhere_stop_the_run(trained: Trained, tmp_path: Path) -> None:
    def tied(each: Try) -> Try:
        scores = {**each.scores, "recall": 0.5, "ap": 0.25}
        return dataclasses.replace(each, reward=0.25, scores=scores) if each.scored else each

    experience = with_tries(trained, tmp_path, tied)
    with pytest.raises(InputError, match=r"no state of \d+ has pairs: in \d+% all tries are worth"):
        experience.next(trained.states[FIRST_SFT], FIRST_SFT, STOP)


def test_a_metric_that_is_0_everywhere_stops_the_run(trained: Trained, tmp_path: Path) -> None:
    def nothing(each: Try) -> Try:
        scores = dict.fromkeys(each.scores, 0.0)
        return dataclasses.replace(each, reward=0.0, scores=scores) if each.scored else each

    experience = with_tries(trained, tmp_path, nothing)
    with pytest.raises(InputError, match=r"none of \d+ tries with a score found a gold page"):
        experience.next(trained.states[FIRST_SFT], FIRST_SFT, STOP)


def test_a_corpus_that_changes_while_the_run_goes_on(trained: Trained, tmp_path: Path) -> None:
    experience = again(trained, tmp_path)
    system = experience._system
    system.inputs = dataclasses.replace(
        system.inputs, data={**system.inputs.data, "corpus": "0" * 64}
    )
    with pytest.raises(InputError, match=r"the corpus that is searched has changed since the run"):
        experience.next(trained.states[FIRST_SFT], FIRST_SFT, STOP)


def _index(folder: Path, count: int) -> Path:
    """An index of the passages of some training questions, and of the first question of dev."""
    questions = [bridge_question(0, "train", n) for n in range(count)]
    questions.append(bridge_question(0, "dev", 0))
    source = folder / "passages.jsonl"
    rows = [
        {"id": f"{each.id}/{page.id}", "title": page.title, "text": page.text}
        for each in questions
        for page in each.passages
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    shutil.rmtree(folder / "index", ignore_errors=True)
    index_corpus(source, folder / "index", None, IndexSettings(engine="bm25"))
    return folder / "index"


def test_an_index_that_is_built_anew_between_two_starts(tmp_path: Path) -> None:
    index = _index(tmp_path, 2)
    sizes = {
        "questions__bridge_train": 2,
        "questions__bridge_dev": 1,
        "questions__bridge_corpus": 2,
    }
    fields = {**sizes, "search__gold_by": "title"}
    config, workdir = small(search__index=str(index), **fields), tmp_path / "run"
    with Run.open(workdir, 0.0) as run, leret.open_system(config, run) as system:
        assert len(system.inputs.library.corpus) == 30
        assert not (workdir / "search").exists()
        run.checkpoints.save_last(1, system.first_state(), {"data": system.data})
        run.checkpoints.wait()
        _index(tmp_path, 3)
        experience = LessonExperience(system, 0)
        with pytest.raises(InputError, match="the corpus that is searched has changed since the"):
            experience.next(system.first_state(), FIRST_SFT, STOP)
    with Run.open(workdir, 0.0) as run, leret.open_system(config, run) as system:
        assert len(system.inputs.library.corpus) == 40
        with pytest.raises(InputError, match=r"the training data \(corpus\) are not those that"):
            run.restore(system.first_state, system.data, {})
    (index / "corpus" / "corpus.json").unlink()
    with (
        Run.open(workdir, 0.0) as run,
        pytest.raises(InputError, match=r"holds no finished corpus: corpus\.json is miss"),
        leret.open_system(config, run),
    ):
        pass


# ---------------------------------------------------------------- evaluation


def test_evaluation_is_what_the_queries_find(trained: Trained) -> None:
    system, state = trained.system, trained.states[-1]
    params = jax.device_put(state.params, system.param_shardings)
    found = system.evaluate(state._replace(params=params), 20, STOP)
    hops = system.hops.by_model(system.inputs.dev, system.by_device(params, STOP), EVALUATED)
    pools: list[list[str]] = [[] for _ in system.inputs.dev]
    for number, rows in enumerate(hops, start=1):
        recalls, precisions = [], []
        for pool, row in zip(pools, rows, strict=True):
            made = row.made
            assert made is not None
            if made.outcome == "searched":
                (hits,) = system.inputs.library.look([(row.before, Look(row.query, 4))])
                pool += [each.id for each in hits if each.id not in pool]  # type: ignore[union-attr]
            gold = row.before.gold_ids
            places = [n for n, name in enumerate(pool, 1) if name in gold]
            recalls.append(len(places) / 2)
            precisions.append(sum(k / n for k, n in enumerate(places, 1)) / 2)
        assert found.metrics[f"eval/hop{number}/recall"] == pytest.approx(np.mean(recalls))
        assert found.metrics[f"eval/hop{number}/ap"] == pytest.approx(np.mean(precisions))
    made = [row.made for rows in hops for row in rows if row.made is not None]
    lost = [each for each in made if not each.scored]
    shares = [found.metrics[f"eval/{n}_share"] for n in ("empty", "too_long", "failed")]
    assert sum(shares) == pytest.approx(len(lost) / len(made))
    assert found.line.startswith("step 20: hop 1: recall ")
    assert found.line.endswith("3 questions")
