"""Questions of files: what is trained on and what is checked on have no question in common, however it is written."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.errors import ConfigError, InputError
from turntree_worlds.qa.build import QaWorld
from turntree_worlds.qa.entry import Questions
from turntree_worlds.workbench.entry import Software, Terminal

ASKED = ["Where does Ada live?", "Who is José's mother?", "Is the Straße long?", "How old is Bob?", "What is 1 + 1?"]
REWRITTEN = st.sampled_from([
    str, str.upper, str.lower, str.title, lambda text: text.replace(" ", " \u00a0\n "), lambda text: f"\t{text} ",
    lambda text: unicodedata.normalize("NFD", text),
])  # fmt: skip


def written(path, texts):
    path.write_text("".join(json.dumps({"question": text, "answer": "x"}) + "\n" for text in texts))
    return str(path)


def keys(questions):
    return {question.key for question in questions}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ASKED), REWRITTEN), min_size=1), st.integers(1, 6), st.integers(1, 6))
def test_no_question_of_the_held_out_file_is_trained_on_however_it_is_written(tmp_path_factory, again, count, checks):
    folder = tmp_path_factory.mktemp("questions")
    source = written(folder / "train.jsonl", [*ASKED, "Only here?"])
    held_out = written(folder / "held_out.jsonl", [rewrite(text) for text, rewrite in again])
    opened = Questions(questions=source, index="index", held_out=held_out)
    found, (report, _) = opened.read({"train": count, "dev": checks}, 0)
    asked, checked = found["train"], found["dev"]
    left = {unicodedata.normalize("NFC", t) for t in ASKED} - {text for text, _ in again}
    assert len(asked) == min(count, len(left) + 1), "no more and no less is left out"
    assert not keys(asked) & keys(checked) and {q.text for q in asked} <= {*left, "Only here?"}
    assert report["dropped"] == {"held out": len(ASKED) - len(left)}
    assert report["rows"] == report["kept"] + sum(report["dropped"].values())


def test_one_file_gives_both_without_a_common_question(tmp_path):
    source = written(tmp_path / "all.jsonl", [*ASKED, *(text.upper() for text in ASKED)])
    found, (report,) = Questions(questions=source, index="index").read({"train": 3, "dev": 9}, 0)
    assert (len(found["train"]), len(found["dev"]), report["dropped"]) == (3, 2, {"question: asked before": 5})


@pytest.mark.parametrize("kind", [Terminal, Software])
def test_tasks_of_a_file_that_may_have_been_trained_on_are_not_played_as_held_out(tmp_path, kind):
    """A command that only evaluates cannot know how many of the file another command trained on."""
    own, other = tmp_path / "own.jsonl", tmp_path / "other.jsonl"
    for path in (own, other):
        rows = [{"id": f"{path.stem}-{n}", "instruction": "Submit 1.", "answer": "1"} for n in range(4)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def played(splits, **options):
        with kind(tasks=str(own), **options).open(splits, seed=0) as opened:
            return {split: [task.task_id for task in tasks] for split, tasks in opened.tasks.items()}

    trained = played({"train": 2, "dev": 9})
    assert len(trained["train"]) == 2 and sorted(trained["train"] + trained["dev"]) == [f"own-{n}" for n in range(4)]
    assert played({"train": 2}) == {"train": trained["train"]}
    with pytest.raises(InputError, match=r"may hold what was trained on.*held_out"):
        played({"test": 2})
    held_out = played({"test": 2}, held_out=str(other))["test"]
    assert len(held_out) == 2 and all(name.startswith("other-") for name in held_out)
    assert played({"train": 4, "dev": 1}, held_out=str(other))["dev"] == held_out[:1]
    with pytest.raises(InputError, match="also the file that is trained on"):
        played({"train": 1, "dev": 1}, held_out=f"{tmp_path}/./own.jsonl")


def test_questions_of_a_file_that_may_have_been_trained_on_are_not_asked_as_held_out(tmp_path):
    own, other = written(tmp_path / "own.jsonl", ASKED), written(tmp_path / "other.jsonl", ["Only here?"])
    questions = Questions(questions=own, index="index")
    texts = {q.text for seed in range(9) for q in questions.read({"train": 2}, seed)[0]["train"]}
    assert texts == set(ASKED), "every seed draws two of its own"
    with pytest.raises(InputError, match=r"may hold what was trained on.*held_out"):
        questions.read({"test": 2}, 0)
    with pytest.raises(InputError, match="also the file that is trained on"):
        Questions(questions=own, index="index", held_out=f"{tmp_path}/./own.jsonl").read({"train": 2, "dev": 1}, 0)
    held_out = Questions(questions=own, index="index", held_out=other)
    assert [q.text for q in held_out.read({"test": 2}, 0)[0]["test"]] == ["Only here?"]


def test_a_file_that_is_held_out_whole_is_refused(tmp_path):
    source, held_out = written(tmp_path / "a.jsonl", ASKED), written(tmp_path / "b.jsonl", map(str.upper, ASKED))
    with pytest.raises(InputError, match="no question that is not held out"):
        Questions(questions=source, index="index", held_out=held_out).read({"train": 9, "dev": 9}, 0)


def test_an_offset_leaves_out_the_first_generated_questions_of_training_and_not_those_of_the_checks():
    world = QaWorld()

    def ids(splits, **options):
        posed = Questions(**options).generated(world, splits)
        return {split: [each.question.id for each in found] for split, found in posed.items()}

    every = ids({"train": 7, "dev": 2})
    assert ids({"train": 4, "dev": 2}, offset=3) == {"train": every["train"][3:], "dev": every["dev"]}
    assert ids({"dev": 1}, offset=1) == {"dev": every["dev"][1:]}
    with pytest.raises(ConfigError, match="leave rows out of your file"):
        Questions(questions="mine.jsonl", index="index", offset=1)
    with pytest.raises(ConfigError, match="offset"):
        Questions(offset=-1)
