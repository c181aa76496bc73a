"""An exported folder is a retriever: `retriever.json` and the two models are all a search needs."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qrag_jax.metrics.stopping import tune
from qrag_jax.runtime.retriever_config import NAME, RetrieverConfig
from qrag_jax.systems import towers_export
from qrag_jax.systems.passage_encoder import PassageEncoder
from qrag_jax.systems.plain_search import QuestionTower
from qrag_jax.systems.q_rag_config import load_config
from qrag_jax.systems.saved_run import SavedRun
from tests.entry_points import FLOAT32, SAMPLES, Commands, log_rows
from tests.systems.parts import chunks_of, opened

sentence_transformers = pytest.importorskip("sentence_transformers")

TOLERANCE = 1e-5
# Settings that the run was not trained with; a retriever plays with any.
OTHERWISE = (
    FLOAT32,
    "--config.env.positions=relative",
    "--config.env.sort_by_index=True",
    "--config.env.max_steps=4",
)


class Search:
    """A greedy search as a user writes it, from the folder alone, with NumPy."""

    def __init__(self, folder: Path) -> None:
        self.config = RetrieverConfig.read(folder)
        self.config.check_weights(folder)
        self.state, self.chunk = (
            sentence_transformers.SentenceTransformer(str(folder / tower.folder), device="cpu")
            for tower in (self.config.state, self.config.chunk)
        )

    def first(self, text: str, tokens: int) -> str:
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        places = self.state.tokenizer(text, **options)["offset_mapping"]
        return text[: places[tokens - 1][1]] if len(places) > tokens else text

    def text(self, question: str, chunks: list[str], taken: list[int]) -> str:
        config = self.config
        order = sorted(taken) if config.sort_by_index else taken
        parts = [self.first(chunks[i], config.max_chunk_tokens_in_state) for i in order]
        return config.separator.join([self.first(question, config.max_question_tokens), *parts])

    def places(self, chunks: int, taken: list[int]) -> np.ndarray:
        rule = self.config.positions
        if rule.kind == "none":
            return np.zeros(chunks, int)
        assert rule.kind == "relative"
        bounds = [0, *sorted(taken), chunks]
        parts = []
        for j, (start, end) in enumerate(itertools.pairwise(bounds)):
            count = end - start
            parts.append(rule.step * j + np.arange(count) * rule.span // max(count - 1, 1))
        return np.concatenate(parts)

    def rotated(self, vectors: np.ndarray, places: np.ndarray) -> np.ndarray:
        half = self.config.chunk.width // 2
        angle = places[:, None] * self.config.positions.theta ** (-np.arange(0, half, 2) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        pairs = vectors.reshape(len(vectors), 2, half // 2, 2)
        even, odd = pairs[..., 0], pairs[..., 1]
        turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        return turned.reshape(vectors.shape)

    def play(self, question: str, chunks: list[str]) -> tuple[list[int], list[float]]:
        rules = self.config.search
        vectors, stop = self.chunk.encode(chunks), self.chunk.encode("")
        taken: list[int] = []
        values: list[float] = []
        least = -math.inf if rules.stop_threshold is None else rules.stop_threshold
        while len(taken) < min(rules.max_steps, len(chunks)):
            state = self.state.encode(self.text(question, chunks, taken))
            q = self.rotated(vectors, self.places(len(chunks), taken)) @ state
            q[taken] = -np.inf
            best = int(q.argmax())
            if q[best] <= least or (rules.stop_action and stop @ state > q[best]):
                break
            taken.append(best)
            values.append(float(q[best]))
        return taken, values


def check_search(folder: Path, workdir: Path, rows: list[dict[str, Any]], cache: str) -> None:
    search = Search(folder)
    assert len(rows) == SAMPLES
    for row in rows:
        taken, values = search.play(row["question"], chunks_of(workdir, row["question"], cache))
        assert taken == row["pred_idx"]
        np.testing.assert_allclose(values, row["q_values"], atol=TOLERANCE)


def test_steps_are_those_of_the_evaluation(
    scored_run: Path, exported: Path, commands: Commands
) -> None:
    rows = log_rows(scored_run)
    assert all(len(row["pred_idx"]) == 2 for row in rows)
    check_search(exported, scored_run, rows, commands.environment["QRAG_CACHE"])


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_order_and_the_stop_action_are_those_of_the_evaluation(
    scored_run: Path, commands: Commands, tmp_path: Path
) -> None:
    stops = (*OTHERWISE, "--config.env.stop_action=True", "--config.env.positions=none")
    shared = (f"--workdir={scored_run}", *stops, "--checkpoint=last")
    commands.succeed("evaluate", *shared, f"--samples={SAMPLES}", f"--out={tmp_path / 'eval'}")
    (log,) = tmp_path.glob("eval/last-*/eval_seed42.jsonl")
    commands.succeed("export", *shared, f"--out={tmp_path / 'out'}")
    rows = read_log(log)
    assert {len(row["pred_idx"]) for row in rows} > {0}  # some stopped at once, some went on
    check_search(tmp_path / "out", scored_run, rows, commands.environment["QRAG_CACHE"])


def test_positions_and_a_tuned_threshold_are_those_of_the_evaluation(
    scored_run: Path, commands: Commands, tmp_path: Path
) -> None:
    workdir = Path(shutil.copytree(scored_run, tmp_path / "run"))
    shutil.rmtree(workdir / "eval")
    shared = (f"--workdir={workdir}", *OTHERWISE, "--checkpoint=last")
    commands.succeed("evaluate", *shared, f"--samples={SAMPLES}")
    (log,) = workdir.glob("eval/last-*/eval_seed42.jsonl")
    assert any(row["pred_idx"] != sorted(row["pred_idx"]) for row in read_log(log))
    tune(log)
    threshold = json.loads((log.parent / "stopping.json").read_text())["threshold"]
    commands.succeed("export", *shared, f"--out={tmp_path / 'out'}")
    assert RetrieverConfig.read(tmp_path / "out").search.stop_threshold == threshold

    stops = f"--config.eval.stop_threshold={threshold!r}"
    commands.succeed("evaluate", *shared, stops, f"--samples={SAMPLES}")
    rows = read_log(log.with_name(f"planned_{log.name}"))
    assert any(len(row["pred_idx"]) < 4 for row in rows)
    check_search(tmp_path / "out", workdir, rows, commands.environment["QRAG_CACHE"])

    # A threshold that was tuned for other weights is left out.
    run = opened(workdir)
    params, _ = run.trained("last")
    label = log.parent.name
    assert towers_export.stop_threshold(run, label, params) == threshold
    assert towers_export.stop_threshold(run, "best-1", params) is None
    assert towers_export.stop_threshold(run, label, run.untrained()) is None


def test_one_step_searches_join_titles_as_the_export_says(exported: Path, tmp_path: Path) -> None:
    out = shutil.copytree(exported, tmp_path / "export")
    found = json.loads((out / NAME).read_text()) | {"title_separator": ". "}
    (out / NAME).write_text(json.dumps(found))
    encoder = PassageEncoder.of_folder(str(out / "chunk"))
    assert encoder.title_separator == QuestionTower(encoder).title_separator == ". "
    assert PassageEncoder.of_folder(str(exported / "chunk")).digest() != encoder.digest()


def test_prefixes_and_a_scale_behind_the_norm_are_in_the_file(
    scored_run: Path, tmp_path: Path
) -> None:
    config = load_config(scored_run / "config.json")
    config.encoder.update(normalise=True, scale=3.0, state_prefix="query: ")
    config.eval.update(beam=4, beam_score="sum")
    config.encoder.path = "/home/me/models/e5"
    towers_export.export(SavedRun.open(scored_run, config), "last", tmp_path / "out")
    found = RetrieverConfig.read(tmp_path / "out")
    assert (found.state.prefix, found.chunk.prefix) == ("query: ", "")
    assert (found.state.scale, found.chunk.scale) == (3.0, 3.0)
    assert (found.search.beam, found.search.beam_score) == (4, "sum")
    assert found.base_model == "e5"
