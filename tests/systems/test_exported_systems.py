"""Exported models of the systems that write queries: what is loaded is what was trained."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from qrag_jax.errors import InputError
from qrag_jax.models.compute.lora import Adapted, attach
from qrag_jax.runtime.run import Run
from qrag_jax.systems import deepretrieval, leret
from qrag_jax.systems.deepretrieval_config import default_config
from qrag_jax.systems.deepretrieval_scoring import DEEPRETRIEVAL, POOLED
from qrag_jax.systems.leret_scoring import LERET
from qrag_jax.systems.lm_card import language_model_card
from qrag_jax.systems.lm_export import EXPORTED, export_language_model
from tests.systems import query_play, rewrite_play

pytestmark = pytest.mark.long

STEP = 5
FLOAT32 = {"model__dtype": "float32"}  # as torch computes; "auto" may be bfloat16
TOKENS = np.array([[5, 70, 300, 12, 44, 120, 7, 9]], np.int32)
HEAD = "PPO's critic, with its value head, is not part of this model."
OF: dict[str, tuple[ModuleType, Callable[..., ConfigDict]]] = {
    "leret": (leret, query_play.small),
    "deepretrieval": (deepretrieval, rewrite_play.small),
}
WAYS = {
    "leret": {},
    "leret with adapters": {"model__lora__rank": 4},
    "deepretrieval": {"engine__email": "me@example.org"},
    "deepretrieval with adapters": {"model__lora__rank": 4},
    "deepretrieval by grpo": {"algorithm": "grpo"},
}


@dataclasses.dataclass(frozen=True)
class Kept:
    """A run with a checkpoint.

    Attributes:
        system: its name.
        ours: logits of `TOKENS` by the policy's parameters, as the system has them.
    """

    system: str
    workdir: Path
    config: ConfigDict
    ours: np.ndarray


def moved(tree: Any, seed: int) -> Any:
    """As after some training."""
    rng = np.random.default_rng(seed)

    def leaf(given: jax.Array) -> jax.Array:
        noise = rng.standard_normal(given.shape).astype(given.dtype)
        return jax.device_put(given + 0.1 * noise, given.sharding)

    return jax.tree.map(leaf, tree)


@pytest.fixture(scope="module", params=WAYS)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kept:
    name, _, way = request.param.partition(" ")
    module, small = OF[name]
    workdir, config = (
        tmp_path_factory.mktemp("run") / f"of {name}",
        small(**FLOAT32, **WAYS[request.param]),
    )
    with Run.open(workdir, 0.0) as run, module.open_system(config, run) as system:
        state = system.first_state()
        state = state._replace(params=moved(state.params, 1), critic=moved(state.critic, 2))
        run.checkpoints.save_last(STEP, state, {})
        run.checkpoints.wait()
        model, params = system.inputs.model.loaded.model, state.params
        assert (state.critic is not None) == (name == "deepretrieval" and way != "by grpo")
        if system.base:
            params = attach(Adapted(system.base[0], params), model.lora_scale)
        ours = model.logits(params, jnp.asarray(TOKENS), jnp.array([TOKENS.shape[1]]))
    return Kept(name, workdir, config, np.asarray(ours))


def test_transformers_computes_what_was_trained(kept: Kept, tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    kind, out = transformers.AutoModelForCausalLM, tmp_path / "out"
    export_language_model(kept.workdir, kept.config, "last", out)
    with torch.no_grad():
        ids = torch.tensor(TOKENS).long()
        base = kind.from_pretrained(kept.workdir / "model").eval()
        assert np.abs(kept.ours - base(ids).logits.numpy()).max() > 0.05
        theirs = kind.from_pretrained(out).eval()(ids).logits.numpy()
        np.testing.assert_allclose(theirs, kept.ours, atol=1e-4)
        if kept.config.model.lora.rank:
            peft = pytest.importorskip("peft")
            adapted = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
            np.testing.assert_allclose(adapted(ids).logits.numpy(), kept.ours, atol=1e-4)
    assert (out / "adapter").exists() == bool(kept.config.model.lora.rank)


def test_the_card_of_an_export(kept: Kept, tmp_path: Path) -> None:
    export_language_model(kept.workdir, kept.config, "last", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith(f"# of {kept.system}\n")
    assert f"({EXPORTED[kept.system].title}): last checkpoint of step {STEP}. It started" in card
    assert "started from a tiny decoder, made for the run." in card
    if kept.system == "leret":
        assert "`config.writing.prompt=bare_query`, without examples or marks, and shows" in card
        assert "shows the first 8 words of each passage found so far. It was trained on" in card
        assert "`config.questions.train=bridge`, by 2 queries of 4 passages each." in card
    else:
        assert "`config.writing.prompt=bare_rewrite`, and its output is the query alone." in card
        assert "It was trained on `config.queries.train=talkative`." in card
    by_ppo = kept.system == "deepretrieval" and kept.config.algorithm == "ppo"
    assert (HEAD in card) == by_ppo
    assert "me@example.org" not in card
    assert str(kept.workdir.parent) not in card
    assert "## Scores" not in card


def test_no_such_checkpoint(kept: Kept, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="best holds no checkpoint; train first or give another"):
        export_language_model(kept.workdir, kept.config, "best", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_from_before_training_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = query_play.small(**FLOAT32)
    with Run.open(tmp_path / "run", 0.0) as run, leret.open_system(config, run) as system:
        run.checkpoints.save_last(0, system.first_state(), {})
        run.checkpoints.wait()
    export_language_model(tmp_path / "run", config, "last", tmp_path / "out")
    assert "the last checkpoint is of step 0, so this is the model as it" in capsys.readouterr().out


def test_an_output_in_tags() -> None:
    config = default_config()
    config.stages = ("rl",)
    config.writing.update(prompt="/home/me/mine.txt", form="tagged")
    config.queries.train = "/home/me/scifact,train;/home/me/nfcorpus,train"
    config.model.path = "/home/me/models/chat"
    config.engine.url = config.llm.url = "http://within.example.org:8000"
    card = language_model_card(DEEPRETRIEVAL, Path("runs/none"), config, "best")
    assert "`config.writing.prompt=mine.txt`, and its output is `<think>…</think><answer>" in card
    assert "trained on `config.queries.train=scifact,train;nfcorpus,train`" in card
    assert "It started from chat." in card
    assert HEAD in card
    assert "/home" not in card
    assert "within.example.org" not in card
    for other in ({"ppo.critic": "none"}, {"stages": ("script",)}):
        config.update_from_flattened_dict(other)
        assert HEAD not in language_model_card(DEEPRETRIEVAL, Path("runs/none"), config, "best")
        config.update_from_flattened_dict({"ppo.critic": "own"})


def summary_in(workdir: Path, content: Any) -> None:
    path = workdir / "eval" / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def means(**values: float) -> dict[str, dict[str, float]]:
    return {name.replace("_at_", "@"): {"mean": value} for name, value in values.items()}


def test_scores_of_every_collection(tmp_path: Path) -> None:
    """A collection whose searches all failed has no scores, and no row."""
    config, main = default_config(), "best checkpoint of step 60"
    own = {"scored": 9, "scores": {main: means(ndcg_at_10=0.5, rr=0.25), "untrained": {}}}
    none = {"scored": 0, "scores": {}}
    summary_in(tmp_path, {"collections": {"one": own, "two": none}, "pooled": own})
    card = language_model_card(DEEPRETRIEVAL, tmp_path, config, main)
    assert "| collection | ndcg@10 | rr |\n|---|---|---|\n" in card
    assert (
        f"\n| one, 9 queries | 0.500 | 0.250 |\n| {POOLED}, 9 queries | 0.500 | 0.250 |\n" in card
    )
    assert "| two" not in card
    summary_in(tmp_path, {"collections": {"one": own}, "pooled": own})
    assert POOLED not in language_model_card(DEEPRETRIEVAL, tmp_path, config, main)
    for other in ("last checkpoint of step 60", "best checkpoint of step 6"):
        assert "## Scores" not in language_model_card(DEEPRETRIEVAL, tmp_path, config, other)


@pytest.mark.parametrize("system", [LERET, DEEPRETRIEVAL], ids=lambda each: each.name)
@pytest.mark.parametrize("content", [[], {"scores": {}}, {"scores": [], "collections": 3}])
def test_no_summary(system: Any, content: Any, tmp_path: Path) -> None:
    summary_in(tmp_path, content)
    config = OF[system.name][1]()
    with pytest.raises(InputError, match=r"summary\.json is not a summary of qrag_jax\.evaluate"):
        language_model_card(system, tmp_path, config, "best checkpoint of step 60")
