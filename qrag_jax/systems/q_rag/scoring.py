"""Scores a run's checkpoint against the encoder that it started from, with resumable logs."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from qrag_jax.algorithms.advantages import discounted_return
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.loading import documents_of_lengths, load_split
from qrag_jax.data.long_docs import check_unseen
from qrag_jax.data.sample import LazySamples, Sample, fingerprint
from qrag_jax.data.tokens import TokenStore
from qrag_jax.environments import positions
from qrag_jax.evaluators import episodes
from qrag_jax.feedback.facts import GROUND_TRUTH, fact_feedback
from qrag_jax.learners.state import encoder_key
from qrag_jax.metrics import facts
from qrag_jax.metrics.bootstrap import columns_text
from qrag_jax.metrics.row_log import RETRIEVALS, Row, log_name
from qrag_jax.models.compute.lora import Adapted
from qrag_jax.models.embedding import Params
from qrag_jax.retrieval.towers import Towers
from qrag_jax.rollouts.beam_search import BeamSearch
from qrag_jax.rollouts.chunks import CHUNK, Actor, check_fit
from qrag_jax.rollouts.text_table import choose_block_shapes
from qrag_jax.runtime import aot, config_fields, interrupt, platform, plots, whole_files
from qrag_jax.systems import indexing, scoring
from qrag_jax.systems.config import chosen_places, load_config
from qrag_jax.systems.q_rag.run import SavedRun, row_form, weights_digest

_PART = 16  # batches written together
# Settings of the beam search: greedy play to the end does not depend on them.
BEAM_FIELDS = ("eval.beam", "eval.beam_score", "eval.stop_threshold")


@contextlib.contextmanager
def open_predictor(
    raw: ConfigDict, workdir: Path, options: scoring.ScoreOptions
) -> Iterator[scoring.Predictor]:
    """The evaluation questions; of a run whose data are one file, the part that was held out."""
    saved, run = load_config(workdir / config_fields.CONFIG_NAME), SavedRun.open(workdir, raw)
    config = run.config
    same = (raw.data.path, raw.eval.path) == (saved.data.path, saved.eval.path)
    loaded_samples = load_split(config.dev_data, "dev", hold_out=same and not config.eval.path)
    for line in loaded_samples.report:
        print(line)
    check_unseen(workdir, config.dev_data.backgrounds)
    samples = loaded_samples.all
    store = config.data.tokenised(samples, run.loaded.tokenizer)
    shape = EpisodeShape.holding([store])
    indices = chosen_places(range(len(samples)), options.samples, config.eval.seed)
    how: Any = _feedback(run), config.pqn.gamma
    play = episodes.make_play(run.mesh, run.shardings, _actor(run, shape, store), *how)
    size = config.eval.batch_size
    evaluator = episodes.EpisodeEvaluator(play, run.mesh, samples, store, shape, size, indices)
    asked, scored = evaluator.shown, _Scored(run, evaluator, store)
    with interrupt.StopSignal() as stop:
        about: Any = {"system": scored, "stop": stop, "raw": raw, "options": options}
        yield scoring.Predictor(RETRIEVALS, asked, _PART * size, **about)


@dataclasses.dataclass(frozen=True)
class _Scored:
    """How a run is scored; see `scoring.score_run`."""

    run: SavedRun
    evaluator: episodes.EpisodeEvaluator
    store: TokenStore

    def ways(self, predictor: scoring.Predictor) -> Iterator[scoring.Way]:
        """Without beams in several steps and in one, untrained and trained; and by its beams."""
        run, which, evaluator = self.run, predictor.options.checkpoint, self.evaluator
        name, asked = Path(log_name(run.config.eval.seed)).stem, fingerprint(evaluator.shown)
        trained, step = run.trained(which)
        checkpoint = f"{which}-{step}"
        predictor.steps[which] = step
        for label, params in ((facts.UNTRAINED, run.untrained()), (checkpoint, trained)):
            several, one = _both(evaluator, params)
            record = log_record(run, label, weights_digest(params), asked, searched=False)
            yield scoring.Way(f"{label}/{name}", label, several, record)
            single = f"{label}/single_step_{name}"
            yield scoring.Way(single, f"{label}, one step", one, record)
        if run.config.eval.searches:
            by_beam = _plays(run, beam_search(run, trained, self.store))
            record = log_record(run, checkpoint, weights_digest(trained), asked, searched=True)
            planned, size = f"{checkpoint}/planned_{name}", run.config.eval.batch_size
            yield scoring.Way(planned, facts.PLANNED, by_beam, record, size=size)

    def summary(
        self, predictor: scoring.Predictor, logs: scoring.Logs
    ) -> tuple[dict[str, Any], list[str]]:
        config, which = self.run.config, predictor.options.checkpoint
        names = facts.UNTRAINED, facts.SINGLE, facts.TRAINED, facts.SINGLE_TRAINED, facts.PLANNED
        played = {name: RETRIEVALS.read(log) for name, (_, log) in zip(names, logs)}
        summary: dict[str, Any] = {
            "best_is_untrained": which == "best" and predictor.steps[which] == 0,
            **facts.compared(played, in_full=config.rollout.never_terminate),
            "samples": len(predictor.asked),
        }
        lines = [facts.table({"checkpoint": which, "step": predictor.steps[which], **summary})]
        if config.reward.name != GROUND_TRUTH and "return" in summary["scores"]["trained"]:
            why = f"not of {config.reward.name}, by which it was trained"
            if not config.is_on_device:
                why += "; qrag answer asks a language model about the retrieval log"
            lines.append(f"returns are those of the supporting facts: {why}")
        return summary, [*lines, f"retrieval log: {logs[2][1]}"]


def _both(
    evaluator: episodes.EpisodeEvaluator, params: Params | Adapted
) -> list[Callable[[Sequence[Sample], int], list[Row]]]:
    """Plays in several steps, and in one, whose rows the same play gives."""
    rows = cache(lambda first, count: evaluator.rows(params, slice(first, first + count)))

    def play(kind: int, part: Sequence[Sample], first: int) -> list[Row]:
        return rows(first, len(part))[kind]

    return [partial(play, kind) for kind in (0, 1)]


def log_record(
    run: SavedRun, label: str, weights: str, samples: str, *, searched: bool
) -> dict[str, Any]:
    """What a retrieval log depends on: all settings that can change one of its rows.

    New fields of the config are in it without being listed here.

    Args:
        samples: fingerprint of the questions.
        searched: True for beam search or a rule for stopping, False for greedy play to the end.
    """
    free = scoring.FREE_FIELDS if searched else (*scoring.FREE_FIELDS, *BEAM_FIELDS)
    return {
        "encoder": label,
        "weights": weights,
        "samples": samples,
        "tokenizer": run.loaded.tokenizer.fingerprint(),
        # What config.encoder.dtype "auto" means on this machine.
        "precision": list(map(str, run.loaded.encoder.module.precision)),
        **{
            # JSON has no infinities.
            f"config.{name}": str(value) if value in (math.inf, -math.inf) else value
            for name, value in run.fields.items()
            if not scoring.is_free(name, free)
        },
    }


def _plays(run: SavedRun, searcher: BeamSearch) -> Callable[..., list[Row]]:
    feedback = _feedback(run)

    def returns(sample: Sample, taken: Sequence[int]) -> float:
        """The discounted return of one episode, from its taken and its supporting chunks alone."""
        if not taken:
            return 0.0
        chunks = sorted({*taken, *sample.support})
        support = np.isin([*chunks, -1], sample.support)[None]  # the last column is STOP's
        actions = np.searchsorted(chunks, taken)[None]
        played = types.SimpleNamespace(actions=actions, valid=np.ones(actions.shape, bool))
        rewards = feedback(types.SimpleNamespace(support=support), played)
        return float(discounted_return(rewards[0], run.config.pqn.gamma))

    def play(part: Sequence[Sample], first: int) -> list[Row]:
        rows = list[Row]()
        for sample, path in searcher.play(part):
            # Without facts there is no return.
            ret = returns(sample, path.taken) if sample.support else None
            rows.append(episodes.make_row(sample, [*path.taken], [*path.q], ret))
        return rows

    return play


def _feedback(run: SavedRun) -> Any:
    return fact_feedback(run.config.reward, stop_action=run.config.env.stop_action)


def _actor(run: SavedRun, shape: EpisodeShape, store: TokenStore) -> Actor:
    """Plays documents of this shape, which must fit, with blocks for those of the store."""
    encoder, rollout = run.loaded.encoder, run.config.rollout
    config_fields.check_split("eval.batch_size", run.config.eval.batch_size, run.mesh.size)
    check_fit(rollout, encoder, shape, {"evaluation": store})
    fitting = run.config.encoder, rollout, encoder, shape, [store]
    return Actor(
        encoder, choose_block_shapes(*fitting, platform=platform.Platform.of(run.mesh)), rollout
    )


def beam_search(
    run: SavedRun, params: Params | Adapted, tokens: TokenStore, embeddings: Path | None = None
) -> BeamSearch:
    """The beam search of a run, over documents of any length; `tokens`: of typical ones."""
    config, encoder, tokenizer = run.config, run.loaded.encoder, run.loaded.tokenizer
    rollout, form = config.rollout, row_form(encoder, config)
    # The longest possible rows, not the longest of these samples: other documents follow.
    longest = max(form.chunk_tokens - 2, form.max_chunk_tokens_in_state)
    questions = max(form.question_tokens, int(tokens.question_lengths.max()))
    actor = _actor(run, EpisodeShape(questions, longest, int(tokens.chunk_counts.max())), tokens)
    store = None
    if embeddings is not None:
        made_by = {
            "row_tokens": form.chunk_tokens,
            "tokenizer": tokenizer.fingerprint(),
            "scale": encoder.scale,
            "pooling": [encoder.pooling, encoder.normalise],
            "opening": list(encoder.chunk_opening),
            "precision": list(map(str, encoder.module.precision)),
        }
        store = embeddings / encoder_key(encoder.tower(params, CHUNK), made_by)
    blocks = actor.block_shapes.states, actor.block_shapes.chunks
    both = indexing.mesh_towers(run.mesh, run.shardings, [encoder] * 2, params, form, blocks=blocks)
    towers, size = Towers(tokenizer, form, *both), config.eval.batch_size
    return BeamSearch(run.mesh, towers, rollout, config.beam, batch_size=size, store=store)


# ---------------------------------------------------------------- documents of several lengths

_SCORES = ("fact_em", "em_shortest", "fact_f1", "fact_precision", "fact_recall")
_CUT = ("f1", "precision")
COLUMNS = {
    **dict.fromkeys(("chunks", "tokens", "fits", "stories", "samples"), "d"),
    **dict.fromkeys((*_SCORES, *(f"{name}_until_found" for name in _CUT)), ".3f"),
    **{"steps": ".2f", "seconds_per_episode": ".3f", "peak_memory_mib": ".0f"},
}


def score_lengths(
    run: SavedRun,
    options: scoring.ScoreOptions,
    samples: Mapping[int, int],
    stop: interrupt.StopSignal,
    *,
    every_story: bool = False,
    embeddings: Path | None = None,
) -> list[dict]:
    """Plays documents of several lengths, shortest first; writes one table and one plot.

    `samples`: length in chunks, ascending → number of documents. Of the results, one of each
    length, `stories` is the number of stories in the split, `fits` that of those that are short
    enough, and `em_shortest` the fact EM of the same questions at the shortest length; None if some
    of them were not asked there.
    """
    config, chunks = run.config, [*samples]
    params, step = run.trained(options.checkpoint)
    label, weights = f"{options.checkpoint}-{step}", weights_digest(params)
    if label == "best-0":
        print("best = untrained: the best checkpoint is that of step 0")
    out = options.out or run.workdir / "lengths"
    # All lengths are checked before anything is computed.
    check_unseen(run.workdir, config.dev_data.backgrounds)
    for length in chunks:
        positions.check_chunks(config.env.positions, length)
    sets = documents_of_lengths(config.dev_data, samples, every_story=every_story)
    shortest = sets[chunks[0]]
    for length, documents in sets.items():
        if documents.fits != shortest.fits or documents is shortest:
            fits = f"fits {documents.fits:,} of {documents.stories:,}"
            print(f"{documents.line}\n{length} chunks: {fits} stories")
    store = config.data.tokenised(list(shortest.samples[:64]), run.loaded.tokenizer)
    searcher = beam_search(run, params, store, embeddings)
    tokens_per_chunk = float(store.chunk_lengths.mean())
    results: list[dict] = []
    at_shortest: dict[str, float] = {}
    for length, documents in sets.items():
        log = out / label / log_name(config.eval.seed, length)
        # The first and the last document, and all texts of documents: to make all takes long.
        played = documents.samples
        content = played.content if isinstance(played, LazySamples) else ""
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        about = f"{len(played)} {fingerprint([played[0], played[-1]])} {digest} of {documents.fits}"
        record = log_record(run, label, weights, about, searched=True)
        memory = aot.PeakMemory()
        way = scoring.Way("", f"{length} chunks", _plays(run, searcher), record)
        # A part is what is played side by side.
        asked = scoring.Questions(RETRIEVALS, documents.samples, size=searcher.room(length))
        began, is_new = time.monotonic(), options.restart or not log.exists()
        asked.into(log, way, stop, restart=options.restart)
        seconds = time.monotonic() - began
        rows = RETRIEVALS.read(log)
        at_shortest = at_shortest or {row.id: row.em or 0.0 for row in rows}
        known = [at_shortest[row.id] for row in rows if row.id in at_shortest]
        results.append(
            {
                "chunks": length,
                "tokens": round(length * tokens_per_chunk),
                "fits": documents.fits,
                "stories": documents.stories,
                "em_shortest": sum(known) / len(known) if len(known) == len(rows) else None,
                "samples": len(rows),
                "seconds_per_episode": seconds / len(rows) if is_new else None,
                "peak_memory_mib": memory.mebibytes() if is_new else None,
                "scores": facts.summarise(rows),
                # These use the answer key: an episode ends once all facts are found.
                "until_found": facts.summarise([facts.until_found(row) for row in rows]),
            }
        )
        print(_table(results[-1:]))  # one may take minutes
    print(_table(results))
    path = out / label / f"{Path(log_name(config.eval.seed)).stem}_lengths"
    written, plot = path.with_suffix(".json"), path.with_suffix(".png")
    whole_files.write_json(written, results)
    plots.plot_lengths(results, plot, f"{out.parent.name}, {label}")
    print(
        "f1_until_found and precision_until_found use the answer key: an episode ends once all "
        f"supporting facts are found\ntable: {written}\nplot: {plot}"
    )
    return results


def _table(results: Sequence[dict[str, Any]]) -> str:
    def cells(result: dict[str, Any]) -> Iterator[str]:
        scores = {n: score["mean"] for n, score in result["scores"].items()}
        cut = {f"{n}_until_found": result["until_found"][f"fact_{n}"]["mean"] for n in _CUT}
        for name, form in COLUMNS.items():
            value = (result | scores | cut)[name]
            yield "" if value is None else format(value, form)

    return "\n".join(columns_text([[*COLUMNS], *([*cells(result)] for result in results)]))
