"""The model card of an exported language model: what it is, how it scored, and how it is used."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from qrag_jax.systems.model_card import without_folders
from qrag_jax.systems.token_config import TokenConfig

Fields = Mapping[str, Any]  # of a config, by section
Scores = Mapping[str, Mapping[str, float]]  # row → metric → mean; all rows have the same metrics


@dataclasses.dataclass(frozen=True)
class ExportedSystem:
    """One system whose language models can be exported.

    Attributes:
        name: of it, in config.system.
        title: its name for readers.
        learned: what its models learn, as in "A language model that learned to …".
        read: the config of a run → its settings; raises `InputError`.
        told: the fields of a config → sentences about prompt, data and what is left out.
        scored: what a row of scores is of, such as "collection".
        scores: the content of `eval/summary.json` and the name of a checkpoint → the scores of this
            checkpoint, {} if there are none.
        private: fields, as SECTION.FIELD, that a card does not show: persons and addresses.
    """

    name: str
    title: str
    learned: str
    read: Callable[[ConfigDict], TokenConfig]
    told: Callable[[Fields], str]
    scored: str
    scores: Callable[[Fields, str], Scores]
    private: tuple[str, ...] = ("llm.url",)


ADAPTER = "adapter"
_SUMMARY = Path("eval") / "summary.json"


def language_model_card(
    system: ExportedSystem, workdir: Path, given: ConfigDict, checkpoint: str
) -> str:
    """The card as Markdown; it names no folder of the training machine.

    Args:
        workdir: the run's folder, with the summary of its scores if it was scored.
        given: the run's config.
        checkpoint: what the checkpoint is called, such as "best checkpoint of step 60".
    """
    fields = _shown(system, given)
    base = fields["model"]["path"] or "a tiny decoder, made for the run"
    lines = [
        f"# {workdir.resolve().name}",
        "",
        f"A language model that learned to {system.learned}, by qrag_jax ({system.title}): "
        f"{checkpoint}. It started from {base}. It is an ordinary causal model of transformers, "
        f"and `{ADAPTER}`, if it is here, holds its adapters alone, in PEFT's format.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model, tokenizer = (kind.from_pretrained("FOLDER") for kind in '
        "(AutoModelForCausalLM, AutoTokenizer))",
        "```",
        "",
        system.told(fields),
        "",
        *_scores(system, workdir, checkpoint),
        "## Config",
        "",
        "```json",
        json.dumps(fields, indent=2),
        "```",
        "",
    ]
    return "\n".join(lines)


def _shown(system: ExportedSystem, given: ConfigDict) -> dict[str, Any]:
    """The fields of a config that anybody may see."""
    fields = without_folders(given.to_dict())
    for name in system.private:
        section, _, field = name.partition(".")
        fields.get(section, {}).pop(field, None)
    return fields


def _scores(system: ExportedSystem, workdir: Path, checkpoint: str) -> list[str]:
    """The scores of this checkpoint, if the run was scored."""
    path = workdir / _SUMMARY
    if not path.exists():
        return []
    scores = system.scores(json.loads(path.read_text(encoding="utf-8")), checkpoint)
    rows = [
        f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means.values())} |"
        for name, means in scores.items()
    ]
    if not rows:
        return []
    metrics = [*next(iter(scores.values()))]
    head = [f"| {' | '.join([system.scored, *metrics])} |", "|---" * (len(metrics) + 1) + "|"]
    return ["## Scores", "", *head, *rows, ""]
