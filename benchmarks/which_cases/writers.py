"""What the rows of language models share: the data as their configs name them, and commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import metrics
from benchmarks.which_cases.measured import Cost, costs_of, once, per_question
from benchmarks.which_cases.settings import CHOOSING, HOTPOTQA, TWO_WIKI, Setting
from qrag_jax.errors import InputError
from qrag_jax.models.smollm2 import find_smollm2

SOURCES = {TWO_WIKI: "two_wiki", HOTPOTQA: "hotpotqa"}  # as configs name the layout of records
WARM = 16  # questions of the commands that compile, and that show what starting takes
COMPILING, FEW = "few questions, compiling", "few questions"
DENSE = "trained, searching by MiniLM"
SMOL = "smollm2"


def smollm2() -> Path:
    """The folder of SmolLM2.

    Raises:
        InputError: it is not on this machine.
    """
    folder = find_smollm2(download=False)
    if folder is None:
        raise InputError("SmolLM2 is not on this machine; run make llm.")
    return folder


def questions(given: Setting, folder: str = CHOOSING, split: str = "dev") -> str:
    """Questions as `config.questions` names them."""
    return f"{given.folder / folder},{SOURCES[given.name]},{split}"


def predicted(
    folder: Path, name: str, words: tuple[Any, ...], samples: int, asked: int
) -> tuple[Path, float | None]:
    """Plays test questions by `qrag_jax.predict`.

    Args:
        folder: of the row.
        name: of the file.
        words: module and flags.
        samples: questions, 0: all.
        asked: their number.

    The first way of a row asks few questions before, so that all is compiled and kept, and after,
    which shows what starting takes. The further ways of the row start as it does.

    Returns:
        the file of episodes, and the milliseconds that a question takes when all is started.
    """
    made = folder / "predictions"
    made.mkdir(parents=True, exist_ok=True)
    out = made / f"{name}.jsonl"
    _few(folder, COMPILING, *words, f"--out={made / 'compiling.jsonl'}")
    full = once(folder, name, *words, f"--out={out}", f"--samples={samples}")
    few = _few(folder, FEW, *words, f"--out={made / 'few.jsonl'}")
    return out, per_question(few, full, WARM, asked)


def _few(folder: Path, step: str, *words: Any) -> Cost:
    known = costs_of(folder).get(step)
    if known is not None and known.ended:
        return known
    return once(folder, step, *words, f"--samples={WARM}")


def checkpoint_of(out: Path) -> str:
    """The checkpoint that played a file of episodes, in words."""
    return str(json.loads(out.with_suffix(".json").read_text())["checkpoint"])


def learned_tokens(workdir: Path) -> float | None:
    """Tokens that were learned from, sampled or imitated; None: the run has not told yet."""
    counted = metrics(workdir, "train/env_steps")
    return counted[-1] if counted else None


def prompt_tokens(folder: Path, messages: list[list[tuple[str, str]]]) -> float:
    """Mean tokens of prompts as the model in the folder reads them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    total = 0
    for each in messages:
        turns = [{"role": role, "content": text} for role, text in each]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        total += len(tokenizer(text, add_special_tokens=False)["input_ids"])
    return total / len(messages)
