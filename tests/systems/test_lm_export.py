"""Exported language models: transformers and PEFT compute what the trainer does."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qrag_jax.errors import InputError
from qrag_jax.models.pretrained_lm import load_language_model
from qrag_jax.systems.lm_export import export_language_model
from qrag_jax.systems.rlvr_config import load_config
from tests.entry_points import Commands, refusal

pytestmark = pytest.mark.long

SMALL = (
    "--config=configs/rlvr.py:tiny",
    "--config.model.tiny.layers=1",
    "--config.model.tiny.copies=False",
    "--config.model.tiny.hidden=32",
    "--config.model.tiny.intermediate=32",
    "--config.tools.turn_tokens=12",
    "--config.questions.bridge_train=24",
    "--config.questions.bridge_dev=4",
    "--config.eval.part=all",
    "--config.stages=sft",
    "--config.sft.steps=3",
    "--config.train.eval_every=3",
)
RANK = ("--config.model.lora.rank=4",)
TOKENS = np.array([[5, 70, 300, 12, 44, 120, 7, 9]], np.int32)


@pytest.fixture(scope="module", params=["whole", "adapters"])
def run(
    request: pytest.FixtureRequest, commands: Commands, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    workdir = tmp_path_factory.mktemp("lm") / f"of-{request.param}"
    adapters = RANK if request.param == "adapters" else ()
    commands.succeed("train", *SMALL, *adapters, f"--workdir={workdir}")
    return workdir


def logits_of(folder: Path) -> np.ndarray:
    loaded = load_language_model(folder)
    lengths = jnp.array([TOKENS.shape[1]])
    return np.asarray(loaded.model.logits(loaded.params, jnp.asarray(TOKENS), lengths))


def test_other_libraries_read_what_was_trained(
    run: Path, commands: Commands, tmp_path: Path
) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    out = tmp_path / "exported"
    commands.succeed("export", f"--workdir={run}", "--checkpoint=last", f"--out={out}")
    ours = logits_of(out)
    assert np.abs(ours - logits_of(run / "model")).max() > 1e-3  # it has learned
    kind = transformers.AutoModelForCausalLM
    with torch.no_grad():
        ids = torch.tensor(TOKENS).long()
        theirs = kind.from_pretrained(out).eval()(ids).logits.numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
        if (out / "adapter").exists():
            peft = pytest.importorskip("peft")
            base = kind.from_pretrained(run / "model")
            adapted = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
            np.testing.assert_allclose(ours, adapted(ids).logits.numpy(), atol=1e-4)
    assert (out / "adapter").exists() == run.name.endswith("adapters")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == load_language_model(run / "model").tokenizer.chat_template
    card = (out / "README.md").read_text()
    assert "last checkpoint of step 3" in card
    assert str(run.parent) not in card
    assert "## Scores" not in card


def test_the_card_has_the_scores_of_its_checkpoint(run: Path, tmp_path: Path) -> None:
    each = {key: {"mean": 0.25} for key in ("em", "f1", "recall", "citation", "reward")}
    scores = {"bm25": {"last checkpoint of step 3": {"all": each}, "untrained": {"all": {}}}}
    summary = run / "eval" / "summary.json"
    summary.parent.mkdir(exist_ok=True)
    summary.write_text(json.dumps({"scores": scores}))
    config = load_config(run / "config.json")
    export_language_model(run, config, "last", tmp_path / "scored")
    card = (tmp_path / "scored" / "README.md").read_text()
    assert "| bm25 | 0.250 | 0.250 | 0.250 | 0.250 | 0.250 |" in card
    summary.write_text("[]")
    with pytest.raises(InputError, match=r"summary\.json is not a summary of qrag_jax\.evaluate"):
        export_language_model(run, config, "last", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    summary.unlink()


def test_refusals(run: Path, commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    told = refusal(commands.run("export", f"--workdir={run}", f"--out={tmp_path}"))
    assert "exists and is not an empty folder" in told
    assert (tmp_path / "file").read_text() == "mine"
