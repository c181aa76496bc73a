"""Measures the speed of encoder, training step, evaluation and start-up against PyTorch peers.

Our code and the peers (benchmarks/peers) take turns in one process, on the same tensors and initial
weights. HotpotQA and MuSiQue records come from the folder QRAG_DATA (default ../shared/data);
without them, questions are invented. On a GPU everything computes in bfloat16, in GPU-sized
batches. Run the suite on an idle machine: other busy programs slow torch on a CPU far more than
jax, so our ratios would look too good. `--quick` takes a smaller encoder and fewer cases. The
suite needs the extra "test".
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Case
from qrag_jax.errors import InputError
from qrag_jax.runtime.platform import Platform


def run(quick: bool) -> list[Case]:
    """All cases of the suite.

    Raises:
        InputError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise InputError("the speed suite needs torch; pip install 'qrag_jax[test]'.")
    # On a GPU jax reserves three quarters of the memory at its start: leave half of it to torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        for case in _cases(quick, Path(folder)):
            print(f"measured: {case.case}", flush=True)
            cases.append(case)
    return cases


def _cases(quick: bool, folder: Path) -> Iterator[Case]:
    import torch

    from benchmarks import ours
    from benchmarks.matmul import measure_peaks
    from benchmarks.measure import on_gpu
    from benchmarks.speed_cases.encoder import full_cases, ragged_case
    from benchmarks.speed_cases.entry_point import entry_point_cases
    from benchmarks.speed_cases.evaluation import evaluation_case
    from benchmarks.speed_cases.padding import many_short_sentences, padding_cases
    from benchmarks.speed_cases.setting import Setting
    from benchmarks.speed_cases.training import COMPILED, SEQUENTIAL, SORTED, TORCH, step_cases
    from configs import hotpotqa, musique
    from qrag_jax.models.compute.precision import precision
    from qrag_jax.runtime.minilm import find_minilm

    gpu = on_gpu()
    if gpu and not torch.cuda.is_available():
        raise InputError("jax computes on a GPU but torch does not; install torch with CUDA.")
    rounds = 3 if quick else 5
    peaks, peak_case = measure_peaks(rounds, "bfloat16" if gpu else "float32")
    yield peak_case
    setting = Setting(quick, gpu, rounds, 2 if gpu else 1, peaks)

    minilm = find_minilm(download=not quick)
    config, samples, origin = ours.read_texts(
        hotpotqa.get_config("minilm"), "hotpotqa", 128 if quick else 2048, folder
    )
    tokenizer = ours.load_tokenizer(minilm, samples, folder / "tokenizer")
    texts = ours.load_texts(config, samples, origin, tokenizer)
    if quick:
        small = ours.random_encoder(ours.QUICK, "2 layers of MiniLM's width", tokenizer, config)
        yield ragged_case(setting, texts, small, 4)
        yield from step_cases(setting, texts, small, 2, {TORCH: None, SEQUENTIAL: None})
        yield evaluation_case(setting, texts, small, 8, 8)
        return

    base = ours.random_encoder(ours.BERT_BASE, "BERT-base", tokenizer, config)
    yield ragged_case(setting, texts, base, 256 if gpu else 4)
    yield from full_cases(setting, texts, base, 1024 if gpu else 16)

    if minilm is None:
        trained = ours.random_encoder(ours.MINILM, "MiniLM sizes", tokenizer, config)
    else:
        trained = ours.genuine_minilm(minilm, config)
    small_targets = {
        TORCH: setting.at_least(1.3, 2.0),
        SORTED: None,
        SEQUENTIAL: setting.at_least(2.5, 15.0),
    }
    base_targets = {TORCH: setting.at_least(1.2, 2.0)}
    if gpu:
        small_targets[COMPILED] = base_targets[COMPILED] = 2.0
    yield from step_cases(setting, texts, trained, 256 if gpu else 16, small_targets)
    yield from step_cases(setting, texts, base, 128 if gpu else 4, base_targets)
    if (
        not gpu
        and precision("auto", Platform.here()).products
        != precision("float32", Platform.here()).products
    ):
        # Without a target: what this CPU's matrix unit gains for us and for torch's autocast.
        half_peaks, peak_case = measure_peaks(rounds, "bfloat16")
        yield peak_case
        half_setting = dataclasses.replace(setting, peaks=half_peaks)
        half = ours.in_bfloat16(trained)
        beside: dict[str, float | None] = {TORCH: None, SORTED: None}
        yield from step_cases(half_setting, texts, half, 16, beside)
    yield evaluation_case(setting, texts, trained, 256 if gpu else 64, 256 if gpu else 16)

    shape_only = ours.random_encoder(ours.SMALL, "small", tokenizer, config)
    questions = 256 if gpu else 16
    yield from padding_cases(setting, texts, shape_only, questions)
    more = ours.read_texts(musique.get_config("minilm"), "musique", 2048, folder)
    yield from padding_cases(setting, ours.load_texts(*more, tokenizer), shape_only, questions)
    short = many_short_sentences(config, 512, ours.VOCABULARY)
    yield from padding_cases(setting, short, shape_only, questions)
    yield from entry_point_cases(setting, minilm is not None)
