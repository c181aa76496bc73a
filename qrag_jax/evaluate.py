"""Scores a trained retriever: python -m qrag_jax.evaluate --workdir=runs/hotpotqa

Any field of the run's config can be overridden, for example
`--config.data.path=FOLDER` to score other data. Priority: command line, then the file given by
`--eval_config`, then the run's saved config.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_flags
from tqdm import tqdm

from qrag_jax import evaluation, experiment
from qrag_jax.algorithms import placement
from qrag_jax.data.episodes import EpisodeShape
from qrag_jax.data.sample import Sample
from qrag_jax.data.tokens import TokenStore
from qrag_jax.encoders.pretrained import LoadedEncoder
from qrag_jax.encoders.text_encoder import Params
from qrag_jax.errors import InputError
from qrag_jax.metrics import retrieval_log
from qrag_jax.metrics.bootstrap import paired_interval
from qrag_jax.metrics.facts import summarise
from qrag_jax.metrics.retrieval_log import Row
from qrag_jax.runtime import commandline
from qrag_jax.runtime.checkpoints import Checkpoints
from qrag_jax.runtime.compilation import enable_persistent_cache
from qrag_jax.runtime.mesh import make_mesh

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run to score.")
CHECKPOINT = flags.DEFINE_enum("checkpoint", "best", ["best", "last"], "Which checkpoint.")
SAMPLES = flags.DEFINE_integer("samples", 0, "Questions to score, 0 for all.", lower_bound=0)
OUT = flags.DEFINE_string("out", None, "Folder of logs and summaries; default WORKDIR/eval.")
RESTART = flags.DEFINE_bool("restart", False, "Throw partial logs away instead of resuming them.")
flags.DEFINE_string("eval_config", None, "Config FILE whose fields replace the run's.")

TRAINED, UNTRAINED = "trained", "untrained"
# What each line of the table is called: (encoder, steps) → name.
NAMES = {
    (UNTRAINED, "multi"): "untrained",
    (UNTRAINED, "single"): "single_step",
    (TRAINED, "single"): "single_step_trained",
    (TRAINED, "multi"): "trained",
}


@dataclasses.dataclass(frozen=True)
class Scene:
    """All that is shared by the encoders scored: the questions and the compiled program."""

    config: ml_collections.ConfigDict
    mesh: Mesh
    play: evaluation.Play
    samples: Sequence[Sample]
    store: TokenStore
    shape: EpisodeShape
    indices: list[int]
    fingerprint: str


def evaluate(workdir: Path, config: ml_collections.ConfigDict, hold_out: bool) -> dict[str, Any]:
    """Scores the run's checkpoint and the encoder it started from; returns the summary.

    Args:
        hold_out: the data are those of the training run; of a single file only the part kept
            for evaluation is scored.

    Raises:
        InputError: the run, its data or its checkpoint cannot be used.
    """
    enable_persistent_cache(workdir / "compilation_cache")
    mesh = make_mesh(config.runtime.mesh)
    loaded_samples = experiment.read_samples(config, "dev", hold_out=hold_out)
    for line in loaded_samples.report:
        print(line)
    if not (workdir / "encoder").exists():
        raise InputError(f"{workdir} holds no encoder; --workdir must be a run that was trained.")
    loaded = experiment.prepare_encoder(config, workdir, [])
    rules = experiment.sharding_rules(config)
    shardings = placement.params_shardings(mesh, rules, loaded.params)
    scene = _scene(config, mesh, shardings, loaded, loaded_samples.all)
    checkpoints = Checkpoints(workdir)
    out = Path(OUT.value) if OUT.value else workdir / "eval"
    trained, step = checkpoints.restore_params(CHECKPOINT.value, _template(shardings, loaded))
    untrained = placement.both_towers(shardings, loaded.params)
    summary: dict[str, Any] = {"checkpoint": CHECKPOINT.value, "step": step}
    played: dict[str, list[Row]] = {}
    for name, params in ((UNTRAINED, untrained), (TRAINED, trained)):
        label = name if name == UNTRAINED else f"{CHECKPOINT.value}-{step}"
        scores, rate = _score(scene, params, out / label, label)
        played |= {NAMES[name, steps]: rows for steps, rows in scores.items()}
        summary["episodes_per_second"] = rate
        del params
    summary |= {name: _with_flat_scores(summarise(rows)) for name, rows in played.items()}
    summary["gains"] = _gains(played)
    summary["samples"] = len(scene.indices)
    summary["seconds"] = _training_seconds(workdir)
    path = out / (Path(retrieval_log.log_name(config.eval.seed)).stem + "_summary.json")
    # The run's own summary is that of its own data, whatever else it is scored on.
    for target in (path,) if OUT.value else (path, workdir / "summary.json"):
        target.write_text(json.dumps(summary, indent=2) + "\n")
    print(table(summary))
    print(f"retrieval log: {out / label / retrieval_log.log_name(config.eval.seed)}")
    print(f"summary: {path}")
    return summary


def table(summary: dict[str, Any]) -> str:
    """The scores as text: mean and bootstrap 95 % interval, one line a retriever."""
    recalls = [name for name in summary["trained"] if name.startswith("recall@")]
    columns = ["fact_em", "fact_f1", *recalls, "return"]
    lines = [["", *columns]]
    for name in NAMES.values():
        intervals = summary[name]["intervals"]
        cells = [
            f"{intervals[c]['mean']:.3f} [{intervals[c]['low']:.3f}, {intervals[c]['high']:.3f}]"
            for c in columns
        ]
        lines.append([name.replace("_", " "), *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    for other, gains in summary["gains"].items():
        differences = [
            f"{name} {gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}]"
            for name, gain in gains.items()
        ]
        text.append(f"trained - {other.replace('_', ' ')}: {', '.join(differences)}")
    speed = summary["episodes_per_second"]
    text.append(
        f"{summary['samples']} questions, {summary['checkpoint']} checkpoint of step "
        f"{summary['step']}" + (f", {speed:.1f} episodes/s" if speed else "")
    )
    return "\n".join(text)


def _scene(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    shardings: Params,
    loaded: LoadedEncoder,
    samples: Sequence[Sample],
) -> Scene:
    store = experiment.tokenise_samples(config, loaded.tokenizer, samples)
    shape = EpisodeShape.holding([store])
    experiment.check_fit(config, loaded.encoder.max_positions, shape, {"evaluation": store})
    plan = experiment.make_plan(config, shape, [store])
    play = evaluation.make_play(
        mesh,
        shardings,
        loaded.encoder,
        plan,
        experiment.rollout_config(config),
        experiment.feedback(config),
        config.pqn.gamma,
    )
    order = np.random.default_rng(config.eval.seed).permutation(len(samples))
    indices = sorted(order[: SAMPLES.value or len(samples)].tolist())
    shown = [samples[i] for i in indices]
    return Scene(config, mesh, play, samples, store, shape, indices, experiment.fingerprint(shown))


def _score(
    scene: Scene, params: Params, folder: Path, label: str
) -> tuple[dict[str, list[Row]], float | None]:
    """Plays what the logs do not hold yet; returns the rows and episodes/s (None if all were)."""
    seed = scene.config.eval.seed
    log = folder / retrieval_log.log_name(seed)
    logs = {"multi": log, "single": log.with_name(f"single_step_{log.name}")}
    meta = {
        "encoder": label,
        "samples": scene.fingerprint,
        "max_steps": scene.config.env.max_steps,
        "max_chunk_tokens": scene.config.data.max_chunk_tokens,
        "max_chunk_tokens_in_state": scene.config.data.max_chunk_tokens_in_state,
    }
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Row]] = {}
    for kind, path in logs.items():
        if RESTART.value:
            retrieval_log.discard(path)
        retrieval_log.check_meta(path, meta)
        rows[kind] = retrieval_log.read_partial(path)
    # The two logs are written one after the other: go on where both are complete.
    done = min(map(len, rows.values()))
    if done:
        print(f"{label}: {done} of {len(scene.indices)} questions are in the logs already")
    todo = scene.indices[done:]
    started = time.monotonic()
    with tqdm(total=len(todo), unit="episode", desc=label, disable=not todo) as bar:
        for multi, single in evaluation.play_samples(
            scene.play,
            scene.mesh,
            params,
            scene.samples,
            scene.store,
            scene.shape,
            scene.config.eval.batch_size,
            todo,
        ):
            for kind, new in (("multi", multi), ("single", single)):
                missing = new[len(rows[kind]) - done :] if len(rows[kind]) > done else new
                retrieval_log.append(logs[kind], missing)
                rows[kind] = rows[kind] + missing
            done += len(multi)
            bar.update(len(multi))
    seconds = time.monotonic() - started
    return rows, len(todo) / seconds if todo else None


def _gains(played: dict[str, list[Row]]) -> dict[str, Any]:
    """Trained minus each other retriever, over the same questions: paired bootstrap intervals."""
    trained = played["trained"]
    gains: dict[str, Any] = {}
    for name in ("untrained", "single_step", "single_step_trained"):
        em = paired_interval([row.em for row in trained], [row.em for row in played[name]])
        f1 = paired_interval([row.f1 for row in trained], [row.f1 for row in played[name]])
        gains[name] = {
            score: dict(zip(("mean", "low", "high"), interval, strict=True))
            for score, interval in (("fact_em", em), ("fact_f1", f1))
        }
    return gains


def _with_flat_scores(scores: dict[str, Any]) -> dict[str, Any]:
    """Means under their own names, and all intervals below `intervals`."""
    intervals = {name: value for name, value in scores.items() if isinstance(value, dict)}
    return {**{name: value["mean"] for name, value in intervals.items()}, "intervals": intervals}


def _template(shardings: Params, loaded: LoadedEncoder) -> Params:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            (2, *leaf.shape), leaf.dtype, sharding=sharding
        ),
        loaded.params,
        shardings,
    )


def _training_seconds(workdir: Path) -> float | None:
    path = workdir / "training.json"
    return json.loads(path.read_text())["seconds"] if path.exists() else None


def _argument(argv: Sequence[str], name: str) -> str | None:
    """The value of `--name=value` or `--name value`, read before absl knows the config."""
    for i, word in enumerate(argv):
        flag, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag == name:
            return value if equals else (argv[i + 1] if i + 1 < len(argv) else None)
    return None


def _define_config(argv: Sequence[str]) -> None:
    """Makes the run's saved config, updated by `--eval_config`, the flag `--config`."""
    workdir = _argument(argv, "workdir")
    if {"--help", "-h", "--helpfull"} & set(argv):
        return
    if workdir is None:
        raise InputError("give the run to score, for example --workdir=runs/hotpotqa.")
    config = experiment.load_config(Path(workdir) / "config.json")
    if file := _argument(argv, "eval_config"):
        _replace_fields(config, file)
    config_flags.DEFINE_config_dict("config", config, lock_config=True)


def _replace_fields(config: ml_collections.ConfigDict, file: str) -> None:
    """Puts the fields of the config `file` into `config`; the sources as one whole."""
    parser = config_flags.config_flags.ConfigFileFlagParser(name="eval_config")
    try:
        fields = parser.parse(file)
        if "sources" in fields.get("data", {}):
            del config.data.sources
            config.data.sources = fields.data.sources
        config.lock().update(fields)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[-1].strip().removeprefix("ValueError: ")
        raise InputError(f"--eval_config={file}: {reason}") from None


def main() -> int:
    """Reads the flags and scores."""
    workdir = Path(WORKDIR.value or ".")
    config = flags.FLAGS.config
    saved = experiment.load_config(workdir / "config.json")
    same_data = (config.data.path, config.eval.path) == (saved.data.path, saved.eval.path)
    evaluate(workdir, config, hold_out=same_data)
    return 0


if __name__ == "__main__":
    commandline.run(main, define=_define_config)
