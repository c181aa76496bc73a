"""Measures environments of the package verifiers beside our own loop.

Part `stored`: 200 stored episodes of our questions (scripts with flaws) are played in process, and
over launch/musique_multihop: rewards, and seconds an episode. Part `v1` trains the decoder of 1.8
million weights for 20 steps on `echo_v1` of verifiers' source release. What the trained model says
is scored again by verifiers' own evaluation, and what trains is compared with its texts. Needs
`make verifiers`. `--quick` plays 24 stored episodes.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept_runs import Kept, Part, begin_anew, command, train
from benchmarks.report import Case
from benchmarks.verifiers_stored import PYTHONS, stored

PACKAGES = Path(__file__).parent / "verifiers_packages"
SIDE = Path(__file__).parents[1] / "qrag_jax" / "environments" / "verifiers_side"
STEPS, STORED, QUICK = 20, 200, 24
RELEASE, FIXTURES = "verifiers==0.4.0", "tests/v1/fixtures"
ENVIRONMENTS = {"v1": "echo-v1"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "v1": {"phrases": ["ping", "echo", "hello world", "verifiers", "a", "no", "one two", "yes"]},
}


def run(quick: bool, only: Sequence[str] = ()) -> list[Case]:
    """All cases of the suite; for the full suite, those of its finished parts.

    Raises:
        InputError: `only` names an unknown part.
    """
    missing = [python for python in PYTHONS.values() if not Path(python).exists()]
    if missing:
        return [Case(f"no Python with verifiers at {missing[0]}; make verifiers", None, "")]
    if quick:
        with tempfile.TemporaryDirectory() as folder:
            return stored_cases(stored(Path(folder), QUICK))
    kept = Kept.of("verifiers")
    parts: dict[str, Part] = {
        "stored": partial(stored, kept.runs / "stored", STORED),
        **{name: partial(trained, kept.runs / name, name) for name in ENVIRONMENTS},
    }
    results, found = kept.finish(parts, only), list[Case]()
    for name, part in results.items():
        if name == "stored":
            found += stored_cases(part)
        else:
            found += trained_cases(name, part)
    return found


# -------------------------------------------------------------------- stored episodes


def stored_cases(part: Mapping[str, Any]) -> list[Case]:
    """Equal rewards, and the seconds of the three ways."""
    own, count = part["rewards"]["in process"], len(part["rewards"]["in process"])
    cases = []
    for way in PYTHONS:
        theirs = part["rewards"][way]
        equal = sum(a == b for a, b in zip(own, theirs, strict=True))
        cases.append(
            Case(
                f"{count} stored episodes over {way}: rewards equal to those in process",
                float(equal),
                "episodes",
                target=f"{count}",
                holds=equal == count,
                details={"mean reward": f"{np.mean(own):.4f}", "different": len(set(own))},
            )
        )
    for way, seconds in part["seconds"].items():
        cases.append(
            Case(
                f"seconds an episode, {way}",
                seconds / count,
                "s",
                peer=part["seconds"]["in process"] / count if way != "in process" else None,
            )
        )
    return cases


# -------------------------------------------------------------------- trainings


def trained(workdir: Path, protocol: str) -> dict[str, Any]:
    """A training on somebody else's environment, and its episodes beside verifiers' own scores."""
    with EnvironmentPath(workdir.parent / "sources", protocol):
        began = time.monotonic()
        flags = _flags(protocol)
        train(begin_anew(workdir), "configs/rlvr.py:verifiers", *flags)
        minutes = (time.monotonic() - began) / 60
        command(
            "qrag_jax.evaluate",
            f"--workdir={workdir}",
            "--checkpoint=last",
            "--sampled=4",
            *flags[:2],
        )
        summary = json.loads((workdir / "eval" / "summary.json").read_text())
        (log,) = (workdir / "eval").glob("last-*/predictions.jsonl")
        episodes = [json.loads(line) for line in log.read_text().splitlines()]
        asked = [_asked(each) for each in episodes]
        rewards = replayed(protocol, ENVIRONMENTS[protocol], ARGUMENTS[protocol], asked)
    ours = [each["reward"] for each in episodes]
    records = _records(log.parent)
    same_texts = sum(
        each["texts"] == texts for each, texts in zip(asked, map(_texts_of, records), strict=True)
    )
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "minutes": minutes,
        "steps": max(row["step"] for row in rows),
        "episodes": len(ours),
        "equal": sum(a == b for a, b in zip(ours, rewards, strict=True)),
        "largest": max(abs(a - b) for a, b in zip(ours, rewards, strict=True)),
        "different": len(set(ours)),
        "same_texts": same_texts,
        "failed": max(row.get("failed_episodes", 0.0) for row in rows),
        "untrained_tokens": max(row.get("untrained_tokens", 0.0) for row in rows),
        "scores": summary["scores"],
    }


def trained_cases(name: str, part: Mapping[str, Any]) -> list[Case]:
    """What a training and its check found."""
    count, title = part["episodes"], f"{name}, {ENVIRONMENTS[name]}"
    means = {
        told: f"{scores['reward']['mean']:.3f}"
        for told, scores in part["scores"].items()
        if "reward" in scores
    }
    return [
        Case(
            f"{title}: steps trained",
            float(part["steps"]),
            "steps",
            target=f"{STEPS}",
            holds=part["steps"] == STEPS,
            details={"minutes": part["minutes"], "failed episodes": part["failed"], **means},
        ),
        Case(
            f"{title}: rewards equal to verifiers' own of the same texts",
            float(part["equal"]),
            "episodes",
            target=f"{count}",
            holds=part["equal"] == count,
            details={"different rewards": part["different"], "largest": part["largest"]},
        ),
        Case(
            f"{title}: episodes whose trained tokens are the texts that verifiers keeps",
            float(part["same_texts"]),
            "episodes",
            target=f"{count}",
            holds=part["same_texts"] == count,
            details={"tokens sampled beside the episodes": part["untrained_tokens"]},
        ),
    ]


def replayed(
    protocol: str, name: str, arguments: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]
) -> list[float]:
    """The rewards of texts by verifiers' own evaluation, in its own Python."""
    asked = {"protocol": protocol, "id": name, "arguments": arguments, "episodes": episodes}
    environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{SIDE}"}
    done = subprocess.run(  # noqa: S603
        [PYTHONS[protocol], str(PACKAGES / "replay.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the replay failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class EnvironmentPath:
    """While it is open, environments' Pythons find the packages of the suite."""

    def __init__(self, sources: Path, protocol: str) -> None:
        self._sources, self._protocol = sources, protocol
        self._before = os.environ.get("PYTHONPATH")

    def __enter__(self) -> None:
        folders = [str(PACKAGES)]
        if self._protocol == "v1":
            folders.append(str(_fixtures(self._sources)))
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = self._before


def _fixtures(folder: Path) -> Path:
    """The environments of verifiers' source release, which its wheel has not."""
    name = RELEASE.replace("==", "-")
    found = folder / name / FIXTURES
    if not found.exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [PYTHONS["v1"], "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run(  # noqa: S603
            [*pip, "--no-binary=verifiers", f"--dest={folder}", RELEASE], check=True
        )
        import tarfile

        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return found


def _flags(protocol: str) -> list[str]:
    return [
        f"--config.env.verifiers={ENVIRONMENTS[protocol]}",
        f"--config.env.python={PYTHONS[protocol]}",
        f"--config.env.arguments={json.dumps(ARGUMENTS[protocol])}",
    ]


def _asked(prediction: Mapping[str, Any]) -> dict[str, Any]:
    """An episode as the replay takes it: its task, and the texts of the tokens that trained."""
    split, _, number = prediction["id"].rpartition("-")
    return {
        "split": split,
        "task": int(number),
        "texts": [turn["sampled"] for turn in prediction["turns"]],
    }


def _records(folder: Path) -> list[dict[str, Any]]:
    (file,) = [*folder.glob("results.jsonl"), *folder.glob("traces.jsonl")]
    return [json.loads(line) for line in file.read_text().splitlines()]


def _texts_of(record: Mapping[str, Any]) -> list[str]:
    """What the model said, as verifiers keeps it."""
    if "traces" in record:
        nodes = record["traces"][0]["nodes"]
        return [node["message"].get("content") or "" for node in nodes if node["sampled"]]
    said = [each for each in record["completion"] if each["role"] == "assistant"]
    return [each.get("content") or "" for each in said]
