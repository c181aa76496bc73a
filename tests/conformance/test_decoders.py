"""Every registered language model against Hugging Face's: a new one is tested by registering it.

It is registered in `tests.support.small_models.DECODERS`. Its trunk is packed into blocks, lies on
several devices, has adapters and half precision in tests/conformance/test_encoders.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.first_language_model import load_language_model, save_language_model
from qrag_jax.models.pretrained import LoadedLanguageModel
from qrag_jax.models.trunks import families
from qrag_jax.rollouts.device_sampler import DeviceSampler, RoundSampler
from qrag_jax.rollouts.trajectories import SampleRequest, SamplingConfig
from tests import reference
from tests.support.parity import check_gradients
from tests.support.small_models import DECODERS, torch_decoder, write_bpe_tokenizer

VOCAB, LENGTH = 264, 11
LENGTHS = np.array([11, 1, 6, 9, 0, 3, 11, 2], np.int32)
INSIDE = np.arange(LENGTH) < LENGTHS[:, None]
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (len(LENGTHS), LENGTH)).astype(np.int32)
# One form of each registered family; the others differ in fields alone.
KINDS = ("qwen3", "qwen2-untied", "llama3")


class Case(NamedTuple):
    folder: Path
    model: Any
    loaded: LoadedLanguageModel

    def logits(self, model: Any) -> torch.Tensor:
        """Those of Hugging Face, of all tokens inside rows; each row is computed alone."""
        rows = [row[:length] for row, length in zip(TOKENS, LENGTHS, strict=True) if length]
        return torch.cat([model(torch.tensor(row[None]).long()).logits[0] for row in rows])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    found = {}
    for name in DECODERS:
        folder, model = tmp_path_factory.mktemp(name), torch_decoder(name)
        model.save_pretrained(folder)
        write_bpe_tokenizer(folder)
        found[name] = Case(folder, model, load_language_model(folder))
    return found


@pytest.fixture
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


every_decoder = pytest.mark.parametrize("case", DECODERS, indirect=True)
every_kind = pytest.mark.parametrize("case", KINDS, indirect=True)
logits = jax.jit(reference.logits, static_argnums=0)


def test_every_registered_family_is_here() -> None:
    for names in (KINDS, DECODERS):
        kinds = {torch_decoder(name).config.model_type for name in names}
        assert kinds == set(families.DECODERS)


@every_decoder
def test_logits_and_gradients_are_those_of_hugging_face(case: Case) -> None:
    """Theirs of rows alone; ours of padded rows, in whose padding there are other tokens."""
    loaded, expected = case.loaded, case.logits(case.model)
    weights = np.random.default_rng(1).normal(size=(*TOKENS.shape, VOCAB)) / 30
    weights = weights.astype(np.float32) * INSIDE[..., None]

    @jax.jit
    def ours(params: Any) -> Any:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            found = reference.logits(
                loaded.model, params, jnp.asarray(TOKENS), jnp.asarray(LENGTHS)
            )
            return (jax.nn.log_softmax(found) * weights).sum(), found

        return jax.grad(loss, has_aux=True)(params)

    gradient, found = ours(loaded.params)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found[INSIDE], expected.detach(), atol=1e-4)
    (torch.log_softmax(expected, -1) * torch.tensor(weights[INSIDE])).sum().backward()
    theirs = {n: p.grad.numpy() for n, p in case.model.named_parameters() if p.grad is not None}
    check_gradients(tensors_from_params(loaded.table, jax.tree.map(np.asarray, gradient)), theirs)


@every_kind
def test_a_saved_folder_is_opened_by_hugging_face(case: Case, tmp_path: Path) -> None:
    loaded = case.loaded
    (case.folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    changed = jax.tree.map(lambda leaf: leaf * 1.01, loaded.params)
    save_language_model(loaded, changed, case.folder, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found = logits(loaded.model, changed, TOKENS, LENGTHS)
    np.testing.assert_allclose(found[INSIDE], case.logits(theirs).detach(), atol=1e-4)
    again = load_language_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, again.params, changed)
    assert again.model == dataclasses.replace(loaded.model, stop_ids=(5, 7))
    assert again.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


@every_kind
def test_greedy_decoding_is_generate(case: Case) -> None:
    draw = np.random.default_rng(0)
    seeds = draw.integers(0, 2**32, (5, 2), dtype=np.uint32)
    given = [
        SampleRequest(draw.integers(0, VOCAB, length).astype(np.int32), seed, 12)
        for length, seed in zip((3, 17, 8, 1, 23), seeds, strict=True)
    ]
    config = SamplingConfig(temperature=0.0, room=48, chunk=8)
    found = RoundSampler(DeviceSampler(case.loaded.model, config), case.loaded.params).sample(given)
    for request, ours in zip(given, found, strict=True):
        ids = torch.tensor(request.ids[None].astype(np.int64))
        expected = case.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )[0]
        assert [*request.ids, *ours.ids] == expected.tolist()
        assert ours.finish == ("stop" if ours.ids[-1] in case.loaded.model.stop_ids else "length")
        with torch.no_grad():
            scores = torch.log_softmax(case.model(expected[None]).logits[0], -1)
        places = np.arange(len(request.ids) - 1, len(expected) - 1)
        np.testing.assert_allclose(ours.log_probs, scores[places, ours.ids], atol=1e-4)
