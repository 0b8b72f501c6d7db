"""The generated world and its questions: sensible, single-valued, seeded, and apart from split to split."""

import re
from collections import Counter
from itertools import combinations

import pytest

from turntree.core.errors import ConfigError
from turntree_worlds.qa.build import QaWorld
from turntree_worlds.qa.generate import (
    Chain,
    Posed,
    QuestionMix,
    generate_questions,
    split_entities,
)
from turntree_worlds.qa.world import RELATIONS, TOLD, WOMEN, World, generate_world

SPLITS = ("train", "dev", "test")


def hops(posed: Posed) -> int:
    return sum(len(chain.relations) for chain in posed.chains)


def test_every_fact_has_the_kinds_of_its_relation(world: QaWorld) -> None:
    kinds = world.world.kinds
    for subject, facts in world.world.told.items():
        for relation, value in facts.items():
            assert RELATIONS[kinds[subject]][relation] == kinds.get(value, "number")
            assert (value in kinds) != value.isdigit()
    assert min(len(facts) for facts in world.world.told.values()) >= 2
    assert {len(facts) for name, facts in world.world.told.items() if kinds[name] == "person"} == {TOLD}


def test_parents_are_older_marriages_mutual_and_founders_grown_up(world: QaWorld) -> None:
    told = world.world.told
    for name, facts in told.items():
        assert facts.get("mother", "Ada").split()[0] in WOMEN
        assert facts.get("father", "Abel").split()[0] not in WOMEN
        assert "spouse" not in facts or told[facts["spouse"]]["spouse"] == name
        for elder in (facts.get("mother"), facts.get("father"), facts.get("teacher"), facts.get("founder")):
            year = facts.get("birth year") or facts.get("founding year")
            if elder and year and "birth year" in told[elder]:
                assert int(year) - int(told[elder]["birth year"]) >= 18


def test_documents_tell_every_fact_of_their_entity_in_few_words(world: QaWorld) -> None:
    documents = {document.title: document.text for document in world.world.documents()}
    assert set(documents) == set(world.world.kinds)
    for subject, facts in world.world.told.items():
        for relation, value in facts.items():
            assert documents[subject].count(f"The {relation} is {value}.") == 1
    assert max(len(text.split()) for text in documents.values()) <= 30


def test_the_same_seed_gives_the_same_world_and_questions_and_another_seed_others() -> None:
    assert generate_world(3) == generate_world(3)
    assert generate_world(3).told != generate_world(4).told
    one = generate_questions(generate_world(3), "train", 40)
    assert one == generate_questions(generate_world(3), "train", 40)
    assert one[:15] == generate_questions(generate_world(3), "train", 15), "a longer list starts with a shorter one"


def test_splits_start_from_entities_of_their_own_and_share_no_question(world: QaWorld) -> None:
    starts = {split: set(split_entities(world.world, split)) for split in SPLITS}
    assert set().union(*starts.values()) == set(world.world.kinds)
    asked = {split: world.questions(split, 200) for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        assert not starts[one] & starts[other]
        assert not {p.question.text for p in asked[one]} & {p.question.text for p in asked[other]}
        assert not {p.question.id for p in asked[one]} & {p.question.id for p in asked[other]}
    for split in SPLITS:
        assert {chain.start for posed in asked[split] for chain in posed.chains} <= starts[split]


def answers_of(world: World, posed: Posed) -> list[str]:
    """Every answer that the documents allow, by following all of their sentences."""
    said = [(d.title, *fact) for d in world.documents() for fact in re.findall(r"The ([a-z ]+) is ([^.]+)\.", d.text)]
    ends: list[list[str]] = []
    for chain in posed.chains:
        held = [chain.start]
        for relation in chain.relations:
            held = [value for title, of, value in said if title in held and of == relation]
        ends.append(held)
    if posed.operation == "none":
        return ends[0]
    sign = -1 if posed.operation == "difference" else 1
    return [str(abs(int(a) + sign * int(b))) for a in ends[0] for b in ends[1]]


def test_every_question_has_exactly_one_answer_by_the_documents(world: QaWorld) -> None:
    for posed in world.questions("train", 300):
        (answer,) = answers_of(world.world, posed)
        assert posed.question.answers == (answer,)
        assert posed.question.answer_type == ("number" if answer.isdigit() else "span")


def test_no_chain_meets_an_entity_twice(world: QaWorld) -> None:
    for posed in world.questions("train", 300):
        for chain in posed.chains:
            met = [chain.start]
            for relation in chain.relations:
                met.append(world.world.told[met[-1]][relation])
            assert (chain.start, *chain.values) == tuple(met)
            assert len(set(met)) == len(met)


def test_the_answer_of_an_arithmetic_question_stands_in_no_document(world: QaWorld) -> None:
    words = {word for document in world.world.documents() for word in document.text.replace(".", " ").split()}
    arithmetic = [posed for posed in world.questions("train", 300) if posed.operation != "none"]
    assert {posed.operation for posed in arithmetic} == {"sum", "difference"}
    assert not words & {posed.question.answers[0] for posed in arithmetic}


def test_questions_read_like_questions() -> None:
    chain = Chain("Brask Mills", ("founder", "mother"), ("Jon Brask", "Ada Nash"))
    assert chain.text == "the mother of the founder of Brask Mills"
    texts = {posed.question.text for posed in generate_questions(generate_world(0), "train", 100)}
    assert {text.split(" is ")[0].split(" lie ")[0] for text in texts} == {"Who", "What", "How many years"}
    assert all(text.endswith("?") for text in texts)


def test_the_mix_is_what_was_asked_for(world: QaWorld) -> None:
    mix = QuestionMix(hops=((3, 1.0),), arithmetic=1.0)
    asked = generate_questions(world.world, "train", 50, mix)
    assert {hops(posed) for posed in asked} == {3}
    assert {posed.question.kind for posed in asked} == {"difference", "sum"}
    shares = Counter(hops(posed) for posed in world.questions("train", 400))
    assert set(shares) == {2, 3, 4, 5, 6} and 0.25 < shares[2] / 400 < 0.45


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (lambda: QuestionMix(hops=((0, 1.0),)), "impossible shares"),
        (lambda: QuestionMix(arithmetic=1.5), "is 1.5"),
        (lambda: generate_questions(generate_world(0), "holdout", 1), "unknown split"),
        (lambda: generate_questions(generate_world(0), "dev", 5000, QuestionMix(hops=((1, 1.0),))), "has only"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(bad, why: str) -> None:
    with pytest.raises(ConfigError) as error:
        bad()
    assert why in str(error.value) and "\n" not in str(error.value)
