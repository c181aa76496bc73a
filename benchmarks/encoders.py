"""Compares the encoders with torch models: equality, speed, and a short training.

Every family (BERT, XLM-R, Qwen3, GTE, ModernBERT, MPNet, NomicBERT) is compared layer by layer with
Hugging Face's model in torch (for GTE with `encoder_cases.torch_gte`), on small random models and
on the genuine MiniLM. BERT, XLM-R and Qwen3 are compared in tokens per second, forward and in a
training step, in the same run: on a GPU in bfloat16 at true sizes, on a CPU at sizes cut as the
cases say. Every family is trained for a few steps by the user's own command. Run the suite on an
idle machine. With `--quick` the comparison covers equality but not stability, and only Qwen3 is
measured and trained. The suite needs the extra "test".
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Case
from qrag_jax.errors import InputError


def run(quick: bool) -> list[Case]:
    """All cases of the suite.

    Raises:
        InputError: torch is not installed, or it has no GPU although jax has one.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("the encoders suite needs torch; pip install 'qrag_jax[test]'.")
    # On a GPU jax reserves three quarters of the memory at its start: leave half of it to torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    cases = []
    for part in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            for case in part(quick, Path(folder)):
                print(f"measured: {case.case}", flush=True)
                cases.append(case)
    return cases


def _parity(quick: bool, folder: Path) -> Iterator[Case]:
    """The parity table: a row for each figure of each model."""
    from transformers import logging

    from benchmarks.encoder_cases.parity import equality, stability
    from benchmarks.encoder_cases.small_models import FAMILIES, write_small_model
    from qrag_jax.runtime.minilm import find_minilm

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    measured = (equality,) if quick else (equality, stability)
    layers = 2 if quick else 3
    for family in FAMILIES:
        path = write_small_model(family, folder / family, num_hidden_layers=layers)
        yield from _table(f"{family}, {layers} random layers", path, measured)
    minilm = None if quick else find_minilm()
    if minilm is not None:
        yield from _table("genuine all-MiniLM-L6-v2", minilm, measured)


def _table(name: str, path: Path, measured: Sequence[Callable[..., Any]]) -> Iterator[Case]:
    from benchmarks.encoder_cases.parity import hugging_face
    from qrag_jax.models.pretrained import load_encoder

    theirs, ours = hugging_face(path), load_encoder(path, scale=1.0)
    for figure in (figure for measure in measured for figure in measure(theirs, ours)):
        yield Case(
            f"{name}: {figure.name}",
            figure.value,
            "largest",
            peer=figure.peer,
            target=f"<= {figure.limit:g}",
            holds=figure.holds,
            details=figure.details,
        )


def _speed(quick: bool, folder: Path) -> Iterator[Case]:
    import torch

    from benchmarks.encoder_cases.speed import speed_cases
    from benchmarks.measure import on_gpu

    if on_gpu() and not torch.cuda.is_available():
        raise InputError("jax computes on a GPU but torch does not; install torch with CUDA.")
    yield from speed_cases(quick, on_gpu())


def _training(quick: bool, folder: Path) -> Iterator[Case]:
    from benchmarks.encoder_cases.small_models import FAMILIES
    from benchmarks.encoder_cases.training import training_cases

    families, layers = (["qwen3"], 1) if quick else ([*FAMILIES], 2)
    yield from training_cases(families, layers, folder)


# Each part takes (quick, an empty folder) and yields cases.
PARTS: tuple[Callable[[bool, Path], Iterator[Case]], ...] = (_parity, _speed, _training)
