"""Adapters in PEFT's format against the library itself, both ways, and what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from qrag_jax.encoders.adapters import LoraConfig
from qrag_jax.encoders.lora import Adapted
from qrag_jax.encoders.pretrained import (
    LoadedEncoder,
    load_encoder,
    save_adapters,
    with_adapters,
    with_new_adapters,
)
from qrag_jax.errors import InputError
from tests.encoders.conftest import torch_bert, torch_qwen3, write_bpe_tokenizer, write_tokenizer

peft = pytest.importorskip("peft", reason="peft, the reference for adapter files, is missing")

FAMILIES = ("bert", "qwen3")
TARGETS = {"bert": ("query", "intermediate.dense"), "qwen3": ("q_proj", "v_proj", "down_proj")}
TOKENS = np.random.default_rng(0).integers(6, 60, (3, 9)).astype(np.int32)
LENGTHS = np.array([9, 4, 7], np.int32)


def model_of(family: str, **sizes: Any) -> Any:
    if family == "bert":
        return torch_bert(**sizes)
    return torch_qwen3(vocab_size=264, **sizes).model


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedEncoder]:
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model_of(family).save_pretrained(folder)
        (write_tokenizer if family == "bert" else write_bpe_tokenizer)(folder)
        if family == "bert":
            path = folder / "tokenizer_config.json"
            special = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
            path.write_text(json.dumps(json.loads(path.read_text()) | special))
        found[family] = load_encoder(folder)
    return found


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
    model = peft.get_peft_model(model_of(family), settings).eval()
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
def test_adapters_of_peft_give_its_outputs(family, targets, bases, tmp_path) -> None:
    wanted = TARGETS[family] if targets == "some" else targets
    model = theirs(family, wanted, tmp_path)
    loaded = with_adapters(bases[family], tmp_path)
    assert loaded.lora is not None
    assert (loaded.lora.rank, loaded.encoder.lora_scale) == (3, 4.0)
    maps = loaded.adapters["layers"]
    everything = {"bert": 6, "qwen3": 7}[family]
    assert len(maps) == (len(wanted) if targets == "some" else everything)
    expected = their_states(model)
    np.testing.assert_allclose(our_states(loaded, maps), expected, atol=1e-4)
    # The adapters do matter.
    plain = their_states(model_of(family))
    assert np.abs(expected - plain).max() > 0.1


@pytest.mark.parametrize("targets", ["all-linear", "some"])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_ours(family, targets, bases, tmp_path) -> None:
    wanted = TARGETS[family] if targets == "some" else targets
    loaded = with_new_adapters(bases[family], LoraConfig(4, 6.0, wanted), seed=0)
    rng = np.random.default_rng(1)
    for leaves in loaded.adapters["layers"].values():
        assert not leaves["lora_b"].any()  # they change nothing at first
        assert 0 < np.abs(leaves["lora_a"]).max() <= leaves["lora_a"].shape[1] ** -0.5
        leaves["lora_b"] += 0.3 * rng.standard_normal(leaves["lora_b"].shape).astype(np.float32)
    save_adapters(loaded, loaded.adapters, tmp_path / "out")
    model = peft.PeftModel.from_pretrained(model_of(family), tmp_path / "out").eval()
    found = our_states(loaded, loaded.adapters["layers"])
    np.testing.assert_allclose(found, their_states(model), atol=1e-4)
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert set(saved) == {name.replace(".default", "") for name in names}
    again = with_adapters(bases[family], tmp_path / "out")
    for name, leaves in loaded.adapters["layers"].items():
        for leaf, array in leaves.items():
            np.testing.assert_array_equal(again.adapters["layers"][name][leaf], array)


def test_names_of_a_model_with_a_head_are_read(bases, tmp_path) -> None:
    theirs("qwen3", TARGETS["qwen3"], tmp_path)
    plain = with_adapters(bases["qwen3"], tmp_path).adapters["layers"]
    file = tmp_path / "adapter_model.safetensors"
    start = "base_model.model."
    headed = {f"{start}model.{n.removeprefix(start)}": t for n, t in load_file(file).items()}
    save_file(headed, file)
    found = with_adapters(bases["qwen3"], tmp_path).adapters["layers"]
    np.testing.assert_array_equal(found["down"]["lora_a"], plain["down"]["lora_a"])


def refused(loaded: LoadedEncoder, folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        with_adapters(loaded, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_adapters_of_another_base_are_refused(bases, tmp_path) -> None:
    theirs("qwen3", "all-linear", tmp_path)
    told = refused(bases["bert"], tmp_path)
    assert "made for another base, since layers.0.mlp.down_proj.lora_A.weight has no place" in told
    assert "(28 of 28 tensors do not fit)" in told
    wide = peft.LoraConfig(r=3, target_modules=["q_proj"])
    peft.get_peft_model(model_of("qwen3", hidden_size=48), wide).save_pretrained(tmp_path)
    told = refused(bases["qwen3"], tmp_path)
    assert "layers.0.self_attn.q_proj.lora_A.weight has shape (3, 48), expected (3, 32)" in told
    assert "(2 of 4 tensors do not fit)" in told
    peft.get_peft_model(model_of("qwen3", num_hidden_layers=3), wide).save_pretrained(tmp_path)
    told = refused(bases["qwen3"], tmp_path)
    assert "layers.2.self_attn.q_proj.lora_A.weight has no place" in told
    peft.get_peft_model(model_of("qwen3", num_hidden_layers=1), wide).save_pretrained(tmp_path)
    assert "layers.1.self_attn.q_proj.lora_A.weight is missing (2 of 4" in refused(
        bases["qwen3"], tmp_path
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("use_dora", True), ("use_rslora", True), ("rank_pattern", {"query": 2}), ("bias", "all")],
)
def test_other_kinds_of_adapters_are_refused(field, value, bases, tmp_path) -> None:
    theirs("bert", "all-linear", tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    assert f"adapter_config.json: {field} is {value!r}, which is not" in refused(
        bases["bert"], tmp_path
    )


def test_missing_files_are_told(bases, tmp_path) -> None:
    assert "no such folder" in refused(bases["bert"], tmp_path / "none")
    assert "adapter_config.json: missing" in refused(bases["bert"], tmp_path)
    theirs("bert", "all-linear", tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors: missing" in refused(bases["bert"], tmp_path)


@pytest.mark.parametrize(
    ("family", "known"),
    [
        ("bert", "dense, key, query, value"),
        ("qwen3", "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ],
)
def test_an_unknown_target_names_the_known_ones(family, known, bases) -> None:
    with pytest.raises(InputError) as caught:
        with_new_adapters(bases[family], LoraConfig(4, 8.0, ("word_embeddings", "c_attn")), 0)
    told = str(caught.value)
    assert "config.encoder.lora.targets names 'word_embeddings', 'c_attn'; use 'all-linear'" in told
    assert f"names among {known}, the linear maps" in told


def test_targets_may_be_one_text(bases) -> None:
    loaded = with_new_adapters(bases["bert"], LoraConfig(4, 8.0, "query,output.dense"), 0)
    # As PEFT reads names: the end of a module's name after a dot.
    assert set(loaded.adapters["layers"]) == {"query", "attention_output", "output"}
