"""Measures token policies: the update beside TRL's, the sampler beside transformers' `generate`.

A small random decoder of 4 × 192, on a CPU in float32. The update is by 8 questions of 8 episodes,
prompts of 256 tokens and episodes of 128, of which half are sampled. Both sides have the same
weights, batch and loss; with the large vocabulary there are 2 questions, since TRL takes a minute
for an update of 8. `--only=PART` runs one part: update-1024, update-151936 (the vocabulary),
sampler, and of a server that samples overlap and handover (see `token_serving`). `--quick` is
smaller still, and has no server.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from benchmarks import token_serving
from benchmarks.equal_updates import Learned, equality_cases
from benchmarks.kept_runs import Kept
from benchmarks.measure import interleave, peak_growth, ratio
from benchmarks.report import Case
from qrag_jax.errors import InputError
from qrag_jax.learners.policy_state import Parts, first_state, state_shardings
from qrag_jax.learners.token_config import TokenGRPOConfig
from qrag_jax.learners.token_policy import TokenPasses, TokenPolicy
from qrag_jax.learners.token_update import given_tokens, make_token_update, token_episodes
from qrag_jax.models.files.weight_names import tensors_from_params
from qrag_jax.models.pretrained_lm import LoadedLanguageModel, load_language_model, table_of
from qrag_jax.policies.tokens import Vocabulary
from qrag_jax.rollouts.device_sampler import DeviceSampler
from qrag_jax.rollouts.token_batch import TokenBatch
from qrag_jax.rollouts.token_blocks import choose_shape
from qrag_jax.rollouts.token_sampler import SampleRequest, SamplingConfig
from qrag_jax.runtime.mesh import make_mesh

TEMPERATURE, RATE, BLOCK, ROUNDS = 0.9, 1e-5, 2048, 5
UPDATE, SAMPLER, OVERLAP, HANDOVER = "update", "sampler", "overlap", "handover"
LARGE, FEW_ROUNDS = 50_000, 2  # a vocabulary so large takes long


@dataclasses.dataclass(frozen=True)
class Size:
    """What is measured."""

    vocab: int = 1024
    groups: int = 8
    members: int = 8
    prompt: int = 256
    episode: int = 128
    layers: int = 4
    rows: int = 64  # of the sampler
    drawn: int = 64


QUICK = Size(vocab=300, groups=2, members=4, prompt=32, episode=16, layers=1, rows=8, drawn=16)


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: PyTorch or TRL is missing, or `only` names an unknown part.
    """
    if quick:
        return [*update_cases(QUICK), *sampler_cases(QUICK)]
    kept = Kept.of("tokens")
    parts = {
        f"{UPDATE}-{size.vocab}": partial(_kept, partial(update_cases, size))
        for size in (Size(), Size(vocab=151936, groups=2))
    } | {
        SAMPLER: partial(_kept, partial(sampler_cases, Size())),
        OVERLAP: partial(_kept, token_serving.overlap_cases),
        HANDOVER: partial(_kept, token_serving.handover_cases),
    }
    results = kept.finish(parts, only)
    return [Case(**case) for part in results.values() for case in part.get("cases", [])]


def _kept(cases: Callable[[], Iterable[Case]]) -> dict[str, Any]:
    return {"cases": [dataclasses.asdict(case) for case in cases()]}


def decoder(folder: Path, size: Size) -> LoadedLanguageModel:
    """A random model of 192 numbers a token, in a folder that both sides read.

    Raises:
        InputError: PyTorch is missing.
    """
    try:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        from benchmarks.encoder_cases.small_models import write_bpe_tokenizer
    except ImportError as error:
        raise InputError(f"{error}: pip install 'qrag_jax[test]' for this suite.") from None
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocab,
        hidden_size=192,
        num_hidden_layers=size.layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=512,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    write_bpe_tokenizer(folder)
    return load_language_model(folder)


def batch_of(size: Size) -> TokenBatch:
    """Episodes whose first and third quarter are sampled; the others are a tool's words."""
    draw, episodes = np.random.default_rng(0), size.groups * size.members
    length, quarter = size.prompt + size.episode, size.episode // 4
    tokens = draw.integers(0, size.vocab, (episodes, length)).astype(np.int32)
    number = np.arange(episodes, dtype=np.int32)
    first = number // size.members * size.members
    tokens[:, : size.prompt] = tokens[first, : size.prompt]
    place = np.arange(length)[None] - size.prompt
    sampled = np.repeat((place >= 0) & (place // quarter % 2 == 0), episodes, axis=0)
    sampler = np.where(sampled, draw.normal(-np.log(size.vocab), 0.1, tokens.shape), 0)
    return TokenBatch(
        tokens=tokens,
        lengths=np.full(episodes, length, np.int32),
        log_prob_mask=sampled,
        loss_mask=sampled,
        sampler_log_probs=sampler.astype(np.float32),
        episode=number,
        leader=first,
        shared=np.where(number == first, 0, size.prompt).astype(np.int32),
        rewards=draw.random((episodes, 1)).astype(np.float32),
        scored=np.ones(episodes, bool),
    )


def update_cases(size: Size) -> Iterator[Case]:
    """Loss, gradient, speed and memory of an update beside TRL's."""
    with tempfile.TemporaryDirectory() as name:
        loaded, batch = decoder(Path(name), size), batch_of(size)
        try:
            from benchmarks.peers.trl_learner import TrlLearner
        except ImportError as error:
            raise InputError(f"{error}: pip install 'qrag_jax[test]' for this suite.") from None
        config = TokenGRPOConfig(members=size.members, longest=size.episode)
        theirs = TrlLearner(Path(name), config, TEMPERATURE, RATE)
        policy, parts = policy_of(loaded, config)
        params = loaded.params
        shape = choose_shape(batch, BLOCK, size.members)
        episodes = token_episodes(policy, batch, shape)
        given, divisor, _ = given_tokens(policy, episodes)
        advantages = _by_episode(given, episodes.blocks, len(batch.scored))
        inputs = theirs.inputs(batch, size.prompt, advantages, config.sampler_cap)
        title = f"GRPO update, decoder of {size.layers} × 192, vocabulary {size.vocab:,}"

        gradient, sums = jax.jit(TokenPasses(policy).gradient)(params, None, episodes.blocks, given)
        of_ours = tensors_from_params(
            table_of("qwen3"), jax.tree.map(lambda leaf: np.asarray(leaf / divisor), gradient)
        )
        learned = Learned(float(sums.loss / divisor), of_ours)
        yield from equality_cases(title, learned, Learned(*theirs.gradient(inputs)), "TRL")
        del gradient, of_ours, learned

        update: Any = make_token_update(policy)
        state = first_state(policy.shardings, parts, params, 0)

        def ours(_: int) -> None:
            nonlocal state
            state, _metrics = update(state, token_episodes(policy, batch, shape))
            jax.block_until_ready(state)

        def of_trl(_: int) -> None:
            theirs.update(inputs)

        rounds = ROUNDS if size.vocab < LARGE else FEW_ROUNDS
        timings = interleave({"TRL": of_trl, "ours": ours}, rounds)
        one, other = timings["ours"], timings["TRL"]
        count = len(batch.scored)
        yield Case(
            f"{title}: episodes",
            count / one.median,
            "1/s",
            peer=count / other.median,
            ratio=ratio(one, other),
            target=">= 1.5 times TRL's",
            holds=ratio(one, other) >= 1.5,
            details={
                "tokens computed": float(episodes.blocks.tokens.size),
                "tokens of TRL": float(batch.tokens.size),
                "compiling s": one.compile,
            },
        )
        # jax keeps the memory that it once had, so ours is what the program says that it takes.
        program = update.lower(state, episodes).compile()
        needed = program.memory_analysis().temp_size_in_bytes
        of_theirs_needed = peak_growth(partial(of_trl, 0), ours=False)
        asked = size.vocab >= LARGE
        yield Case(
            f"{title}: memory of an update beyond weights and moments",
            needed / 2**20,
            "MiB",
            peer=of_theirs_needed / 2**20,
            ratio=of_theirs_needed / needed,
            target="<= 0.5 of TRL's" if asked else None,
            holds=needed <= 0.5 * of_theirs_needed if asked else None,
            details={
                "one array of sampled tokens × vocabulary, MiB": float(
                    4 * batch.log_prob_mask.sum() * size.vocab / 2**20
                )
            },
        )


def policy_of(
    loaded: LoadedLanguageModel, config: Any, temperature: float = TEMPERATURE
) -> tuple[TokenPolicy, Parts]:
    """The learner of a decoder on one device, and what its state is made of."""
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    optimizer = optax.adamw(RATE, weight_decay=0.0)
    parts = Parts(optimizer, None, False, loaded.model.trunk.config.hidden_size)
    policy = TokenPolicy(
        mesh=mesh,
        shardings=state_shardings(mesh, loaded.partition_rules, parts, loaded.params),
        trunk=loaded.model.trunk,
        vocabulary=Vocabulary(temperature),
        config=config,
        weights=(1.0,),
        optimizer=optimizer,
        schedule=optax.constant_schedule(RATE),
    )
    return policy, parts


def _by_episode(given: Any, blocks: Any, episodes: int) -> np.ndarray:
    """The advantage of each episode, which all of its tokens have."""
    found = np.zeros(episodes + 1, np.float32)
    found[np.asarray(blocks.episode)] = np.asarray(given.advantages)
    return found[:-1]


def sampler_cases(size: Size) -> Iterator[Case]:
    """Tokens/s beside transformers' `generate`, greedy, the same prompts and the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name:
        loaded = decoder(Path(name), size)
        theirs = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        params = jax.device_put(loaded.params)
        draw = np.random.default_rng(0)
        prompts = draw.integers(0, size.vocab, (size.rows, size.drawn)).astype(np.int32)
        config = SamplingConfig(temperature=0.0, room=2 * size.drawn + 1, chunk=size.drawn)
        sampler = DeviceSampler(loaded.model, config)
        keys = np.zeros(2, np.uint32)
        requests = [SampleRequest(prompt, keys, size.drawn) for prompt in prompts]
        ids = torch.tensor(prompts.astype(np.int64))

        def generate(_: int) -> Any:
            with torch.no_grad():
                return theirs.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=size.drawn,
                    do_sample=False,
                )

        ours = [each.ids.tolist() for each in sampler.sample(params, requests)]
        expected = generate(0)[:, size.drawn :].tolist()
        same = float(np.mean([one == other for one, other in zip(ours, expected, strict=True)]))
        timings = interleave(
            {"transformers": generate, "ours": lambda _: sampler.sample(params, requests)}, ROUNDS
        )
        one, other = timings["ours"], timings["transformers"]
        count = size.rows * size.drawn
        yield Case(
            f"sampling, decoder of {size.layers} × 192, vocabulary {size.vocab:,}, {size.rows} "
            f"prompts of {size.drawn} tokens, {size.drawn} new ones",
            count / one.median,
            "tokens/s",
            peer=count / other.median,
            ratio=ratio(one, other),
            target=">= 2 times transformers' generate",
            holds=ratio(one, other) >= 2,
            details={"share of prompts with equal tokens": same},
        )
