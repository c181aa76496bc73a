"""The model card of exported towers: their training, their scores and how to use them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCardData

from qrag_jax.data.config import BY_SIZE, DataConfig
from qrag_jax.data.sources import SOURCES
from qrag_jax.environments import positions
from qrag_jax.learners.optimizers import MUON
from qrag_jax.metrics.chunk_filters import FULL_BUDGET, UNTIL_FOUND
from qrag_jax.models.compute.rope import THETA
from qrag_jax.runtime.retriever_config import RetrieverConfig
from qrag_jax.systems.q_rag_config import QRagConfig
from qrag_jax.systems.q_rag_scoring import training_seconds
from qrag_jax.systems.saved_run import SavedRun

RETRIEVERS = ("untrained", "single_step", "single_step_trained", "trained", "planned")
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


class Facts(NamedTuple):
    """What the card says about a run."""

    run: SavedRun
    about: RetrieverConfig  # what `retriever.json` says
    checkpoint: str  # "best" or "last"
    step: int  # optimizer step of the checkpoint
    scored: DataConfig  # the data of the run's own evaluation
    summary: Mapping[str, Any]  # content of `summary.json`; {} if the run was not scored

    @property
    def are_own_scores(self) -> bool:
        """Whether the run was scored with the checkpoint that is exported."""
        summary = self.summary
        return bool(summary) and (summary["checkpoint"], summary["step"]) == (
            self.checkpoint,
            self.step,
        )


def card(facts: Facts) -> str:
    """The card as Markdown, with the metadata that model hubs read."""
    name = facts.run.workdir.resolve().name
    untrained = (
        "**These are the untrained weights.** The best checkpoint of the run is that of step 0,\n"
        "the encoder that it started from."
    )
    sections = [
        front_matter(name, facts.scored, facts.summary if facts.are_own_scores else {})
        + f"# {name}: a retriever that searches in several steps",
        "" if facts.step else untrained,
        _use(facts),
        _positions(facts.run.config),
        _training(facts),
        _scores(facts),
        _config(facts.run.given),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _use(facts: Facts) -> str:
    config, about = facts.run.config, facts.about
    data, env = config.data, config.env
    separator, titled = json.dumps(about.separator), json.dumps(data.passage_separator)
    order = "document order" if env.sort_by_index else "the order they were taken in"
    taken = "sorted(taken)" if env.sort_by_index else "taken"
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

- A state's text is the question and the chunks taken, in {order}, with {separator}
  between them and no spaces around it.
- Rows have at most {about.state.max_tokens} (`state`) and {about.chunk.max_tokens} tokens \
(`chunk`), special ones counted;
  longer texts are cut there.
- Vectors have {about.state.width} numbers: {facts.run.loaded.encoder.pooling} pooling\
{_vectors(facts)}{_prefixes(about)}\
{_adapters(facts)}{_stop(facts)}
- `retriever.json` holds these settings and those of a planned search, for programs."""


def _vectors(facts: Facts) -> str:
    encoder = facts.run.loaded.encoder
    if encoder.normalise and encoder.scale != 1:
        return (
            f", normalised, times {encoder.scale:g}. The factor is the\n"
            "  module `3_Dense`: servers that skip it (text-embeddings-inference and vLLM did) "
            f"give vectors\n  of length 1, to be multiplied by {encoder.scale:g}."
        )
    if encoder.normalise:
        return ", normalised."
    times = "" if encoder.scale == 1 else f", times {encoder.scale:g} (already in the weights)"
    return (
        f"{times}. Compare them\n"
        "  by the inner product as they are; normalised ones may rank otherwise."
    )


def _adapters(facts: Facts) -> str:
    lora = facts.run.loaded.lora
    if lora is None:
        return ""
    return f"""
- `state` and `chunk` hold the trained adapters merged in (rank {lora.rank}, alpha \
{lora.alpha:g}). `adapter-state` and `adapter-chunk`
  hold them alone: `peft.PeftModel.from_pretrained(base, "adapter-state")`, where `base` is the
  model that training started from; rows, pooling and scale are then yours to make."""


def _prefixes(about: RetrieverConfig) -> str:
    told = [
        f"rows of `{tower.folder}` with {json.dumps(tower.prefix)}"
        for tower in (about.state, about.chunk)
        if tower.prefix
    ]
    if not told:
        return ""
    begin = " and ".join(told)
    return f"\n- The tokenizers begin {begin}, as in training: do not write it again."


def _stop(facts: Facts) -> str:
    told = ""
    if facts.about.search.stop_action:
        told += (
            "\n- The empty text, embedded by `chunk`, is the action STOP: taken, the search ends."
        )
    if (threshold := facts.about.search.stop_threshold) is not None:
        told += f"\n- The search may stop before a chunk whose Q is not above {threshold!r}."
    return told


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


def _training(facts: Facts) -> str:
    config, base, lora = facts.run.config, facts.about.base_model, facts.run.loaded.lora
    encoder = f"`{base}`" if base else "random initialisation, a small encoder from scratch"
    weights = {name: weight for name, weight in config.data.sources.items() if weight}
    sources = ", ".join(f"{name} (weight {weight:g})" for name, weight in weights.items())
    if config.data.mixture == BY_SIZE and len(weights) > 1:
        sources += ", each times its size"
    path = without_folders(config.data.path)
    on_hub = all(getattr(SOURCES.get(name), "hub", None) for name in weights)
    place = f"from `{path}`" if path else "from the hub" if on_hub else "invented"
    muon = config.optimizer.matrices == MUON
    method = "Muon on the layers' linear maps, else AdamW" if muon else "AdamW"
    seconds = training_seconds(facts.run.workdir)
    minutes = "" if seconds is None else f", {seconds / 60:.1f} minutes of training"
    lines = {
        "started from": encoder,
        "data": f"{sources}, {place}",
        "checkpoint": f"{facts.checkpoint}, optimizer step {facts.step} of {config.train.steps}"
        + minutes,
        "batch": f"{config.train.batch_size} questions × {config.env.max_steps} steps",
        "γ, λ, τ, α": f"{config.pqn.gamma}, {config.pqn.lambda_}, {config.pqn.tau}, "
        f"{config.policy.alpha}",
        "optimizer": f"{method}, learning rate {config.optimizer.learning_rate}, weight decay "
        f"{config.optimizer.weight_decay}, {config.optimizer.schedule}",
        "seed": str(config.seed),
    }
    if lora is not None:
        targets = lora.targets
        names = targets if isinstance(targets, str) else ", ".join(targets)
        lines["trained"] = f"low-rank adapters (LoRA), rank {lora.rank}, on {names}"
    rows = [f"| {name} | {value} |" for name, value in lines.items()]
    return "\n".join(["## Training", "", "| | |", "|---|---|", *rows])


def _scores(facts: Facts) -> str:
    summary = facts.summary
    if not summary:
        return "## Scores\n\nNot scored yet: `python -m qrag_jax.evaluate` does it."
    told = f"{summary['samples']} questions of the run's evaluation data"
    if not facts.are_own_scores:
        told += (
            f", scored with **another checkpoint** than the one here: {summary['checkpoint']}, "
            f"step {summary['step']}"
        )
    recalls = [name for name in summary["trained"] if name.startswith(RECALL_AT)]
    parts = [
        f"## Scores\n\n{told}. Means with bootstrap 95 % intervals; fact EM: all supporting chunks "
        "were taken.",
    ]
    if summary["mode"] == FULL_BUDGET:
        parts.append(_scores_table(f"{FULL_BUDGET}: all steps", summary, recalls))
    if "until_found" in summary:
        title = f"{UNTIL_FOUND}: ends once all facts are found, so it uses the answer key"
        parts.append(_scores_table(title, summary["until_found"], []))
    return "\n\n".join(parts)


def _scores_table(title: str, summary: Mapping[str, Any], recalls: Sequence[str]) -> str:
    names = [name for name in RETRIEVERS if name in summary]
    # Questions without facts, or without answers, have only some of these.
    there = [name for name in COLUMNS if name in summary["trained"]["intervals"]]
    last = [name for name in ("return",) if name in summary["trained"]["intervals"]]
    columns = [*there, *recalls, *last]
    rows = []
    for name in names:
        intervals = summary[name]["intervals"]
        # A retriever that stops early may never take k chunks: then its fact recall is shown.
        cells = (intervals.get(c) or intervals["fact_recall"] for c in columns)
        rows.append([name.replace("_", " "), *map(_cell, cells)])
    return _table([title, *columns], rows)


def _cell(interval: Mapping[str, float]) -> str:
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _config(fields: Mapping[str, Any]) -> str:
    text = json.dumps(without_folders(fields), indent=1, default=str)
    block = f"```json\n{text}\n```"
    return f"## Config\n\n<details><summary>Every field</summary>\n\n{block}\n\n</details>"


TAGS = ("sentence-transformers", "feature-extraction", "multi-step-retrieval", "qrag_jax")
COLUMNS = ("fact_em", "fact_f1", "fact_precision", "fact_recall", "answer_found")
RECALL_AT = "recall@"  # begins the names of recall after k steps


def front_matter(name: str, data: DataConfig, summary: Mapping[str, Any]) -> str:
    """The metadata that model hubs read, with the dashes around it; scores are in `model-index`.

    Args:
        name: of the model.
        data: the data that were scored.
        summary: content of `summary.json`, if it holds scores of this model's weights; else {}.
    """
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
            dataset_name=_dataset(sources, data.path),
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


def _dataset(sources: list[str], path: str) -> str:
    names = " + ".join(sources)
    return f"{names} ({without_folders(path)})" if path else names


# An absolute path, up to the last slash before its last part. Parts of data are written as
# path,split;path,split and settings as name=path.
_FOLDERS = re.compile(r"(?<![^=,;])[~/][^=,;]*/(?=[^=,;/])")


def without_folders(value: Any) -> Any:
    """The value with all absolute paths in it, at any depth, cut to their last part.

    Args:
        value: a text, or mappings, lists and tuples of such values; all else stays as it is.
    """
    if isinstance(value, Mapping):
        return {name: without_folders(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_folders(item) for item in value)
    return _FOLDERS.sub("", value) if isinstance(value, str) else value
