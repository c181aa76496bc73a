"""Measures speed: each case is ours against a peer that computes the same, in turns, in one run.

Both sides have the same tensors, weights and work; a case says so where that can be compared (loss,
gradient, vectors, tokens, passages). Data come from the folder QRAG_DATA (default ../shared/data);
without them they are invented. Run it on an idle machine: other busy programs slow torch on a CPU
far more than jax, so our ratios would look too good. `--only=CASE,CASE` runs some cases, `--quick`
takes tiny sizes. The suite needs the dependency group "test".
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.report import Case
from qrag_jax.errors import InputError

# Case → its module, function, and packages of the group "test" that it needs next to torch.
CASES = {
    "encoder": ("encoders", "encoder_cases", ""),
    "pqn": ("q_rag", "update_cases", ""),
    "harr": ("harr", "harr_cases", "peft"),
    "grpo": ("tokens", "grpo_cases", "trl"),
    "sampler": ("tokens", "sampler_cases", ""),
    "exact": ("search", "exact_cases", "faiss"),
    "bm25": ("search", "bm25_cases", "bm25s"),
    "index": ("search", "index_cases", "sentence_transformers"),
    "server": ("serving", "server_cases", "faiss sentence_transformers fastapi"),
    "million": ("million", "million_cases", "faiss bm25s"),
}
LONG = ("million",)  # cases that take an hour, and run only by name


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """The cases, all of them or those that `only` names.

    Raises:
        InputError: `only` names an unknown case, or a package is missing.
    """
    if unknown := [name for name in only if name not in CASES]:
        raise InputError(f"--only={unknown[0]}: the cases are {', '.join(CASES)}.")
    chosen = [name for name in CASES if name in (only or set(CASES).difference(LONG))]
    wanted = {"torch", *(package for name in chosen for package in CASES[name][2].split())}
    if missing := [module for module in sorted(wanted) if importlib.util.find_spec(module) is None]:
        raise InputError(f"the suite speed needs {missing[0]}: pip install --group test.")
    if quick and not only:
        # Nobody reads these speeds, so two processes share the cases; the first third takes half.
        cut = len(chosen) // 3
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            parts = pool.map(_measured, (quick, quick), (chosen[:cut], chosen[cut:]))
            return [case for part in parts for case in part]
    return _measured(quick, chosen)


def _measured(quick: bool, chosen: Sequence[str]) -> list[Case]:
    # On a GPU jax reserves three quarters of the memory at its start: leave half of it to torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    if quick:
        _compile_quickly()
    from benchmarks.speed.measure import Setting

    measured = []
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(quick, 1 if quick else 5, Path(folder))
        for name in chosen:
            module, function, _ = CASES[name]
            cases = getattr(importlib.import_module(f"benchmarks.speed.{module}"), function)
            for case in cases(setting):
                print(f"measured: {case.case}", flush=True)
                measured.append(case)
    return measured


def _compile_quickly() -> None:
    """Programs compile in a third of the time and run slower: quick sizes show that all works."""
    import jax
    import torch

    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of the servers
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"
    torch.set_num_threads(1)  # on busy cores threads wait for each other longer than they compute
