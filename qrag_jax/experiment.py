"""What a config means: the data, encoder and compute plan that train and evaluate both build."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from qrag_jax.adaptation import lora_config, with_first_adapters
from qrag_jax.data.episodes import EpisodeShape, check_steps
from qrag_jax.data.generators.haystacks import NiahConfig
from qrag_jax.data.generators.noise import NoiseConfig
from qrag_jax.data.generators.synthetic import SyntheticConfig
from qrag_jax.data.loading import SYNTHETIC, DataConfig, LoadedSamples, load_split
from qrag_jax.data.redrawn import RedrawnSamples, tokenise_redrawn
from qrag_jax.data.sample import Sample
from qrag_jax.data.sources import babilong, niah
from qrag_jax.data.sources.babilong import BabilongConfig
from qrag_jax.data.sources.registry import BY_SIZE, MIXTURES, Split, mix_weights
from qrag_jax.data.tokens import TextTokenizer, Tokens, TokenStore, default_cache, tokenise
from qrag_jax.encoder_settings import encoder_settings, trunk_dropout
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import chunk_width, state_width
from qrag_jax.errors import InputError
from qrag_jax.feedback.ground_truth import ground_truth
from qrag_jax.feedback.language_model import METRICS as LANGUAGE_MODEL
from qrag_jax.learners.optimizers import OptimizerConfig, learning_rate_schedule
from qrag_jax.learners.pqn import Feedback, PQNConfig
from qrag_jax.models.files.model_folder import resolve_folder
from qrag_jax.models.files.sentence_transformers import prompts
from qrag_jax.models.heads.embedding import TextEncoder
from qrag_jax.models.pretrained import (
    LoadedEncoder,
    load_encoder,
    save_adapters,
    save_encoder,
    with_adapters,
)
from qrag_jax.models.scratch import ScratchConfig, make_scratch_folder
from qrag_jax.policies.document_scores import LEAST_BLOCK
from qrag_jax.rollouts.beam_search import BEAM_SCORES, BeamConfig
from qrag_jax.rollouts.chunks import RolloutConfig
from qrag_jax.runtime.leftovers import BUILDING_ENCODER
from qrag_jax.runtime.minilm import HUB_NAME, MINILM, MINILM_OR_SCRATCH, find_minilm
from qrag_jax.runtime.sharding import ALL_SPLIT, Rules, check_rules, resolve
from qrag_jax.runtime.whole_files import new_folder
from qrag_jax.saved_config import CONFIG_NAME, ENCODER

GROUND_TRUTH = ("ground_truth", "gt")
BEST_BY = ("return", "return_until_found")  # scores that choose the best checkpoint
ADAPTERS = "adapter"  # folder of the first adapters, in the run's encoder

LEAST = {
    "profile": 0,
    "env.max_steps": 1,
    "data.max_question_tokens": 1,
    "data.max_chunk_tokens": 3,
    "data.max_chunk_tokens_in_state": 1,
    "data.workers": 0,
    "encoder.length_buckets": 1,
    "encoder.block_tokens": 0,
    "encoder.block_sizes": 1,
    "policy.top_k_actions": 1,
    "reward.staleness": 0,
    "pqn.learning_start": 0,
    "optimizer.warmup_steps": 0,
    "train.steps": 1,
    "train.batch_size": 1,
    "train.accumulation": 1,
    "train.log_every": 1,
    "train.eval_every": 1,
    "train.checkpoint_every": 1,
    "train.max_skipped_steps": 0,
    "eval.batch_size": 1,
    "eval.samples": 0,
}


def rollout_config(config: ml_collections.ConfigDict) -> RolloutConfig:
    """The static settings of playing episodes.

    Where a language model gives the rewards the supporting facts end no episode: it is trained
    without them (see `feedback.completion` for what does).
    """
    return RolloutConfig(
        max_steps=config.env.max_steps,
        never_terminate=config.env.never_terminate or not is_ground_truth(config),
        sort_by_index=config.env.sort_by_index,
        max_chunk_tokens=config.data.max_chunk_tokens,
        max_chunk_tokens_in_state=config.data.max_chunk_tokens_in_state,
        top_k_actions=config.policy.top_k_actions,
        positions=config.env.positions,
        stop_action=config.env.stop_action,
    )


def pqn_config(config: ml_collections.ConfigDict) -> PQNConfig:
    """The constants of the update."""
    return PQNConfig(
        gamma=config.pqn.gamma,
        lambda_=config.pqn.lambda_,
        tau=config.pqn.tau,
        alpha=config.policy.alpha,
        learning_start=config.pqn.learning_start,
    )


def beam_config(config: ml_collections.ConfigDict) -> BeamConfig:
    """How evaluation searches actions.

    Raises:
        InputError: the beam or its score is not one there is.
    """
    beam, score = config.eval.beam, config.eval.beam_score
    if not 1 <= beam <= LEAST_BLOCK:
        raise InputError(f"config.eval.beam is {beam}; it must be from 1 to {LEAST_BLOCK}.")
    if score not in BEAM_SCORES:
        raise InputError(
            f"config.eval.beam_score is {score!r}; use one of {', '.join(BEAM_SCORES)}."
        )
    return BeamConfig(
        beam=beam,
        score=score,
        gamma=config.pqn.gamma,
        alpha=config.policy.alpha,
        top_k_actions=min(config.policy.top_k_actions, LEAST_BLOCK),
        stop_threshold=config.eval.stop_threshold,
        batch_size=config.eval.batch_size,
    )


def is_planned(config: ml_collections.ConfigDict) -> bool:
    """Whether evaluation does more than play greedily to the end."""
    block_shapes = beam_config(config)
    return block_shapes.beam > 1 or block_shapes.stop_threshold > -math.inf


def mixture_shares(
    config: ml_collections.ConfigDict, stores: Mapping[str, Tokens]
) -> dict[str, float]:
    """Each source's share of the training episodes.

    Raises:
        InputError: a weight is not a positive number.
    """
    sizes = {name: len(store) for name, store in stores.items()}
    by_size = config.data.mixture == BY_SIZE
    return mix_weights(config.data.sources.to_dict(), sizes if by_size else None)


def optimizer_config(config: ml_collections.ConfigDict) -> OptimizerConfig:
    """The constants of the optimizer."""
    return OptimizerConfig(**config.optimizer.to_dict(), total_steps=config.train.steps)


def is_ground_truth(config: ml_collections.ConfigDict) -> bool:
    """Whether rewards come from the supporting facts, so that a step is one program.

    Raises:
        InputError: the name is unknown.
    """
    names = (*GROUND_TRUTH, *LANGUAGE_MODEL)
    if config.reward.name not in names:
        raise InputError(
            f"config.reward.name is {config.reward.name!r}; use one of {', '.join(names)}."
        )
    return config.reward.name in GROUND_TRUTH


def feedback(config: ml_collections.ConfigDict) -> Feedback:
    """The reward function of the supporting facts.

    Where a language model gives the rewards, it still tells the returns of evaluations that ask
    none.
    """
    penalize, per_fact = config.reward.penalize_extra_steps, config.reward.per_fact_reward
    step_cost, stop_action = config.reward.step_cost, config.env.stop_action

    def rewards(batch, trajectory):
        stop = batch.support.shape[1] - 1
        return ground_truth(
            batch.support,
            trajectory.actions,
            trajectory.valid,
            penalize_extra_steps=penalize,
            per_fact_reward=per_fact,
            step_cost=step_cost,
            stops=trajectory.actions == stop if stop_action else False,
        )

    return rewards


def sharding_rules(config: ml_collections.ConfigDict, own: Rules = ALL_SPLIT) -> Rules:
    """The (regex, strategy) pairs; `own` are the model's, for the strategy "model".

    Raises:
        InputError: a rule is malformed.
    """
    check_rules(config.runtime.sharding)
    return resolve(config.runtime.sharding, own)


def cache_folder(config: ml_collections.ConfigDict) -> Path:
    """Where tokens and made corpora are kept between runs."""
    return Path(config.data.cache).expanduser() if config.data.cache else default_cache()


def read_samples(
    config: ml_collections.ConfigDict, split: Split, *, hold_out: bool
) -> LoadedSamples:
    """The samples of a split; for "dev", `eval.path` goes before `data.path`."""
    data = config.data
    made = data.synthetic
    settings = DataConfig(
        sources=data.sources.to_dict(),
        path=_path(config, split),
        limit=data.limit if split == "train" else 0,
        synthetic=SyntheticConfig(made.hops, made.comparison, made.chunks, made.seed),
        synthetic_train=made.train,
        synthetic_dev=made.dev,
        babilong=BabilongConfig(**data.babilong),
        niah=NiahConfig(**data.niah),
    )
    hold_out = hold_out and not config.eval.path
    return load_split(settings, split, cache_folder(config), hold_out=hold_out)


def backgrounds(config: ml_collections.ConfigDict, split: Split) -> list[NoiseConfig]:
    """Where the documents of a split have their background from, of sources that make them."""
    data, names = config.data, config.data.sources
    path = _path(config, split)
    found = [BabilongConfig(**data.babilong).background] if babilong.NAME in names else []
    own = NiahConfig(**data.niah).background if niah.NAME in names else None
    return [*found, own] if own is not None and path in ("", SYNTHETIC) else found


def _path(config: ml_collections.ConfigDict, split: Split) -> str:
    return (config.eval.path or config.data.path) if split == "dev" else config.data.path


def prepare_encoder(
    config: ml_collections.ConfigDict, workdir: Path, samples: Sequence[Sample]
) -> LoadedEncoder:
    """The encoder the run starts from, kept in `workdir/encoder` so that a run is self-contained.

    `encoder.path` is a folder, a hub name, "minilm" (see `find_minilm`), "minilm-or-scratch", or
    "" for a small encoder from scratch, whose tokenizer is trained on `samples`. With LoRA the
    first adapters are kept beside it.
    """
    folder = workdir / ENCODER
    settings = encoder_settings(config)
    if (workdir / CONFIG_NAME).exists() and folder.exists():
        return _kept_encoder(folder, settings)
    shutil.rmtree(folder, ignore_errors=True)  # of a start that was refused: never trained
    workdir.mkdir(parents=True, exist_ok=True)
    building = new_folder(workdir, BUILDING_ENCODER)
    try:
        origin = _pretrained_folder(config.encoder.path)
        if origin is None:
            texts = (text for s in samples for text in (s.question, *s.chunks))
            scratch = ScratchConfig(**config.encoder.scratch.to_dict())
            make_scratch_folder(building, texts, scratch, config.seed)
        else:
            save_encoder(load_encoder(origin, **settings), origin, building)
            _tell_prompts(origin, config)
        loaded = with_first_adapters(config, load_encoder(building, **settings))
        if loaded.adapters is not None:
            save_adapters(loaded, loaded.adapters, building / ADAPTERS)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return _kept_encoder(folder, settings)  # again: its weights are still in its files


def _kept_encoder(folder: Path, settings: Mapping[str, Any]) -> LoadedEncoder:
    loaded, adapters = load_encoder(folder, **settings), folder / ADAPTERS
    return with_adapters(loaded, adapters) if adapters.exists() else loaded


def _tell_prompts(folder: Path, config: ml_collections.ConfigDict) -> None:
    """Tells which texts the model expects before others where the config begins none with any."""
    found = prompts(folder)
    if found and not config.encoder.state_prefix and not config.encoder.chunk_prefix:
        texts = ", ".join(f"{name} {text!r}" for name, text in found.items())
        print(
            f"The model's prompts are not used ({texts}); config.encoder.state_prefix and "
            "config.encoder.chunk_prefix begin texts with one."
        )


def _pretrained_folder(path: str) -> Path | None:
    if not path:
        return None
    if path not in (MINILM, MINILM_OR_SCRATCH):
        return resolve_folder(path)
    folder = find_minilm()
    if folder is None and path == MINILM:
        raise InputError(
            f"config.encoder.path is {MINILM!r}, but the model was found nowhere; give the folder "
            f"of another encoder, or the hub name {HUB_NAME}."
        )
    if folder is None:
        print("Training a small encoder from scratch instead.")
    return folder


def tokenise_samples(
    config: ml_collections.ConfigDict, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> TokenStore:
    """The samples' tokens, cut to the lengths the config allows."""
    return tokenise(samples, tokenizer, **_token_limits(config, tokenizer))


def tokenise_training(
    config: ml_collections.ConfigDict, tokenizer: TextTokenizer, samples: Sequence[Sample]
) -> Tokens:
    """As `tokenise_samples`; of samples that are drawn anew in every epoch, those of all."""
    if isinstance(samples, RedrawnSamples):
        return tokenise_redrawn(samples, tokenizer, **_token_limits(config, tokenizer))
    return tokenise_samples(config, tokenizer, samples)


def _token_limits(config: ml_collections.ConfigDict, tokenizer: TextTokenizer) -> dict[str, Any]:
    data = config.data
    special = 1 if tokenizer.cls_id is None else 2  # of a chunk's row
    return {
        "max_question_tokens": data.max_question_tokens,
        "max_chunk_tokens": max(data.max_chunk_tokens - special, data.max_chunk_tokens_in_state),
        "cache": cache_folder(config),
    }


def truncation_report(store: Tokens) -> str:
    """How many texts were cut, as one line; empty if none was."""
    if not store.truncated_questions and not store.truncated_chunks:
        return ""
    return (
        f"truncated: {store.truncated_questions} of {len(store)} questions, "
        f"{store.truncated_chunks} of {store.chunk_texts} chunks"
    )


def check_fit(
    config: ml_collections.ConfigDict,
    encoder: TextEncoder,
    shape: EpisodeShape,
    stores: Mapping[str, Tokens],
) -> None:
    """Refuses settings that no row, episode or batch can satisfy, before any compute.

    Raises:
        InputError: rows longer than the encoder's positions, more steps than chunks, or a value
            that `check_values` refuses.
    """
    check_values(config)
    check_steps(config.env.max_steps, stores)
    check_positions(config, shape.chunks)
    in_state = min(config.data.max_chunk_tokens_in_state, shape.chunk_tokens)
    max_positions, opening = encoder.max_positions, len(encoder.state_opening)
    longest = state_width(opening, shape.question_tokens, in_state, config.env.max_steps - 1)
    if longest > max_positions:
        raise InputError(
            f"a state can reach {longest} tokens ({shape.question_tokens} of the question and "
            f"{config.env.max_steps - 1} chunks of {in_state}), but the encoder has "
            f"{max_positions} positions; lower config.data.max_chunk_tokens_in_state, "
            "config.data.max_question_tokens or config.env.max_steps."
        )
    opening = len(encoder.chunk_opening)
    if config.data.max_chunk_tokens < chunk_width(opening, 1):
        raise InputError(
            f"config.data.max_chunk_tokens is {config.data.max_chunk_tokens}, but a chunk row has "
            f"{chunk_width(opening, 0)} tokens before any text (special tokens and "
            "config.encoder.chunk_prefix); raise it."
        )
    row = min(config.data.max_chunk_tokens, chunk_width(opening, shape.chunk_tokens))
    if row > max_positions:
        raise InputError(
            f"a chunk row has up to {row} tokens, but the encoder has {max_positions} positions; "
            "lower config.data.max_chunk_tokens."
        )


def check_positions(config: ml_collections.ConfigDict, chunks: int) -> None:
    """Refuses documents that are longer than their positions reach.

    Raises:
        InputError: there are such documents.
    """
    most = positions.MOST_CHUNKS
    if config.env.positions == positions.RANDOM_PUBLISHED and chunks > most:
        raise InputError(
            f"config.env.positions {positions.RANDOM_PUBLISHED} places documents of at most "
            f"{most} chunks, but one has {chunks}; give random or relative, or shorter documents."
        )


def check_values(config: ml_collections.ConfigDict) -> None:
    """Refuses values that make no sense whatever the data are.

    Raises:
        InputError: a count, an interval or a rate is too low, a name is unknown, or a sharding
            rule is malformed.
    """
    for name, least in LEAST.items():
        value = config[name]
        if value < least:
            raise InputError(f"config.{name} is {value}; it must be at least {least}.")
    for name in ("policy.alpha", "optimizer.learning_rate"):
        if not config[name] > 0:
            raise InputError(f"config.{name} is {config[name]}; it must be above 0.")
    kind, kinds = rollout_config(config).positions, positions.KINDS
    if kind not in kinds:
        raise InputError(f"config.env.positions is {kind!r}; give one of {', '.join(kinds)}.")
    if config.data.mixture not in MIXTURES:
        raise InputError(
            f"config.data.mixture is {config.data.mixture!r}; use one of {', '.join(MIXTURES)}."
        )
    if config.reward.step_cost < 0:
        raise InputError(
            f"config.reward.step_cost is {config.reward.step_cost}; it must be at least 0."
        )
    if config.eval.best_by not in BEST_BY:
        raise InputError(
            f"config.eval.best_by is {config.eval.best_by!r}; use one of {', '.join(BEST_BY)}."
        )
    sharding_rules(config)
    lora_config(config)
    trunk_dropout(config)
    beam_config(config)
    is_ground_truth(config)
    if not 0 < config.reward.scale < math.inf:
        raise InputError(f"config.reward.scale is {config.reward.scale}; use a number above 0.")
    threshold = config.reward.completion_threshold
    if threshold is not None and is_ground_truth(config):
        raise InputError(
            f"config.reward.completion_threshold is {threshold}, but config.reward.name is "
            f"{config.reward.name!r}, which asks no language model; leave it None."
        )
    if threshold is not None and not 0 < threshold < math.inf:
        raise InputError(
            f"config.reward.completion_threshold is {threshold}; use a number above 0, or None."
        )
    if not 0 <= config.reward.max_failure_share < 1:
        raise InputError(
            f"config.reward.max_failure_share is {config.reward.max_failure_share}; use a share "
            "of 0 or more and below 1."
        )
    learning_rate_schedule(optimizer_config(config))


def fingerprint(samples: Sequence[Sample]) -> str:
    """A digest of an evaluation set: ids, texts and supporting facts."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(dataclasses.astuple(sample)).encode())
    return digest.hexdigest()[:16]
