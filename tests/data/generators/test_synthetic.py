"""The synthetic questions: reproducible, split without overlap, and not answerable in one step."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from qrag_jax.data.generators.invented_names import Draw, invented_word
from qrag_jax.data.generators.invented_puzzle import Entity, Passage, Puzzle
from qrag_jax.data.generators.synthetic import (
    SyntheticConfig,
    generate,
    passages_at,
    puzzle_at,
    sample_at,
    write_corpus,
)
from qrag_jax.errors import InputError

ROOT = Path(__file__).parents[3]
MIXED = SyntheticConfig(comparison=0.4)


def puzzles(config: SyntheticConfig, count: int, split: str = "train") -> list[Puzzle]:
    return [puzzle_at(config, split, i) for i in range(count)]  # type: ignore[arg-type]


def text(passage: Passage) -> str:
    return passage.entity.title + " " + " ".join(passage.sentences)


def invented_words(puzzle: Puzzle) -> set[str]:
    """All invented words of the entities that a puzzle's passages are about or mention."""
    told = [p.entity for p in puzzle.passages]
    told += [o for p in puzzle.passages for o in p.facts.values() if isinstance(o, Entity)]
    return {word for entity in told for word in entity.words}


def hidden(puzzle: Puzzle) -> list[int]:
    """Places in the chain of the passages about what the question does not name."""
    named = 1 if not puzzle.comparison else 2
    return list(range(named, len(puzzle.chain)))


def tokens(s: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", s.lower())


def bm25(query: str, documents: list[str]) -> list[float]:
    """Robertson's BM25 with k1 0.9, b 0.4 over the documents of one question."""
    counts = [Counter(tokens(d)) for d in documents]
    mean = sum(c.total() for c in counts) / len(counts)
    scores = []
    for c in counts:
        score = 0.0
        for token in tokens(query):
            n = sum(token in other for other in counts)
            idf = math.log(1 + (len(counts) - n + 0.5) / (n + 0.5))
            score += idf * c[token] * 1.9 / (c[token] + 0.9 * (0.6 + 0.4 * c.total() / mean))
        scores.append(score)
    return scores


# What a sample looks like


def test_a_sample_holds_what_the_config_asks_for() -> None:
    for i, sample in enumerate(generate(MIXED, "dev", 60)):
        assert sample.id == f"synthetic-dev-0-{i}"
        assert sample.source == "synthetic"
        assert len(sample.chunks) == 10
        assert len(set(sample.chunks)) == 10
        assert 2 <= len(sample.support) <= 4
        assert sample.support == tuple(sorted(set(sample.support)))
        assert 0 <= sample.support[0] <= sample.support[-1] < 10
        assert len(sample.answers) == 1
        assert sample.question.endswith("?")
        assert "{" not in sample.question + "".join(sample.chunks)


def test_passages_are_the_same_question_as_the_sample() -> None:
    for i in range(20):
        sample, question = sample_at(MIXED, "train", i), passages_at(MIXED, "train", i)
        assert sample.chunks == tuple(t + " " + " ".join(s) for t, s in question.paragraphs)
        assert (question.id, question.question) == (sample.id, sample.question)
        assert (question.answer,) == sample.answers
        assert tuple(question.support) == sample.support
        assert len({title for title, _ in question.paragraphs}) == 10
        assert all(1 <= len(sentences) <= 3 for _, sentences in question.paragraphs)


def test_passages_are_short() -> None:
    lengths = sorted(len(c.split()) for s in generate(MIXED, "train", 200) for c in s.chunks)
    assert lengths[0] >= 8
    assert lengths[-1] <= 40
    assert lengths[len(lengths) // 20] >= 13
    assert lengths[-len(lengths) // 20] <= 35


def test_hops_and_comparisons_come_in_the_asked_shares() -> None:
    made = puzzles(SyntheticConfig(comparison=0.3), 900)
    hops = Counter(len(p.chain) for p in made)
    assert set(hops) == {2, 3, 4}
    assert all(abs(n - 300) < 4 * math.sqrt(900 * 2 / 9) for n in hops.values())
    assert not any(p.comparison for p in made if len(p.chain) == 3)
    for h in (2, 4):
        of_h = [p.comparison for p in made if len(p.chain) == h]
        assert abs(sum(of_h) - 0.3 * len(of_h)) < 4 * math.sqrt(len(of_h) * 0.21)
    assert all(p.comparison for p in puzzles(SyntheticConfig((2, 4), comparison=1), 30))
    assert not any(p.comparison for p in puzzles(SyntheticConfig(comparison=0), 30))
    assert all(len(p.chain) == 3 for p in puzzles(SyntheticConfig((3,)), 30))


def test_support_lies_anywhere() -> None:
    places = Counter(k for s in generate(SyntheticConfig((2,)), "train", 600) for k in s.support)
    assert all(abs(places[k] - 120) < 4 * math.sqrt(1200 * 0.09) for k in range(10))


@pytest.mark.parametrize(("hops", "chunks"), [((2,), 4), ((3,), 5), ((2, 3, 4), 6), ((4,), 25)])
def test_any_allowed_number_of_chunks_is_met(hops: tuple[int, ...], chunks: int) -> None:
    for sample in generate(SyntheticConfig(hops, 0.3, chunks), "train", 40):
        assert len(sample.chunks) == chunks


# Reproducible


def test_samples_depend_on_seed_split_and_index_alone() -> None:
    ten, five = generate(MIXED, "train", 10), generate(MIXED, "train", 5)
    assert ten[:5] == five
    assert sample_at(MIXED, "train", 7) == ten[7]
    assert sample_at(MIXED, "train", 10**15).question != ten[0].question
    other = generate(SyntheticConfig(comparison=0.4, seed=1), "train", 10)
    dev = generate(MIXED, "dev", 10)
    questions = {s.question for s in (*ten, *other, *dev)}
    assert len(questions) == 30


def test_another_process_with_another_hash_seed_makes_the_same() -> None:
    code = (
        "from qrag_jax.data.generators.synthetic import *\n"
        "for s in generate(SyntheticConfig(comparison=0.4), 'train', 25): print(repr(s))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "4321", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.splitlines() == [repr(s) for s in generate(MIXED, "train", 25)]


def test_draws_are_those_written_down() -> None:
    """Fixed numbers: a change of numpy or of the drawing code would make other data silently."""
    draw = Draw(seed=5, stream=1, index=17)
    assert [draw.below(1000) for _ in range(6)] == [971, 879, 329, 564, 541, 718]
    assert [invented_word(draw, 1, 2) for _ in range(3)] == ["Drarmind", "Thenend", "Riassond"]


# Train and dev are two worlds


def test_train_and_dev_share_no_invented_word() -> None:
    train, dev = (
        set().union(*(invented_words(p) for p in puzzles(MIXED, 400, split)))
        for split in ("train", "dev")
    )
    assert len(train) > 8000
    assert not train & dev
    lower = {w.lower() for w in train}
    said = {
        t for s in generate(MIXED, "dev", 400) for c in (*s.chunks, s.question) for t in c.split()
    }
    assert not lower & {t.strip("?.,").lower() for t in said}


@pytest.mark.parametrize("syllables", [2, 3])
def test_words_of_the_two_splits_are_disjoint_by_construction(syllables: int) -> None:
    """So many of the 10^5 words of two syllables that a split by luck would overlap."""
    words = []
    for stream in (0, 1):
        draw = Draw(0, stream, 0)
        words.append({invented_word(draw, stream, syllables) for _ in range(30000)})
        assert len(words[stream]) > 24000
    assert not words[0] & words[1]
    assert all(re.fullmatch(r"[A-Z][a-z]{3,14}", w) for w in words[0] | words[1])


# A chain, and only one


def test_each_passage_of_a_chain_names_the_next_and_the_last_has_the_answer() -> None:
    for p in puzzles(SyntheticConfig(comparison=0), 150):
        links = [p.passages[k] for k in p.chain]
        assert links[0].entity.mention in p.question
        for here, after, relation in zip(links, links[1:], p.path):
            assert here.facts[relation] is after.entity
            assert after.entity.mention in " ".join(here.sentences)
        last = links[-1].facts[p.path[-1]]
        assert p.answer == (last.title if isinstance(last, Entity) else str(last))
        assert p.answer in " ".join(links[-1].sentences)
        assert p.answer not in p.question


def test_a_comparison_is_won_by_the_right_entity() -> None:
    for p in puzzles(SyntheticConfig((2, 4), comparison=1), 150):
        links = [p.passages[k] for k in p.chain]
        named, compared = links[:2], links[-2:]
        assert all(x.entity.mention in p.question for x in named)
        if len(links) == 4:
            for here, after, relation in zip(named, compared, p.path):
                assert here.facts[relation] is after.entity
        values = [int(str(x.facts[p.path[-1]])) for x in compared]
        asks_greater = bool(
            re.search(r"younger|later|longer|deeper|more", p.question.split(",")[0])
        )
        best = max(values) if asks_greater else min(values)
        assert values[0] != values[1]
        assert p.answer == compared[values.index(best)].entity.title


def test_no_other_passage_states_a_fact_of_the_chain() -> None:
    """The subject of a sentence is the longest mention it begins with, or else the title's."""
    for p in puzzles(MIXED, 500):
        everything = [x.entity for x in p.passages]
        everything += [o for x in p.passages for o in x.facts.values() if isinstance(o, Entity)]
        for i, passage in enumerate(p.passages):
            for sentence in passage.sentences:
                lower = sentence[0].lower() + sentence[1:]
                subjects = [e for e in everything if sentence.startswith(e.mention + " ")] + [
                    e for e in everything if lower.startswith(e.mention + " ")
                ]
                if subjects:
                    longest = max(subjects, key=lambda e: len(e.mention))
                    assert longest.mention == passage.entity.mention
                else:
                    assert sentence.split()[0] in ("He", "She", "It", "The")
            assert [k for k, x in enumerate(p.passages) if x.entity is passage.entity] == [i]
        assert len({e.title for e in everything}) == len(set(everything))


# Nothing in the question tells the later passages from their rivals


def test_no_invented_word_of_a_later_entity_is_in_the_question() -> None:
    for p in puzzles(MIXED, 400):
        said = set(tokens(p.question))
        for step in hidden(p):
            assert not said & {w.lower() for w in p.passages[p.chain[step]].entity.words}
        named = [p.passages[k].entity for k in p.chain[: len(p.chain) - len(hidden(p))]]
        kinds = {p.passages[p.chain[step]].entity.kind for step in hidden(p)}
        for entity in (x.entity for x in p.passages if x.entity.kind in kinds):
            assert entity in named or not said & {w.lower() for w in entity.words}


@pytest.mark.parametrize("config", [MIXED, SyntheticConfig((2, 3, 4), 0.3, chunks=6)])
def test_later_passages_have_rivals_that_state_the_same(config: SyntheticConfig) -> None:
    for p in puzzles(config, 200):
        compared = range(2) if p.comparison and len(p.chain) == 2 else ()
        for step in (*compared, *hidden(p)):
            kind = p.passages[p.chain[step]].entity.kind
            others = [x for i, x in enumerate(p.passages) if i not in p.chain]
            same = [x for x in others if x.entity.kind == kind]
            assert len(same) >= 2
            assert all(p.path[step] in x.facts for x in same)


def test_distractors_share_names_with_the_chain() -> None:
    share_word = share_mention = 0
    made = puzzles(SyntheticConfig((2,), comparison=0), 200)
    for p in made:
        chain = [p.passages[k].entity for k in p.chain]
        words = {w for e in chain for w in e.words}
        others = [x for i, x in enumerate(p.passages) if i not in p.chain]
        share_word += any(words & set(x.entity.words) for x in others)
        share_mention += any(e in x.facts.values() for x in others for e in chain)
    assert share_word > 100
    assert share_mention > 80


def test_the_question_alone_ranks_later_passages_by_chance_and_the_chain_finds_them() -> None:
    """The rivals of passage k: all of its kind that have no word of the first entity's name."""
    hits = {"alone": 0.0, "chain": 0.0}
    expected = variance = 0.0
    for p in puzzles(SyntheticConfig(comparison=0), 400, "dev"):
        documents = [text(x) for x in p.passages]
        first = {w.lower() for w in p.passages[p.chain[0]].entity.words}
        alone = bm25(p.question, documents)
        for before, k in zip(p.chain, p.chain[1:]):
            kind = p.passages[k].entity.kind
            rivals = [
                i
                for i, x in enumerate(p.passages)
                if x.entity.kind == kind and not first & set(tokens(documents[i])) and i != before
            ]
            assert k in rivals
            assert len(rivals) >= 3
            expected += 1 / len(rivals)
            variance += (len(rivals) - 1) / len(rivals) ** 2
            chain = bm25(p.question + " " + documents[before], documents)
            for name, scores in (("alone", alone), ("chain", chain)):
                top = max(scores[i] for i in rivals)
                best = [i for i in rivals if scores[i] == top]
                hits[name] += (k in best) / len(best)
    assert abs(hits["alone"] - expected) < 4 * math.sqrt(variance)
    assert hits["chain"] > 2 * expected


# Files of other sources


def test_write_corpus_writes_each_split_through_the_source(tmp_path: Path) -> None:
    keys = ("id", "question", "answer", "paragraphs", "support")
    source = SimpleNamespace(to_record=lambda *fields: dict(zip(keys, fields)))
    write_corpus(tmp_path / "a" / "b", source, MIXED, train=4, dev=2)
    for split, count in (("train", 4), ("dev", 2)):
        lines = (tmp_path / "a" / "b" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == count
        for i, line in enumerate(lines):
            question = passages_at(MIXED, split, i)  # type: ignore[arg-type]
            assert json.loads(line) == json.loads(json.dumps(question._asdict()))


@pytest.mark.parametrize("name", ["hotpotqa", "musique", "two_wiki"])
def test_write_corpus_makes_files_the_real_sources_read(name: str, tmp_path: Path) -> None:
    source = importlib.import_module(f"qrag_jax.data.sources.{name}")
    write_corpus(tmp_path, source, MIXED, train=12, dev=3)
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    for i, line in enumerate(lines):
        read, made = source.parse(json.loads(line)), sample_at(MIXED, "train", i)
        assert (read.id, read.question, read.answers) == (made.id, made.question, made.answers)
        assert read.support == made.support
        assert len(read.chunks) == len(made.chunks)
        if name != "musique":  # musique puts a full stop after the title
            assert read.chunks == made.chunks


# What is refused


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hops": ()}, "hops"),
        ({"hops": (1, 2)}, "hops"),
        ({"hops": (5,)}, "hops"),
        ({"hops": 2}, "hops"),
        ({"hops": (2.0,)}, "hops"),
        ({"hops": (3,), "chunks": 4}, "chunks"),
        ({"chunks": "10"}, "chunks"),
        ({"comparison": -0.1}, "comparison"),
        ({"comparison": 1.5}, "comparison"),
        ({"comparison": float("nan")}, "comparison"),
        ({"comparison": None}, "comparison"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_a_wrong_field_is_named(fields: dict, named: str) -> None:
    with pytest.raises(InputError, match=rf"^synthetic data: {named} is .*give "):
        SyntheticConfig(**fields)


def test_hops_may_be_a_list_as_configs_have_it() -> None:
    assert SyntheticConfig(hops=[2, 3]) == SyntheticConfig(hops=(2, 3))  # type: ignore[arg-type]


def test_a_wrong_split_index_or_count_is_refused() -> None:
    with pytest.raises(InputError, match="split is 'test'"):
        sample_at(MIXED, "test", 0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="index is -1"):
        sample_at(MIXED, "train", -1)
    with pytest.raises(InputError, match="count is -1"):
        generate(MIXED, "train", -1)
    assert generate(MIXED, "train", 0) == []


def test_write_corpus_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no to_record"):
        write_corpus(tmp_path, SimpleNamespace(), MIXED, 1, 1)
    source = SimpleNamespace(to_record=lambda *fields: {})
    with pytest.raises(InputError, match="dev is -2"):
        write_corpus(tmp_path, source, MIXED, 1, -2)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written to"):
        write_corpus(tmp_path / "file", source, MIXED, 1, 1)
