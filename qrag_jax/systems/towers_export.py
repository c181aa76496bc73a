"""Exports a run's towers as sentence-transformers models, with their adapters and a model card.

`state` embeds states (the question and the chunks taken so far), `chunk` embeds chunks. Both give
the same vectors as in training. For a run with LoRA, both have the adapters merged in;
`adapter-state` and `adapter-chunk` hold the adapters alone, in PEFT's format.

`retriever.json` holds all other settings that a search needs, so that the folder is a retriever.

The encoder's scale (0.1 for the mean of BERT's hidden states, as in Q-RAG) is multiplied into the
trunk's last norm: every pooling is linear, so vectors come out scaled, in any server of embeddings.
Normalised vectors lose a factor in the norm; theirs stays a module of its own.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from huggingface_hub import EvalResult, ModelCardData
from jax.experimental import multihost_utils

import qrag_jax
from qrag_jax.data.config import DataConfig
from qrag_jax.environments import positions
from qrag_jax.environments.chunks import state_width
from qrag_jax.evaluators.log_record import Retriever
from qrag_jax.metrics.chunk_filters import FULL_BUDGET
from qrag_jax.metrics.comparison import table
from qrag_jax.metrics.stopping import REPORT
from qrag_jax.models.compute.lora import Adapted, merge
from qrag_jax.models.compute.rope import THETA
from qrag_jax.models.files.sentence_transformers import (
    check_tokenizer,
    token_name,
    write_modules,
    write_tokenizer,
)
from qrag_jax.models.files.weight_names import LeafPath, save_folder
from qrag_jax.models.first_encoder import origin
from qrag_jax.models.heads.embedding import Params, TextEncoder
from qrag_jax.models.pretrained import VECTOR_SCALE, LoadedEncoder, save_adapters
from qrag_jax.models.trunks.families import family_of
from qrag_jax.models.trunks.trunk import LAYERS
from qrag_jax.retrieval.exported import chunk_digest
from qrag_jax.rollouts.chunks import CHUNK, STATE
from qrag_jax.runtime import retriever_config as retriever_file
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.runtime.saved_config import CONFIG_NAME, read_fields
from qrag_jax.runtime.whole_files import check_is_free, sha256, whole_folder, write_whole
from qrag_jax.systems.q_rag_config import QRagConfig, load_config
from qrag_jax.systems.q_rag_scoring import SUMMARY, checkpoint_label, training_seconds
from qrag_jax.systems.saved_run import SavedRun

CARD = "README.md"
ADAPTER = "adapter"  # prefix of the names of the folders in PEFT's format


class Tower(NamedTuple):
    """One of the two encoders of a run, as it is written."""

    name: str  # of its folder
    number: int  # its index on axis 0 of the parameters
    opening: tuple[int, ...]  # token ids that every row begins with
    max_tokens: int  # length of the longest row
    plain: bool  # whether a text is one part, not parts joined by the separator


def towers(loaded: LoadedEncoder, config: QRagConfig) -> tuple[Tower, Tower]:
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


def parameters(loaded: LoadedEncoder, number: int, params: Params | Adapted) -> Params:
    """The parameters of one tower, with its adapters merged in, as float32 NumPy arrays."""
    if not isinstance(params, Adapted):
        return _on_host(params, number)
    merged = Adapted(loaded.params, _on_host(params.adapters, number))
    return merge(merged, loaded.encoder.lora_scale)


def _on_host(stacked: Params, number: int) -> Params:
    """One tower of both; of several hosts, all call this together."""

    def gathered(leaf: Any) -> np.ndarray:
        part = leaf[number]
        if isinstance(part, jax.Array) and not part.is_fully_addressable:
            part = multihost_utils.process_allgather(part, tiled=True)
        return np.asarray(part, np.float32)

    return jax.tree.map(gathered, stacked)


def scale_outside(encoder: TextEncoder) -> float:
    """The factor on the vectors that an exported tower's weights cannot hold; 1: there is none."""
    return encoder.scale if encoder.normalise else 1.0


def scaled_norm(params: Params, norm: LeafPath, factor: float) -> Params:
    """One tower's parameters with its last norm, and so all hidden states, times a factor.

    Args:
        params: as NumPy arrays; they stay as they are.
        norm: the place of the norm's weights (`Family.last_norm`). Of a norm in the layers, only
            the last layer's is multiplied.
        factor: multiplies the norm's weight and, if it has one, its bias.
    """
    *in_layers, name = norm
    tree = params[LAYERS] if in_layers else params
    scaled = jax.tree.map(np.array, tree[name])  # copies
    for leaf in scaled.values():
        (leaf[-1] if in_layers else leaf)[...] *= np.float32(factor)
    tree = tree | {name: scaled}
    return params | {LAYERS: tree} if in_layers else tree


def write_tower(loaded: LoadedEncoder, tower: Tower, params: Params | Adapted, out: Path) -> None:
    """Writes one tower as a folder that `SentenceTransformer(out)` reads.

    Args:
        params: parameters of both towers, stacked on axis 0; in an `Adapted`, only the adapters
            are stacked.
        out: the folder, which this function creates.
    """
    encoder, tokenizer = loaded.encoder, loaded.tokenizer
    out.mkdir()
    for make in (write_tokenizer, check_tokenizer):
        make(out, tokenizer, tower.opening, max_tokens=tower.max_tokens, plain=tower.plain)
    family, outside = family_of(loaded.model_config, str(out)), scale_outside(encoder)
    write_modules(
        out,
        pooling=encoder.pooling,
        normalise=encoder.normalise,
        scale=outside,
        width=encoder.width,
        max_tokens=tower.max_tokens,
        pooler=family.pooler,
    )
    one = parameters(loaded, tower.number, params)
    one = scaled_norm(one, family.last_norm, encoder.scale / outside)
    config = loaded.model_config | {VECTOR_SCALE: outside}
    save_folder(family.table, one, config, out, out)


def run_chunk_digest(run: SavedRun, params: Params | Adapted) -> str:
    """The digest of a run's tower of chunks, as it would be exported; writes it for a moment."""
    _, tower = towers(run.loaded, run.config)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / tower.name
        write_tower(run.loaded, tower, params, out)
        return chunk_digest(out)


def export(run: SavedRun, which: str, out: Path) -> None:
    """Writes both towers of a checkpoint, their adapters and the model card."""
    check_is_free(out)
    params, step = run.trained(which)
    threshold = stop_threshold(run, checkpoint_label(which, step), params)
    summary = run.workdir / SUMMARY
    scores = read_fields(summary) if summary.exists() else {}
    saved = load_config(run.workdir / CONFIG_NAME)  # `run.config` may have other data
    scored = QRagConfig.of(saved, scoring=True).dev_data
    with whole_folder(out) as building:
        for tower in towers(run.loaded, run.config):
            write_tower(run.loaded, tower, params, building / tower.name)
            if isinstance(params, Adapted):
                adapters = _on_host(params.adapters, tower.number)
                save_adapters(run.loaded, adapters, building / f"{ADAPTER}-{tower.name}")
        about = retriever_config(run, building, threshold)
        text = card(run, about, which, step, scored=scored, summary=scores)
        for folder in (building, *building.iterdir()):
            write_whole(folder / CARD, text)
        about.write(building)


def stop_threshold(run: SavedRun, label: str, params: Params | Adapted) -> float | None:
    """The threshold on Q at which the run's searches stop; None: there is none.

    It is the config's (`config.eval.stop_threshold`), else what `evaluate --log` found on the
    log of this checkpoint. A report for other weights is not used, which is said.
    """
    given = run.config.eval.stop_threshold
    if given > -math.inf:
        return given
    path = run.workdir / "eval" / label / REPORT
    if not path.exists():
        return None
    report = read_fields(path)
    weights = report["provenance"].get("weights")
    if weights != Retriever.of(label, params).weights:
        print(f"{path} was tuned for other weights, so its threshold is left out")
        return None
    return report["threshold"]


def retriever_config(run: SavedRun, folder: Path, threshold: float | None) -> RetrieverConfig:
    """What `retriever.json` says about towers exported to `folder`; see `stop_threshold`."""
    config, encoder, tokenizer = run.config, run.loaded.encoder, run.loaded.tokenizer
    state, chunk = (
        retriever_file.Tower(
            folder=tower.name,
            prefix=getattr(config.encoder, f"{tower.name}_prefix"),
            max_tokens=tower.max_tokens,
            width=encoder.width,
            scale=scale_outside(encoder),
            weights={
                path.name: sha256(path)
                for path in sorted((folder / tower.name).glob("*.safetensors"))
            },
        )
        for tower in towers(run.loaded, config)
    )
    return RetrieverConfig(
        format=retriever_file.FORMAT,
        library_version=qrag_jax.__version__,
        # A hub name, or the last part of a path; "": random weights.
        base_model=without_folders(origin(config.encoder.path, run.workdir)),
        state=state,
        chunk=chunk,
        title_separator=config.data.passage_separator,
        separator=token_name(tokenizer, tokenizer.sep_id),
        separator_id=tokenizer.sep_id,
        max_question_tokens=config.data.max_question_tokens,
        max_chunk_tokens_in_state=config.data.max_chunk_tokens_in_state,
        sort_by_index=config.env.sort_by_index,
        positions=retriever_file.Positions(
            kind=config.env.positions,
            theta=THETA,
            step=positions.STEP,
            span=positions.SPAN,
            parts=positions.PARTS,
            most_chunks=positions.MOST_CHUNKS,
        ),
        search=retriever_file.Search(
            max_steps=config.env.max_steps,
            beam=config.beam.beam,
            beam_score=config.beam.score,
            gamma=config.beam.gamma,
            alpha=config.beam.alpha,
            top_k_actions=config.beam.top_k_actions,
            stop_action=config.env.stop_action,
            stop_threshold=threshold,
        ),
    )


# How the card explains the positions of chunks, by the value of config.env.positions.
NUMBERING = {
    "absolute": "p = 0, 1, 2, … in document order",
    "random": "p = 0, 1, 2, … in document order (in training with random gaps)",
    positions.RANDOM_PUBLISHED: (
        f"p = i + d for chunk i, d the indent of its part of the document, of {positions.PARTS} "
        "parts, drawn from the question and the number of chunks"
    ),
    "relative": (
        f"with the taken chunks' indices sorted, i_1 < … < i_k, the m chunks from i_j up to "
        f"i_(j+1) stand at {positions.STEP}·j + ⌊linspace(0, {positions.SPAN}, m)⌋, "
        "those before i_1 at j = 0; it changes with every chunk taken"
    ),
}


def card(
    run: SavedRun,
    about: RetrieverConfig,
    which: str,
    step: int,
    *,
    scored: DataConfig,
    summary: Mapping[str, Any],
) -> str:
    """The card as Markdown, with the metadata that model hubs read.

    Args:
        about: what `retriever.json` says.
        which, step: the checkpoint, "best" or "last".
        scored: the data of the run's own evaluation.
        summary: content of `summary.json`; {} if the run was not scored.
    """
    name = run.workdir.resolve().name
    are_own = bool(summary) and (summary["checkpoint"], summary["step"]) == (which, step)
    fields = json.dumps(without_folders(run.given), indent=1, default=str)
    untrained = "**These are the untrained weights**, the encoder that the run started from."
    sections = [
        front_matter(name, scored, summary if are_own else {})
        + f"# {name}: a retriever that searches in several steps",
        "" if step else untrained,
        _use(run, about),
        _positions(run.config),
        _training(run, about, which, step),
        _scores(summary, are_own=are_own),
        "## Config\n\n<details><summary>Every field</summary>\n\n"
        f"```json\n{fields}\n```\n\n</details>",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _use(run: SavedRun, about: RetrieverConfig) -> str:
    data, env = run.config.data, run.config.env
    separator, titled = json.dumps(about.separator), json.dumps(data.passage_separator)
    order = "document order" if env.sort_by_index else "the order they were taken in"
    taken = "sorted(taken)" if env.sort_by_index else "taken"
    notes = [
        f"A state's text is the question and the chunks taken, in {order}, with {separator} "
        "between them and no spaces around it.",
        f"Rows have at most {about.state.max_tokens} (`state`) and {about.chunk.max_tokens} tokens "
        "(`chunk`), special ones counted; longer texts are cut there.",
        *_notes(run, about),
        "`retriever.json` holds these settings and those of a planned search, for programs.",
    ]
    return f"""\
Two text encoders trained together by PQN with [qrag_jax](https://github.com/qrag-jax/qrag_jax), as
in Q-RAG (arXiv 2511.07328). `state` embeds a question with the chunks taken so far, `chunk` embeds
one chunk; their inner product is a Q-value, the return expected when this chunk is taken next.

## Use

```python
from sentence_transformers import SentenceTransformer

state, chunk = SentenceTransformer("state"), SentenceTransformer("chunk")


def first(text, tokens):  # where training cut the parts of a state
    options = {{"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}}
    places = state.tokenizer(text, **options)["offset_mapping"]
    return text[: places[tokens - 1][1]] if len(places) > tokens else text


# question: a text; chunks: a list of texts, each a passage's title (if any), {titled}, its text
vectors = chunk.encode(chunks)  # once, into any vector store that ranks by inner product
taken = []
for _ in range({env.max_steps}):
    parts = (first(chunks[i], {data.max_chunk_tokens_in_state}) for i in {taken})
    text = {separator}.join([first(question, {data.max_question_tokens}), *parts])
    q = vectors @ state.encode(text)
    q[taken] = -float("inf")
    taken.append(int(q.argmax()))
```

""" + "\n".join(f"- {note}" for note in notes)


def _notes(run: SavedRun, about: RetrieverConfig) -> Iterator[str]:
    """What else one must know of the vectors, a sentence each."""
    encoder, lora = run.loaded.encoder, run.loaded.lora
    vectors = f"Vectors have {about.state.width} numbers: {encoder.pooling} pooling"
    if encoder.normalise and encoder.scale != 1:
        yield (
            f"{vectors}, normalised, times {encoder.scale:g}. The factor is the module `3_Dense`; "
            "servers that skip it (text-embeddings-inference and vLLM did) give vectors of length "
            f"1, to be multiplied by {encoder.scale:g}."
        )
    elif encoder.normalise:
        yield f"{vectors}, normalised."
    else:
        yield (
            f"{vectors}, times {encoder.scale:g} (already in the weights). Compare them by the "
            "inner product as they are; normalised ones may rank otherwise."
        )
    for tower in (about.state, about.chunk):
        if tower.prefix:
            yield (
                f"The tokenizer of `{tower.folder}` begins rows with {json.dumps(tower.prefix)}, "
                "as in training: do not write it again."
            )
    if lora is not None:
        yield (
            "`state` and `chunk` hold the trained adapters merged in (rank "
            f"{lora.rank}, alpha {lora.alpha:g}); `adapter-state` and `adapter-chunk` hold them "
            'alone: `peft.PeftModel.from_pretrained(base, "adapter-state")`, where `base` is the '
            "model that training started from."
        )
    if about.search.stop_action:
        yield "The empty text, embedded by `chunk`, is the action STOP: taken, the search ends."
    if (threshold := about.search.stop_threshold) is not None:
        yield f"The search may stop before a chunk whose Q is not above {threshold!r}."


def _positions(config: QRagConfig) -> str:
    kind = config.env.positions
    if kind == "none":
        return ""
    return f"""## Positions

This run rotates chunk vectors by their position p before the inner product; states are not rotated.
Each half of a vector (width D) is rotated by itself: the pair (2j, 2j+1) turns by the angle
p·{THETA:.0f}^(-2j/D). Positions are `{kind}`: {NUMBERING[kind]}.
Rotating the state by -p instead gives the same products, so stored chunk vectors can stay as they \
are.
`qrag_jax.models.compute.rope.rotate` and `qrag_jax.environments.positions` compute both."""


def _training(run: SavedRun, about: RetrieverConfig, which: str, step: int) -> str:
    config, base = run.config, about.base_model
    path = without_folders(config.data.path)
    seconds = training_seconds(run.workdir)
    took = "" if seconds is None else f", {seconds / 60:.1f} minutes of training"
    encoder = f"`{base}`" if base else "random initialisation, a small encoder from scratch"
    data = ", ".join(name for name, weight in config.data.sources.items() if weight)
    return (
        f"## Training\n\nStarted from {encoder}, on {data}{f' from `{path}`' if path else ''}. "
        f"This is the {which} checkpoint, optimizer step {step} of "
        f"{config.train.steps}{took}."
    )


def _scores(summary: Mapping[str, Any], *, are_own: bool) -> str:
    if not summary:
        return "## Scores\n\nNot scored yet: `python -m qrag_jax.evaluate` does it."
    other = "" if are_own else "Scored with **another checkpoint** than the one here.\n\n"
    return f"## Scores\n\n{other}```text\n{table(dict(summary))}\n```"


TAGS = ("sentence-transformers", "feature-extraction", "multi-step-retrieval", "qrag_jax")
COLUMNS = ("fact_em", "fact_f1", "fact_precision", "fact_recall", "answer_found")
RECALL_AT = "recall@"  # begins the names of recall after k steps


def front_matter(name: str, data: DataConfig, summary: Mapping[str, Any]) -> str:
    """The metadata that model hubs read, with the dashes around it; scores are in `model-index`."""
    about = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=[*TAGS],
        model_name=name if summary else None,
        eval_results=_results(data, summary) if summary else None,
    )
    return f"---\n{about.to_yaml()}\n---\n"


def _results(data: DataConfig, summary: Mapping[str, Any]) -> list[EvalResult]:
    scores, questions = summary["trained"]["intervals"], summary["samples"]
    asked = f"{summary.get('mode', FULL_BUDGET)}, {questions:d} questions"
    sources = [source for source, weight in data.sources.items() if weight]
    shown = [*COLUMNS, *(column for column in scores if column.startswith(RECALL_AT))]
    return [
        EvalResult(
            task_type="information-retrieval",
            task_name="Retrieval in several steps",
            dataset_type="+".join(sources),
            dataset_name=" + ".join(sources)
            + (f" ({without_folders(data.path)})" if data.path else ""),
            dataset_split="dev",
            dataset_args={"questions": questions},
            metric_type=column,
            metric_name=f"{column}, {asked}",
            metric_value=round(scores[column]["mean"], 4),
            metric_args={
                "low": round(scores[column]["low"], 4),
                "high": round(scores[column]["high"], 4),
                "interval": "bootstrap, 95 %",
            },
        )
        for column in shown
        if column in scores  # of those at k
    ]


# An absolute path, up to the last slash before its last part. Parts of data are written as
# path,split;path,split and settings as name=path.
_FOLDERS = re.compile(r"(?<![^=,;])[~/][^=,;]*/(?=[^=,;/])")


def without_folders(value: Any) -> Any:
    """The value with all absolute paths in it, at any depth, cut to their last part."""
    if isinstance(value, Mapping):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_folders(item) for item in value)
    return _FOLDERS.sub("", value) if isinstance(value, str) else value
