"""The synthetic questions: reproducible, split without overlap, and not answerable in one step."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest

from qrag_jax.data.generators.invented_names import Draw, invented_word
from qrag_jax.data.generators.invented_puzzle import Entity, Passage, Puzzle
from qrag_jax.data.generators.synthetic import (
    SyntheticConfig,
    generate,
    passages_at,
    puzzle_at,
    sample_at,
)
from qrag_jax.data.sample import fingerprint
from qrag_jax.errors import InputError

MIXED = SyntheticConfig(comparison=0.4)
FINGERPRINT = "4fd3cddf882500fa"  # of the first 25 questions of training


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


def test_a_sample_holds_what_the_config_asks_for() -> None:
    for i, sample in enumerate(generate(MIXED, "dev", 60)):
        assert len(set(sample.chunks)) == len(sample.chunks) == 10
        assert 2 <= len(sample.support) <= 4
        assert sample.support == tuple(sorted(set(sample.support)))
        assert sample.question.endswith("?")
        assert "{" not in sample.question + "".join(sample.chunks)
        question = passages_at(MIXED, "dev", i)  # the same question in parts
        assert sample.chunks == tuple(t + " " + " ".join(s) for t, s in question.paragraphs)
        assert (question.question, (question.answer,)) == (sample.question, sample.answers)
    for hops, chunks in (((2,), 4), ((2, 3, 4), 6), ((4,), 25)):
        for sample in generate(SyntheticConfig(hops, 0.3, chunks), "train", 20):
            assert len(sample.chunks) == chunks
    for fields, named in (({"hops": (1, 2)}, "hops"), ({"hops": (3,), "chunks": 4}, "chunks")):
        with pytest.raises(InputError, match=named):
            SyntheticConfig(**fields)
    with pytest.raises(InputError, match="split"):
        sample_at(MIXED, "test", 0)  # type: ignore[arg-type]


def test_hops_comparisons_and_places_come_in_the_asked_shares() -> None:
    made = puzzles(SyntheticConfig(comparison=0.3), 450)
    hops = Counter(len(p.chain) for p in made)
    assert set(hops) == {2, 3, 4}
    assert all(abs(n - 150) < 4 * math.sqrt(450 * 2 / 9) for n in hops.values())
    assert not any(p.comparison for p in made if len(p.chain) == 3)
    compared = [p.comparison for p in made if len(p.chain) != 3]
    assert abs(sum(compared) - 0.3 * len(compared)) < 4 * math.sqrt(len(compared) * 0.21)
    places = Counter(place for p in made if len(p.chain) == 2 for place in p.chain)
    assert set(places) == set(range(10))


def test_samples_depend_on_seed_split_and_index_alone() -> None:
    ten = generate(MIXED, "train", 10)
    assert (ten[:5], ten[7]) == (generate(MIXED, "train", 5), sample_at(MIXED, "train", 7))
    other = generate(SyntheticConfig(comparison=0.4, seed=1), "train", 10)
    far = sample_at(MIXED, "train", 10**15)
    every = {s.question for s in (*ten, *other, *generate(MIXED, "dev", 10), far)}
    assert len(every) == 31
    assert generate(MIXED, "train", 0) == []


def test_draws_are_those_written_down() -> None:
    """Fixed numbers: a change of numpy or of the drawing code would make other data silently."""
    draw = Draw(seed=5, stream=1, index=17)
    assert [draw.below(1000) for _ in range(6)] == [971, 879, 329, 564, 541, 718]
    assert [invented_word(draw, 1, 2) for _ in range(3)] == ["Drarmind", "Thenend", "Riassond"]
    assert fingerprint(generate(MIXED, "train", 25)) == FINGERPRINT


def test_train_and_dev_share_no_invented_word() -> None:
    """By construction: so many of the 10^5 words that a split by luck would overlap."""
    words = []
    for stream in (0, 1):
        draw = Draw(0, stream, 0)
        words.append({invented_word(draw, stream, 2) for _ in range(10_000)})
        assert len(words[stream]) > 9000
    assert not words[0] & words[1]
    train, dev = (
        set().union(*(invented_words(p) for p in puzzles(MIXED, 150, split)))
        for split in ("train", "dev")
    )
    assert len(train) > 3000
    assert not train & dev
    said = {
        t for s in generate(MIXED, "dev", 150) for c in (*s.chunks, s.question) for t in tokens(c)
    }
    assert not {w.lower() for w in train} & said


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
    for p in puzzles(MIXED, 200):
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


def test_no_word_of_the_question_tells_later_passages_from_their_rivals() -> None:
    for p in puzzles(MIXED, 200):
        said, named = set(tokens(p.question)), p.chain[: len(p.chain) - len(hidden(p))]
        compared = range(2) if p.comparison and len(p.chain) == 2 else ()
        for step in (*compared, *hidden(p)):
            kind = p.passages[p.chain[step]].entity.kind
            same = [
                x for i, x in enumerate(p.passages) if i not in p.chain and x.entity.kind == kind
            ]
            assert len(same) >= 2  # rivals that state the same
            assert all(p.path[step] in x.facts for x in same)
        for step in hidden(p):
            kind = p.passages[p.chain[step]].entity.kind
            for place, passage in enumerate(p.passages):
                if passage.entity.kind == kind and place not in named:
                    assert not said & {w.lower() for w in passage.entity.words}


def test_the_question_alone_ranks_later_passages_by_chance_and_the_chain_finds_them() -> None:
    """The rivals of passage k: all of its kind that have no word of the first entity's name."""
    hits = {"alone": 0.0, "chain": 0.0}
    expected = variance = 0.0
    for p in puzzles(SyntheticConfig(comparison=0), 150, "dev"):
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
