"""The file of a run's few-shot prompts: what they show, how they were ranked, which are kept.

It is plain JSON, so that it can be looked at, and a run that goes on takes its prompts from it.
Finished rounds are in it before the prompts are chosen.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qrag_jax.environments.query_writing.few_shot import Candidate, Ranked, Solved
from qrag_jax.environments.query_writing.prompt import Example, Variant
from qrag_jax.errors import InputError
from qrag_jax.runtime import bounded_json
from qrag_jax.runtime.whole_files import write_whole

FORMAT = 1
NAME = "few_shot.json"

_FIELDS: dict[str, Mapping[str, type]] = {
    "file": {"format": int, "template": str, "kept": list, "rounds": list},
    "prompt": {"name": str, "score": float, "scored": int, "masked": int, "examples": list},
    "example": {
        "question_id": str,
        "hop": int,
        "reward": float,
        "question": str,
        "passages": list,
        "query": str,
    },
}


@dataclasses.dataclass(frozen=True)
class FewShotPrompts:
    """The rounds of a bootstrap so far.

    Attributes:
        template: fingerprint of the prompt's file, see `prompts.Prompt`.
        rounds: the ranked prompts of each finished round.
        kept: names of those that are used, best first; () until they are chosen.
    """

    template: str
    rounds: tuple[tuple[Ranked, ...], ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The kept prompts as ways to ask."""
        named = {each.candidate.name: each.candidate for one in self.rounds for each in one}
        return tuple(named[name].variant for name in self.kept)


def write_few_shot(path: Path, prompts: FewShotPrompts) -> None:
    """Replaces the file.

    Raises:
        OSError: it cannot be written.
    """
    said = {
        "format": FORMAT,
        "template": prompts.template,
        "kept": [*prompts.kept],
        "rounds": [[_prompt_json(each) for each in one] for one in prompts.rounds],
    }
    text = json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, text + "\n")


def read_few_shot(path: Path, template: str) -> FewShotPrompts:
    """Reads what `write_few_shot` wrote, to the last bit.

    Args:
        template: fingerprint of the prompt that is in use.
    """
    try:
        said = bounded_json.load(path, finite=False)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give another one.") from None
    except ValueError:
        raise _damaged(path, "it is no JSON") from None
    if isinstance(said, dict) and said.get("format") != FORMAT:
        raise InputError(
            f"{path} has the format {said.get('format')!r:.60} (field format), and this version "
            f"reads {FORMAT}; make the prompts again."
        )
    whole = _checked(said, "file", path)
    if whole["template"] != template:
        raise InputError(
            f"{path} has examples for another prompt than the one in use (fingerprints "
            f"{whole['template']:.60} and {template}); give that one, or make the prompts again."
        )
    rounds = tuple(
        tuple(_prompt(each, path) for each in _listed(one, path)) for one in whole["rounds"]
    )
    names = [each.candidate.name for one in rounds for each in one]
    kept_texts = all(isinstance(each, str) for each in whole["kept"])
    if len(set(names)) < len(names) or not kept_texts or not {*whole["kept"]} <= set(names):
        raise _damaged(path, "the names of its prompts do not fit")
    return FewShotPrompts(template, rounds, tuple(whole["kept"]))


def _prompt_json(ranked: Ranked) -> dict[str, Any]:
    examples = [
        {
            "question_id": each.question_id,
            "hop": each.hop,
            "reward": each.reward,
            "question": each.example.question,
            "passages": [*each.example.passages],
            "query": each.example.query,
        }
        for each in ranked.candidate.shown
    ]
    return {
        "name": ranked.candidate.name,
        "score": ranked.score,
        "scored": ranked.scored,
        "masked": ranked.masked,
        "examples": examples,
    }


def _prompt(given: Any, path: Path) -> Ranked:
    said = _checked(given, "prompt", path)
    shown = tuple(_solved(each, path) for each in said["examples"])
    candidate = Candidate(said["name"], shown)
    return Ranked(candidate, said["score"], said["scored"], said["masked"])


def _solved(given: Any, path: Path) -> Solved:
    said = _checked(given, "example", path)
    if not all(isinstance(each, str) for each in said["passages"]):
        raise _damaged(path, "an example has a passage that is no text")
    if not said["query"].strip():
        raise _damaged(path, "an example has no query")
    example = Example(said["question"], tuple(said["passages"]), said["query"])
    return Solved(said["question_id"], said["hop"], said["reward"], example)


def _checked(given: Any, what: str, path: Path) -> dict[str, Any]:
    """The object with the fields of its kind, no more and no less."""
    kinds = _FIELDS[what]
    if not isinstance(given, dict) or given.keys() != kinds.keys():
        raise _damaged(path, f"its {what} needs the fields {', '.join(kinds)} alone")
    for name, kind in kinds.items():
        if type(given[name]) is not kind:
            raise _damaged(path, f"the field {name} of a {what} is {given[name]!r:.60}")
        if kind is float and not math.isfinite(given[name]):
            raise _damaged(path, f"the field {name} of a {what} is {given[name]}")
    return given


def _listed(given: Any, path: Path) -> list[Any]:
    if not isinstance(given, list):
        raise _damaged(path, "a round is no list")
    return given


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path} is damaged ({why}); remove it, and make the prompts again.")
