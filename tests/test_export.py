"""Exported towers and language models: other libraries compute what was trained."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from configs import hotpotqa
from qrag_jax import systems
from qrag_jax.errors import InputError
from qrag_jax.export import export_language_model, language_model_card
from qrag_jax.metrics.stopping import REPORT
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.models.first_encoder import EncoderConfig, load_encoder, with_new_adapters
from qrag_jax.models.pretrained import LoadedEncoder, LoraConfig
from qrag_jax.runtime.retriever_config import NAME, RetrieverConfig
from qrag_jax.systems.config import load_config
from qrag_jax.systems.indexing import PassageEncoder
from qrag_jax.systems.q_rag import run as q_rag_run
from qrag_jax.systems.q_rag.run import SavedRun, weights_digest
from tests.entry_points import FLOAT32, SAMPLES, SHARED, Commands, json_lines, log_rows, refusal
from tests.reference import logits
from tests.support.parity import vectors_of
from tests.support.small_models import write_small_model
from tests.systems.parts import chunks_of, opened
from tests.systems.small_runs import SMALL, opened_alone

sentence_transformers = pytest.importorskip("sentence_transformers")
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
        lines += [f"question, chunks = {row['question']!r}, {chunks!r}", code]
        lines += ["print(json.dumps([taken, float(q.max())]))"]
    output = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=exported,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},  # with torch, which the card's reader has
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for line, row in zip(output, rows, strict=True):
        taken, value = json.loads(line)
        assert taken == row["pred_idx"]
        assert value == pytest.approx(row["q_values"][-1], abs=1e-5)


def test_the_hub_reads_the_scores_of_the_card(scored_run: Path, exported: Path) -> None:
    text = (exported / "README.md").read_text()
    assert all((exported / tower / "README.md").read_text() == text for tower in ("state", "chunk"))
    summary = json.loads((scored_run / "eval/summary.json").read_text())
    data = huggingface_hub.ModelCard.load(exported / "README.md").data
    scores = {result.metric_type: result for result in data.eval_results}
    assert {"fact_em", "fact_f1", "recall@1"} <= scores.keys()
    for name, found in scores.items():
        interval = summary["scores"]["trained"][name]
        assert found.metric_value == pytest.approx(interval["mean"], abs=5e-5)
        assert (found.dataset_type, found.dataset_split) == ("hotpotqa", "dev")
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
    prefixed = (*fields, "--config.encoder.chunk_prefix=a ", f"--workdir={tmp_path / 'other'}")
    assert "config.encoder.chunk_prefix" in refusal(commands.run("train", *prefixed))


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


def test_refusals_leave_nothing(scored_run: Path, commands: Commands, tmp_path: Path) -> None:
    workdir = Path(shutil.copytree(scored_run, tmp_path / "run"))
    assert "--out" in refusal(commands.run("export", f"--workdir={workdir}"))
    (tmp_path / "file").write_text("x")
    run = opened(workdir)
    with pytest.raises(InputError, match="file"):
        run.export("last", tmp_path / "file")
    shutil.rmtree(workdir / "checkpoints")
    with pytest.raises(InputError, match="checkpoint"):
        run.export("last", tmp_path / "deep" / "out")
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
    config.eval.update(beam=4, beam_score="sum", batch_size=3)  # which no export reads
    SavedRun.open(scored_run, config).export("last", tmp_path / "out")
    found = RetrieverConfig.read(tmp_path / "out")
    assert (found.state.prefix, found.chunk.prefix) == ("query: ", "")
    assert (found.state.scale, found.chunk.scale) == (3.0, 3.0)
    assert (found.search.beam, found.search.beam_score) == (4, "sum")


def test_a_threshold_that_was_tuned_for_other_weights_is_left_out(
    scored_run: Path, tmp_path: Path
) -> None:
    run = opened(Path(shutil.copytree(scored_run, tmp_path / "run")))
    params, step = run.trained("last")
    label = f"last-{step}"
    report = {"threshold": 0.5, "provenance": {"weights": weights_digest(params)}}
    (run.workdir / "eval" / label / REPORT).write_text(json.dumps(report))
    assert q_rag_run.stop_threshold(run, label, params) == 0.5
    assert q_rag_run.stop_threshold(run, label, run.untrained()) is None


# ---------------------------------------------------------------- towers and models alone

TOLERANCE = 1e-5


def model(folder: Path) -> Any:
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def two_towers(loaded: LoadedEncoder) -> Any:
    """As after training: the second tower has moved away from the first."""
    rng = np.random.default_rng(0)

    def moved(leaf: np.ndarray) -> np.ndarray:
        return leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32)

    return jax.tree.map(lambda leaf: np.stack([leaf, moved(leaf)]), loaded.params)


@pytest.fixture
def config() -> ml_collections.ConfigDict:
    config = hotpotqa.get_config("tiny")
    config.data.update(max_question_tokens=9, max_chunk_tokens=20, max_chunk_tokens_in_state=9)
    return config


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bert", {"pooling": "cls", "normalise": True, "scale": 3.0}),
        ("xlm-roberta", {"pooling": "cls", "state_prefix": "query: ", "chunk_prefix": "passage: "}),
        ("qwen3", {"pooling": "mean", "state_prefix": "Find the thing.\nQuery:"}),
        ("nomic_bert", {"pooling": "last"}),
    ],
)
def test_towers_keep_their_vectors(
    family: str, settings: dict[str, Any], config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    settings = {"normalise": False, "scale": 0.1} | settings
    loaded = load_encoder(
        write_small_model(family, tmp_path / "model"), EncoderConfig(dtype="float32", **settings)
    )
    params = two_towers(loaded)
    separator = loaded.tokenizer.backend.id_to_token(loaded.encoder.sep_id)
    encoder, form = loaded.encoder, q_rag_run.row_form(loaded.encoder, config)
    for name, opening, parts in (
        ("state", encoder.state_opening, [["the moth"], ["the moth", "a b"], ["b", "a", "a"]]),
        # A separator that a chunk's own text has is text.
        ("chunk", encoder.chunk_opening, [["the moth"], ["b a"], [""], [f"a {separator} b"]]),
    ):
        number = q_rag_run.TOWERS[name]
        q_rag_run.write_tower(loaded, name, form, params, tmp_path / name)
        expected = vectors_of(loaded, parts, encoder.tower(params, number), opening)
        found = model(tmp_path / name).encode([separator.join(texts) for texts in parts])
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
        assert np.abs(expected).max() > 100 * TOLERANCE
        # Only a factor behind a norm is a module, and the loader applies none twice.
        modules = (tmp_path / name / "modules.json").read_text()
        assert ("Dense" in modules) == settings["normalise"]
        again = load_encoder(tmp_path / name)
        back = vectors_of(again, [parts[0]], opening=opening)
        np.testing.assert_allclose(back, expected[:1], atol=TOLERANCE)


def test_adapters_are_merged(config: ml_collections.ConfigDict, tmp_path: Path) -> None:
    folder = write_small_model("qwen3", tmp_path / "model")
    loaded = with_new_adapters(
        load_encoder(folder, EncoderConfig(dtype="float32", scale=1.0)), LoraConfig(3, 6.0), seed=0
    )
    rng = np.random.default_rng(1)
    trained = jax.tree.map(
        lambda leaf: rng.standard_normal((2, *leaf.shape)).astype(np.float32) / 4, loaded.adapters
    )
    params = Adapted(loaded.params, trained)
    encoder, form = loaded.encoder, q_rag_run.row_form(loaded.encoder, config)
    for name, number in q_rag_run.TOWERS.items():
        q_rag_run.write_tower(loaded, name, form, params, tmp_path / name)
        found = model(tmp_path / name).encode(["the moth", "b a"])
        opening = (encoder.state_opening, encoder.chunk_opening)[number]
        own = encoder.tower(params, number)
        expected = vectors_of(loaded, ["the moth", "b a"], own, opening)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_a_tokenizer_that_reads_joined_parts_otherwise_is_refused(
    config: ml_collections.ConfigDict, tmp_path: Path
) -> None:
    folder = write_small_model("xlm-roberta", tmp_path / "model")
    # The first word of a text gets its space, the first one behind a separator does not.
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    for name, fields in (
        ("tokenizer.json", {"pre_tokenizer": first}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(known | fields))
    loaded = load_encoder(folder)
    both, form = two_towers(loaded), q_rag_run.row_form(loaded.encoder, config)
    q_rag_run.write_tower(loaded, "chunk", form, both, tmp_path / "chunk")
    with pytest.raises(InputError, match=r"state: .*'Who wrote"):
        q_rag_run.write_tower(loaded, "state", form, both, tmp_path / "state")


def test_transformers_and_peft_compute_what_was_trained(tmp_path: Path) -> None:
    """Adapters of a run by PPO, whose critic is left out."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    tokens = np.array([[5, 70, 300, 12, 44, 120, 7, 9]], np.int32)
    fields = {"model__dtype": "float32", "model__lora__rank": 4, "engine__email": "me@example.org"}
    workdir, out, rng = tmp_path / "run", tmp_path / "out", np.random.default_rng(1)
    config = SMALL["deepretrieval"](**fields)

    def moved(leaf: jax.Array) -> jax.Array:
        noise = rng.standard_normal(leaf.shape).astype(leaf.dtype)
        return jax.device_put(leaf + 0.1 * noise, leaf.sharding)

    with opened_alone(config, workdir) as (system, run):
        state = system.first_state()
        state = state._replace(params=jax.tree.map(moved, state.params))
        run.checkpoints.save_last(5, state, {})
        run.checkpoints.wait()
        lm = system.inputs.model.model
        params = attach(Adapted(system.base[0], state.params), lm.lora_scale)
        ours = np.asarray(logits(lm, params, jnp.asarray(tokens), jnp.array([tokens.shape[1]])))
    export_language_model(systems.kind(config), workdir, config, "last", out)
    kind = transformers.AutoModelForCausalLM
    with torch.no_grad():
        ids = torch.tensor(tokens).long()
        base = kind.from_pretrained(workdir / "model").eval()
        assert np.abs(ours - base(ids).logits.numpy()).max() > 0.05
        whole = kind.from_pretrained(out).eval()
        np.testing.assert_allclose(whole(ids).logits.numpy(), ours, atol=1e-4)
        adapted = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
        np.testing.assert_allclose(adapted(ids).logits.numpy(), ours, atol=1e-4)
    assert "me@example.org" not in (out / "README.md").read_text()


def test_a_card_shows_no_folder_or_server_of_the_training_machine() -> None:
    config = SMALL["deepretrieval"](stages=("rl",))
    config.writing.update(prompt="/home/me/mine.txt", form="tagged")
    config.queries.train = "/home/me/scifact,train;/home/me/nfcorpus,train"
    config.model.path = "/home/me/models/chat"
    config.engine.url = config.llm.url = "http://within.example.org:8000"
    card = language_model_card(systems.kind(config), Path("runs/none"), config, "best")
    for hidden in ("/home", "within.example.org"):
        assert hidden not in card
