"""The metadata of a model card that model hubs read: YAML between two lines of dashes.

Scores are in `model-index`, the form that the hub shows them from
(https://github.com/huggingface/hub-docs/blob/main/modelcard.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from qrag_jax.data.config import DataConfig
from qrag_jax.metrics.chunk_filters import FULL_BUDGET

HEAD = """\
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, feature-extraction, multi-step-retrieval, qrag_jax]
"""
COLUMNS = ("fact_em", "fact_f1", "fact_precision", "fact_recall", "answer_found")
RECALL_AT = "recall@"  # begins the names of recall after k steps


def front_matter(name: str, data: DataConfig, summary: Mapping[str, Any]) -> str:
    """The metadata, with the dashes around it.

    Args:
        name: of the model.
        data: the data that were scored.
        summary: content of `summary.json`, if it holds scores of this model's weights; else {}.
    """
    index = _model_index(name, data, summary) if summary else ""
    return f"---\n{HEAD}{index}---\n"


def _model_index(name: str, data: DataConfig, summary: Mapping[str, Any]) -> str:
    scores = summary["trained"]["intervals"]
    questions = summary["samples"]
    asked = f"{summary.get('mode', FULL_BUDGET)}, {questions:d} questions"
    sources = [source for source, weight in data.sources.items() if weight]
    lines = [
        "model-index:",
        f"- name: {_text(name)}",
        "  results:",
        "  - task:",
        "      type: information-retrieval",
        "      name: Retrieval in several steps",
        "    dataset:",
        f"      type: {_text('+'.join(sources))}",
        f"      name: {_text(_dataset(sources, data.path))}",
        "      split: dev",
        "      args:",
        f"        questions: {questions:d}",
        "    metrics:",
    ]
    shown = [*COLUMNS, *(column for column in scores if column.startswith(RECALL_AT))]
    for column in shown:
        if column in scores:  # of those at k
            interval = scores[column]
            lines += [
                f"    - type: {_text(column)}",
                f"      name: {_text(f'{column}, {asked}')}",
                f"      value: {interval['mean']:.4f}",
                "      args:",
                f"        low: {interval['low']:.4f}",
                f"        high: {interval['high']:.4f}",
                "        interval: bootstrap, 95 %",
            ]
    return "\n".join(lines) + "\n"


def _dataset(sources: list[str], path: str) -> str:
    names = " + ".join(sources)
    return f"{names} ({without_folders(path)})" if path else names


def _text(value: str) -> str:
    """A text in double quotes, with JSON's escapes, which YAML reads, too."""
    return json.dumps(value, ensure_ascii=False)


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
