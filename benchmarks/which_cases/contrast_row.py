"""The row of contrastive training: MiniLM, trained on the gold pairs, searches once."""

from __future__ import annotations

import dataclasses
import json

from benchmarks.which_cases import contrast, single
from benchmarks.which_cases.contrast import ContrastConfig, Tried
from benchmarks.which_cases.measured import costs_of, timed
from benchmarks.which_cases.row import (
    TRAINED,
    TWICE,
    TWICE_WITH_WORDS,
    WITH_WORDS,
    Place,
    Result,
    training_of,
)
from qrag_jax.runtime.whole_files import write_whole


def contrastive(place: Place, config: ContrastConfig | None = None) -> Result:
    """MiniLM trained on the gold pairs; untrained it is the row of MiniLM's own vectors."""
    config, model = config or ContrastConfig(), place.folder / "model"
    about = place.folder / contrast.NAME
    given = (str(dataclasses.asdict(config)), str(place.seed))
    with timed(place.folder, "train", given) as is_needed:
        if is_needed:
            tried = contrast.train(place.setting, model, place.seed, config)
            made = [each._asdict() for each in tried]
            tokens = sum(each.tokens for each in tried if each.steps == max(config.steps))
            write_whole(about, json.dumps({"tried": made, "tokens": tokens}) + "\n")
    kept = json.loads(about.read_text())
    best = Tried(**kept["tried"][0])
    tests = {}
    for each in (place.setting, *place.others):
        folder = single.index(each, place.folder / f"index-{each.name}", str(model))
        tests[each.name] = single.by_vectors(each, folder, str(model))
    cost = costs_of(place.folder)["train"]
    told = (
        f"rate {best.rate:g} and {best.steps} steps, chosen by the recall on the questions for "
        f"choices ({best.recall:.3f} among their own passages)"
    )
    course = contrast.course([Tried(**each) for each in kept["tried"]], cost.cpu_seconds / 60)
    training = training_of(cost, course=course, tokens=float(kept["tokens"]), searches=0.0)
    folder = place.folder / f"index-{place.setting.name}"
    twice = single.second_hop_by_vectors(place.setting, folder, str(model))
    here = place.setting.name
    further = {WITH_WORDS: tests[here], TWICE_WITH_WORDS: twice}
    ways = {TRAINED: tests, TWICE: {here: twice}}
    for way, found in further.items():
        ways[way] = {here: single.with_words(place.setting, found)}
    return Result(ways, training, told)
