"""Writes a run's towers as sentence-transformers models: python -m qrag_jax.export --workdir=RUN
--out=FOLDER

FOLDER/state embeds states (the question and the chunks taken so far), FOLDER/chunk embeds chunks;
both give the vectors of training. README.md says how they were trained and how they are used.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
from absl import flags

from qrag_jax import model_card, run_flags
from qrag_jax.algorithms.rollout import CHUNK, STATE
from qrag_jax.encoders.pretrained import LoadedEncoder, family_of
from qrag_jax.encoders.sentence_transformers_files import write_modules, write_tokenizer
from qrag_jax.encoders.text_encoder import Params
from qrag_jax.encoders.weights import save_folder
from qrag_jax.environments.chunks import state_width
from qrag_jax.errors import InputError
from qrag_jax.runtime import commandline
from qrag_jax.saved_run import SavedRun

OUT = flags.DEFINE_string("out", None, "Folder to write; new or empty.")
CARD = "README.md"


class Tower(NamedTuple):
    """One of the two encoders of a run, as it is written.

    Attributes:
        name: its folder. index: its place in the parameters.
        opening: ids that its rows begin with. max_tokens: of its longest row.
        plain: its texts are single texts, not parts joined by the separator.
    """

    name: str
    index: int
    opening: tuple[int, ...]
    max_tokens: int
    plain: bool


def towers(loaded: LoadedEncoder, config: ml_collections.ConfigDict) -> tuple[Tower, Tower]:
    """The two towers of a run with this config."""
    encoder, data = loaded.encoder, config.data
    longest = state_width(
        len(encoder.state_opening),
        data.max_question_tokens,
        data.max_chunk_tokens_in_state,
        config.env.max_steps - 1,
    )
    of_state, of_chunk = (
        min(tokens, encoder.max_positions) for tokens in (longest, data.max_chunk_tokens)
    )
    return (
        Tower("state", STATE, encoder.state_opening, of_state, plain=False),
        Tower("chunk", CHUNK, encoder.chunk_opening, of_chunk, plain=True),
    )


def write_tower(loaded: LoadedEncoder, tower: Tower, params: Params, out: Path) -> None:
    """Writes one tower as a folder that `SentenceTransformer(out)` reads.

    Args:
        params: both towers', stacked on axis 0; brought to the host and to `out` in float32.
        out: made.
    """
    encoder = loaded.encoder
    out.mkdir()
    write_tokenizer(
        out, loaded.tokenizer, tower.opening, max_tokens=tower.max_tokens, plain=tower.plain
    )
    write_modules(
        out,
        pooling=encoder.pooling,
        normalise=encoder.normalise,
        scale=encoder.scale,
        width=encoder.width,
        max_tokens=tower.max_tokens,
    )
    one = jax.tree.map(lambda leaf: np.asarray(leaf[tower.index], np.float32), params)
    table = family_of(loaded.model_config, str(out)).table
    save_folder(table, one, loaded.model_config, out, out)


def export(run: SavedRun, which: str, out: Path) -> None:
    """Writes both towers of the "best" or "last" checkpoint, and the card.

    Raises:
        InputError: `out` holds something, or there is no such checkpoint.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"--out={out} exists and is not an empty folder; give another one.")
    params, step = run.trained(which)
    both = towers(run.loaded, run.config)
    card = model_card.card(_facts(run, which, step, both))
    # Built beside its place and renamed, so that no half of it is ever there.
    out.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    building = private / out.name
    try:
        building.mkdir()
        for tower in both:
            write_tower(run.loaded, tower, params, building / tower.name)
            (building / tower.name / CARD).write_text(card, encoding="utf-8")
        (building / CARD).write_text(card, encoding="utf-8")
        building.rename(out)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _facts(run: SavedRun, which: str, step: int, both: tuple[Tower, Tower]) -> model_card.Facts:
    encoder, tokenizer = run.loaded.encoder, run.loaded.tokenizer
    summary = run.workdir / "summary.json"
    training = run.workdir / "training.json"
    scores: dict[str, Any] = json.loads(summary.read_text()) if summary.exists() else {}
    seconds = json.loads(training.read_text())["seconds"] if training.exists() else None
    return model_card.Facts(
        name=run.workdir.resolve().name,
        config=run.config,
        checkpoint=which,
        step=step,
        seconds=seconds,
        summary=scores,
        pooling=encoder.pooling,
        normalise=encoder.normalise,
        width=encoder.width,
        prefixes={
            "state": tokenizer.backend.decode(list(encoder.state_prefix)),
            "chunk": tokenizer.backend.decode(list(encoder.chunk_prefix)),
        },
        separator=tokenizer.backend.id_to_token(tokenizer.sep_id),
        state_tokens=both[0].max_tokens,
        chunk_tokens=both[1].max_tokens,
    )


def main() -> int:
    """Reads the flags and exports."""
    if not OUT.value:
        raise InputError("give the folder to write, for example --out=exported.")
    out = Path(OUT.value).expanduser()
    run = SavedRun.open(Path(run_flags.WORKDIR.value or "."), flags.FLAGS.config)
    export(run, run_flags.CHECKPOINT.value, out)
    print(f"{out / 'state'}\n{out / 'chunk'}\n{out / CARD}")
    return 0


if __name__ == "__main__":
    commandline.run(main, define=run_flags.define_config)
