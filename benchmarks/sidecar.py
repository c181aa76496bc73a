"""Measures the language model beside the trainer: the client, and what waiting for answers costs.

The suite has the client's throughput, the speed that a training keeps while it waits for answers,
and a BabiLong run with the real vLLM. The run needs vLLM's environment (`make sidecar-cpu`, or
QRAG_SIDECAR_PYTHON); `--quick` leaves it out. Its model is random, so its rewards show only that
all parts are connected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import async_feedback, llm_client
from benchmarks.report import Case

PYTHON = os.environ.get("QRAG_SIDECAR_PYTHON", ".venv-vllm/bin/python")
STEPS = 30


def run(quick: bool) -> list[Case]:
    """All cases of the suite."""
    cases = llm_client.cases(quick) + async_feedback.cases(quick)
    return cases if quick else cases + _vllm_cases()


def _vllm_cases() -> list[Case]:
    if not Path(PYTHON).exists():
        return [Case(f"babilong_em through vLLM: none at {PYTHON}; make sidecar-cpu", None, "")]
    from benchmarks import tiny_llm  # torch

    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llm.save(tiny_llm.model(0), Path(folder) / "tiny")
        workdir = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "qrag_jax.train", "--config=configs/babilong.py:tiny"),
            f"--workdir={workdir}",
            "--config.reward.name=babilong_em",
            f"--config.train.steps={STEPS}",
            f"--config.train.eval_every={STEPS}",
            f"--config.llm.server.model={model}",
            f"--config.llm.server.python={Path(PYTHON).absolute()}",
            "--config.llm.server.max_model_len=512",
            "--config.llm.server.cpu_cache_gib=1",
            "--config.llm.server.dtype=float32",
            '--config.llm.server.arguments=("--enforce-eager",)',
            "--config.llm.max_tokens=16",
            "--config.llm.cut_off=score",
        ]
        print(f"$ {' '.join(command)}", flush=True)
        done = subprocess.run(command, check=False)  # noqa: S603
        if done.returncode:
            return [Case("babilong_em through vLLM: the run failed", None, "")]
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if "train/loss" in line]
    last = training[-1]
    (first,) = [line for line in lines if "speed/time_to_first_step" in line]
    return [
        Case(
            "babilong_em through vLLM on CPU, tiny models (plumbing, not learning): steps done",
            float(last["step"]),
            "steps",
            target=f"{STEPS}",
            holds=last["step"] == STEPS,
            details={
                "answers": last["llm/answers"],
                "failed calls": last["llm/failures"],
                "answers from the cache": last["llm/cache_hits"],
                "tokens in / out": f"{last['llm/tokens_in']:.0f} / {last['llm/tokens_out']:.0f}",
                "p50 / p99 of an answer in s": f"{last['llm/latency_p50']:.3f} / "
                f"{last['llm/latency_p99']:.3f}",
                "share of steps waiting for answers": last["speed/feedback_wait_share"],
                "unscored share of the last steps": last["train/unscored_share"],
                "return of the last steps": last["train/return"],
                "s from the start to the first step, vLLM's start included": first[
                    "speed/time_to_first_step"
                ],
            },
        )
    ]
