"""Adapters in PEFT's format against the library itself, both ways, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from qrag_jax.errors import InputError
from qrag_jax.models.adapters import LoraConfig
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.pretrained import (
    LoadedEncoder,
    save_adapters,
    with_adapters,
    with_new_adapters,
)
from tests.models.conftest import torch_family

peft = pytest.importorskip("peft", reason="peft, the reference for adapter files, is missing")

FAMILIES = ("bert", "xlm-roberta", "qwen3", "new")
TARGETS = {
    "bert": ("query", "intermediate.dense"),
    "xlm-roberta": ("value", "output.dense"),  # attention's output as well
    "qwen3": ("q_proj", "v_proj", "down_proj"),
    "new": ("qkv_proj", "mlp.down_proj"),
}
MAPS = {
    "bert": (2, 6),
    "xlm-roberta": (3, 6),
    "qwen3": (3, 7),
    "new": (2, 4),
}  # by these targets, and in all
TOKENS = np.random.default_rng(0).integers(6, 40, (3, 9)).astype(np.int32)
LENGTHS = np.array([9, 4, 7], np.int32)


def theirs(family: str, targets: Any, out: Path) -> Any:
    """PEFT's model with random adapters, saved."""
    settings = peft.LoraConfig(
        r=3,
        lora_alpha=12,
        lora_dropout=0.05,
        target_modules=targets if isinstance(targets, str) else list(targets),
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    model = peft.get_peft_model(torch_family(family), settings).eval()
    model.save_pretrained(out)
    return model


def their_states(model: Any) -> np.ndarray:
    """Hidden states of the present tokens, one after the other."""
    mask = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        tokens = torch.tensor(TOKENS, dtype=torch.long)
        hidden = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    return hidden[mask].numpy()


def our_states(loaded: LoadedEncoder, adapters: Any) -> np.ndarray:
    stacked = {"layers": {n: {k: v[None] for k, v in m.items()} for n, m in adapters.items()}}
    tower = loaded.encoder.tower(Adapted(loaded.params, stacked), 0)
    hidden = loaded.encoder.module.hidden_states(tower, TOKENS, LENGTHS)
    return np.asarray(hidden)[np.arange(9) < LENGTHS[:, None]]


@pytest.mark.parametrize("targets", ["all-linear", "some"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_peft_give_its_outputs(family, targets, family_bases, tmp_path) -> None:
    wanted = TARGETS[family] if targets == "some" else targets
    model = theirs(family, wanted, tmp_path)
    loaded = with_adapters(family_bases[family], tmp_path)
    assert loaded.lora is not None
    assert (loaded.lora.rank, loaded.encoder.lora_scale) == (3, 4.0)
    assert (loaded.lora.dropout, loaded.encoder.lora_dropout) == (0.05, 0.05)
    maps = loaded.adapters["layers"]
    assert len(maps) == MAPS[family][targets == "all-linear"]
    expected = their_states(model)
    np.testing.assert_allclose(our_states(loaded, maps), expected, atol=1e-4)
    # The adapters do matter.
    plain = their_states(torch_family(family))
    assert np.abs(expected - plain).max() > 0.1


@pytest.mark.parametrize("targets", ["all-linear", "some"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_ours(family, targets, family_bases, tmp_path) -> None:
    wanted = TARGETS[family] if targets == "some" else targets
    loaded = with_new_adapters(family_bases[family], LoraConfig(4, 6.0, wanted, 0.1), seed=0)
    rng = np.random.default_rng(1)
    for leaves in loaded.adapters["layers"].values():
        assert not leaves["lora_b"].any()  # they change nothing at first
        assert 0 < np.abs(leaves["lora_a"]).max() <= leaves["lora_a"].shape[1] ** -0.5
        leaves["lora_b"] += 0.3 * rng.standard_normal(leaves["lora_b"].shape).astype(np.float32)
    save_adapters(loaded, loaded.adapters, tmp_path / "out")
    model = peft.PeftModel.from_pretrained(torch_family(family), tmp_path / "out").eval()
    settings = model.peft_config["default"]
    assert (settings.r, settings.lora_alpha, settings.lora_dropout) == (4, 6.0, 0.1)
    found = our_states(loaded, loaded.adapters["layers"])
    np.testing.assert_allclose(found, their_states(model), atol=1e-4)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert set(saved) == {name.replace(".default", "") for name in names}
    again = with_adapters(family_bases[family], tmp_path / "out")
    for name, leaves in loaded.adapters["layers"].items():
        for leaf, array in leaves.items():
            np.testing.assert_array_equal(again.adapters["layers"][name][leaf], array)


def test_names_of_a_model_with_a_head_are_read(family_bases, tmp_path) -> None:
    theirs("qwen3", TARGETS["qwen3"], tmp_path)
    plain = with_adapters(family_bases["qwen3"], tmp_path).adapters["layers"]
    file = tmp_path / "adapter_model.safetensors"
    start = "base_model.model."
    headed = {f"{start}model.{n.removeprefix(start)}": t for n, t in load_file(file).items()}
    save_file(headed, file)
    found = with_adapters(family_bases["qwen3"], tmp_path).adapters["layers"]
    np.testing.assert_array_equal(found["down"]["lora_a"], plain["down"]["lora_a"])


def refused(loaded: LoadedEncoder, folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        with_adapters(loaded, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_adapters_of_one_of_two_towers_are_saved(family_bases, tmp_path) -> None:
    loaded = with_new_adapters(family_bases["bert"], LoraConfig(2, 2.0), seed=0)
    other = with_new_adapters(family_bases["bert"], LoraConfig(2, 2.0), seed=1)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), loaded.adapters, other.adapters)
    for tower, expected in ((0, loaded.adapters), (1, other.adapters)):
        save_adapters(loaded, stacked, tmp_path / str(tower), tower)
        found = with_adapters(family_bases["bert"], tmp_path / str(tower)).adapters
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_adapters_of_another_base_are_refused(family_bases, tmp_path) -> None:
    theirs("qwen3", "all-linear", tmp_path)
    told = refused(family_bases["bert"], tmp_path)
    assert "since it names 'qwen3' and this encoder's model_type is 'bert'; give" in told
    path = tmp_path / "adapter_config.json"  # where the class is not said, names and sizes decide
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_mapping": None}))
    told = refused(family_bases["bert"], tmp_path)
    assert "made for another base, since layers.0.mlp.down_proj.lora_A.weight has no place" in told
    assert "(28 of 28 tensors do not fit)" in told
    wide = peft.LoraConfig(r=3, target_modules=["q_proj"])
    peft.get_peft_model(torch_family("qwen3", hidden_size=48), wide).save_pretrained(tmp_path)
    told = refused(family_bases["qwen3"], tmp_path)
    assert "layers.0.self_attn.q_proj.lora_A.weight has shape (3, 48), expected (3, 32)" in told
    assert "(2 of 4 tensors do not fit)" in told
    peft.get_peft_model(torch_family("qwen3", num_hidden_layers=3), wide).save_pretrained(tmp_path)
    told = refused(family_bases["qwen3"], tmp_path)
    assert "layers.2.self_attn.q_proj.lora_A.weight has no place" in told
    peft.get_peft_model(torch_family("qwen3", num_hidden_layers=1), wide).save_pretrained(tmp_path)
    assert "layers.1.self_attn.q_proj.lora_A.weight is missing (2 of 4" in refused(
        family_bases["qwen3"], tmp_path
    )


def test_a_base_of_the_same_names_and_sizes_is_told_from_ours(family_bases, tmp_path) -> None:
    told = "made for another base, since it names {!r} and this encoder's model_type is {!r}"
    theirs("bert", "all-linear", tmp_path / "theirs")
    told_of_theirs = refused(family_bases["xlm-roberta"], tmp_path / "theirs")
    assert told.format("bert", "xlm-roberta") in told_of_theirs
    loaded = with_new_adapters(family_bases["xlm-roberta"], LoraConfig(4, 6.0), seed=0)
    save_adapters(loaded, loaded.adapters, tmp_path / "ours")
    told_of_ours = refused(family_bases["bert"], tmp_path / "ours")
    assert told.format("xlm-roberta", "bert") in told_of_ours


def test_files_that_contradict_each_other_are_refused(family_bases, tmp_path) -> None:
    theirs("bert", "all-linear", tmp_path)
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    for field, value, told in (
        ("r", 4, "holds adapters of rank 3, but r is 4 in adapter_config.json; copy"),
        ("lora_alpha", 0, "r 3 or lora_alpha 0 is no number above 0"),
        ("lora_dropout", 1.0, "lora_dropout 1.0 is no number from 0 to below 1"),
        ("peft_type", "IA3", "peft_type is 'IA3'; give LORA adapters"),
    ):
        path.write_text(json.dumps(config | {field: value}))
        assert told in refused(family_bases["bert"], tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("use_rslora", True),
        ("rank_pattern", {"query": 2}),
        ("bias", "all"),
        ("layers_to_transform", 0),
        ("init_lora_weights", "pissa_niter_4"),  # PEFT changes the base's kernels
    ],
)
def test_other_kinds_of_adapters_are_refused(field, value, family_bases, tmp_path) -> None:
    theirs("bert", "all-linear", tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert f"adapter_config.json: {field} is {value!r}, which is not" in refused(
        family_bases["bert"], tmp_path
    )


def test_modules_that_are_left_out_in_some_layers_are_refused(family_bases, tmp_path) -> None:
    theirs("bert", "all-linear", tmp_path)
    path, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"exclude_modules": r".*\.0\..*"}))
    save_file({n: x for n, x in load_file(weights).items() if ".layer.0." not in n}, weights)
    told = refused(family_bases["bert"], tmp_path)
    assert str(path) in told
    assert "exclude_modules" in told


def test_missing_files_are_told(family_bases, tmp_path) -> None:
    assert "no such folder" in refused(family_bases["bert"], tmp_path / "none")
    assert "adapter_config.json: missing" in refused(family_bases["bert"], tmp_path)
    theirs("bert", "all-linear", tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors: missing" in refused(family_bases["bert"], tmp_path)


@pytest.mark.parametrize(
    ("family", "known"),
    [
        ("bert", "dense, key, query, value"),
        ("qwen3", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ],
)
def test_an_unknown_target_names_the_known_ones(family, known, family_bases) -> None:
    with pytest.raises(InputError) as caught:
        with_new_adapters(
            family_bases[family], LoraConfig(4, 8.0, ("word_embeddings", "c_attn")), 0
        )
    told = str(caught.value)
    assert "config.encoder.lora.targets names 'word_embeddings', 'c_attn'; use 'all-linear'" in told
    assert f"names among {known}, the linear maps" in told


def test_targets_may_be_one_text(family_bases) -> None:
    loaded = with_new_adapters(family_bases["bert"], LoraConfig(4, 8.0, "query,output.dense"), 0)
    # As PEFT reads names: the end of a module's name after a dot.
    assert set(loaded.adapters["layers"]) == {"query", "attention_output", "output"}
