"""Exported towers give sentence-transformers the vectors of training, and a card tells of them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qrag_jax.errors import InputError
from qrag_jax.metrics.stopping import REPORT
from qrag_jax.runtime.retriever_config import NAME, RetrieverConfig
from qrag_jax.systems import saved_run
from qrag_jax.systems.config import load_config
from qrag_jax.systems.indexing import PassageEncoder
from qrag_jax.systems.saved_run import SavedRun, weights_digest
from tests.entry_points import FLOAT32, SAMPLES, SHARED, Commands, json_lines, log_rows, refusal
from tests.systems.parts import chunks_of, opened

pytest.importorskip("sentence_transformers")
huggingface_hub = pytest.importorskip("huggingface_hub")


def test_the_code_of_the_card_takes_the_steps_of_the_evaluation(
    scored_run: Path, exported: Path, commands: Commands
) -> None:
    rows = log_rows(scored_run)
    assert len(rows) == SAMPLES
    code = (exported / "README.md").read_text().partition("```python\n")[2].partition("\n```")[0]
    lines = ["import json"]
    for row in rows:
        chunks = chunks_of(scored_run, row["question"], commands.environment["QRAG_CACHE"])
        assert [chunks[i] for i in row["pred_idx"]] == row["pred_texts"]
        lines += [f"question, chunks = {row['question']!r}, {chunks!r}", code]
        lines += ["print(json.dumps([taken, float(q.max())]))"]
    told = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=exported,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},  # with torch, which the card's reader has
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for line, row in zip(told, rows, strict=True):
        taken, value = json.loads(line)
        assert taken == row["pred_idx"]
        assert value == pytest.approx(row["q_values"][-1], abs=1e-5)


def test_the_hub_reads_the_scores_of_the_card(scored_run: Path, exported: Path) -> None:
    text = (exported / "README.md").read_text()
    assert all((exported / tower / "README.md").read_text() == text for tower in ("state", "chunk"))
    summary = json.loads((scored_run / "eval/summary.json").read_text())
    data = huggingface_hub.ModelCard.load(exported / "README.md").data
    assert (data.model_name, data.library_name) == ("my-run", "sentence-transformers")
    scores = {result.metric_type: result for result in data.eval_results}
    assert {"fact_em", "fact_f1", "fact_precision", "fact_recall", "recall@1"} <= scores.keys()
    for name, found in scores.items():
        interval = summary["trained"]["intervals"][name]
        assert found.metric_value == pytest.approx(interval["mean"], abs=5e-5)
        for end in ("low", "high"):
            assert found.metric_args[end] == pytest.approx(interval[end], abs=5e-5)
        assert (found.dataset_type, found.dataset_split) == ("hotpotqa", "dev")
        assert found.dataset_args == {"questions": SAMPLES}
    config = load_config(scored_run / "config.json")
    saved = json.loads(text.partition("```json\n")[2].partition("\n```")[0])
    assert saved["pqn"] == config.pqn.to_dict()
    assert str(scored_run.parent) not in text  # no path of the machine, the data's cache included


def test_another_run_starts_from_both_towers(
    scored_run: Path, exported: Path, commands: Commands, tmp_path: Path
) -> None:
    """Its untrained weights score as the exported ones do."""
    fields = [word for word in SHARED if "train.steps" not in word]
    fields += ["--config.train.steps=1", f"--config.encoder.path={exported}", FLOAT32]
    commands.succeed("train", *fields, f"--workdir={tmp_path / 'run'}")
    scored = ("--samples=4", "--checkpoint=last", FLOAT32, f"--out={tmp_path / 'scores'}")
    commands.succeed("evaluate", f"--workdir={tmp_path / 'run'}", *scored)
    rows = json_lines(tmp_path / "scores/untrained/eval_seed42.jsonl")
    for found, expected in zip(rows, log_rows(scored_run), strict=True):
        assert found["pred_idx"] == expected["pred_idx"]
        assert found["q_values"] == pytest.approx(expected["q_values"], abs=1e-4)
    prefixed = commands.run(
        "train", *fields, "--config.encoder.chunk_prefix=a ", f"--workdir={tmp_path / 'other'}"
    )
    assert "config.encoder.chunk_prefix" in refusal(prefixed)


def test_untrained_weights_are_exported_on_demand_alone(
    untrained_best: Path, commands: Commands, tmp_path: Path
) -> None:
    out, run = tmp_path / "out", f"--workdir={untrained_best}"
    # Nor are they used without a word to embed a corpus or to search one.
    for command, *given in (("export", f"--out={out}"), ("index", "--index=x"), ("search", "who?")):
        more = ["--index=x"] if command == "search" else []
        assert "--checkpoint=last" in refusal(commands.run(command, run, *more, *given))
    assert not out.exists()
    commands.succeed("export", run, f"--out={out}", "--checkpoint=best")
    assert "untrained weights" in (out / "README.md").read_text()
    saved_run.export(opened(untrained_best), "last", tmp_path / "last")
    assert "untrained weights" not in (tmp_path / "last" / "README.md").read_text()


def test_refusals_leave_nothing(scored_run: Path, commands: Commands, tmp_path: Path) -> None:
    workdir = Path(shutil.copytree(scored_run, tmp_path / "run"))
    assert "--out" in refusal(commands.run("export", f"--workdir={workdir}"))
    assert "--workdir" in refusal(commands.run("export", "--out=x"))
    (tmp_path / "file").write_text("x")
    run = opened(workdir)
    with pytest.raises(InputError, match="file"):
        saved_run.export(run, "last", tmp_path / "file")
    loaded = dataclasses.replace(run.loaded, model_config={"model_type": "t5"})
    with pytest.raises(InputError, match="t5"):
        saved_run.export(dataclasses.replace(run, loaded=loaded), "last", tmp_path / "out")
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(InputError, match="checkpoint"):
        saved_run.export(run, "last", tmp_path / "deep" / "out")
    assert not (workdir / "checkpoints").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_one_step_searches_join_titles_as_the_export_says(exported: Path, tmp_path: Path) -> None:
    out = shutil.copytree(exported, tmp_path / "export")
    found = json.loads((out / NAME).read_text()) | {"title_separator": ". "}
    (out / NAME).write_text(json.dumps(found))
    encoder = PassageEncoder.of_folder(str(out / "chunk"))
    assert encoder.title_separator == ". "
    assert PassageEncoder.of_folder(str(exported / "chunk")).digest() != encoder.digest()


def test_prefixes_and_a_scale_behind_the_norm_are_in_the_file(
    scored_run: Path, tmp_path: Path
) -> None:
    config = load_config(scored_run / "config.json")
    config.encoder.update(normalise=True, scale=3.0, state_prefix="query: ")
    config.eval.update(beam=4, beam_score="sum")
    config.encoder.path = "/home/me/models/e5"
    saved_run.export(SavedRun.open(scored_run, config), "last", tmp_path / "out")
    found = RetrieverConfig.read(tmp_path / "out")
    assert (found.state.prefix, found.chunk.prefix) == ("query: ", "")
    assert (found.state.scale, found.chunk.scale) == (3.0, 3.0)
    assert (found.search.beam, found.search.beam_score) == (4, "sum")
    assert found.base_model == "e5"


def test_a_threshold_that_was_tuned_for_other_weights_is_left_out(
    scored_run: Path, tmp_path: Path
) -> None:
    run = opened(Path(shutil.copytree(scored_run, tmp_path / "run")))
    params, step = run.trained("last")
    label = f"last-{step}"
    report = {"threshold": 0.5, "provenance": {"weights": weights_digest(params)}}
    (run.workdir / "eval" / label / REPORT).write_text(json.dumps(report))
    assert saved_run.stop_threshold(run, label, params) == 0.5
    assert saved_run.stop_threshold(run, "best-1", params) is None
    assert saved_run.stop_threshold(run, label, run.untrained()) is None
