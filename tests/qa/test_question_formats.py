"""Questions are read from the files in which they are published; what is dropped is counted, with its place."""

import gzip
import json
import sys
from collections import Counter

import pytest

from turntree.core.errors import InputError
from turntree_worlds.qa.formats import read_questions as read
from turntree_worlds.qa.questions import Question


def jsonl(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_plain_rows_with_one_answer_or_several(tmp_path):
    path = jsonl(
        tmp_path / "plain.jsonl",
        {"question": "Where is the Louvre?", "answer": "Paris"},
        {"id": 7, "question": "Who?", "answers": ["Ada", "Ada Lovelace", "Ada"], "type": "bridge", "hops": 2},
        {"question": "How many?", "golden_answers": ["1,200"]},
        {"question": "How much?", "answer": 0.5},
    )
    assert read(path).questions == (
        Question(id="plain:1", text="Where is the Louvre?", answers=("Paris",)),
        Question(id="7", text="Who?", answers=("Ada", "Ada Lovelace"), kind="bridge"),
        Question(id="plain:3", text="How many?", answers=("1,200",), answer_type="number"),
        Question(id="plain:4", text="How much?", answers=("0.5",), answer_type="number"),
    )
    assert read(path).to_json() == {
        "rows": 4, "questions": 4, "kept": 4, "repaired": 0, "damaged_prompts": 0, "dropped": {}, "first": {},
    }  # fmt: skip


def test_a_gsm8k_answer_is_what_follows_the_mark_and_a_number(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"question": "Eggs?", "answer": "16 - 3 = <<16-3=13>>13\n#### 13"})
    assert read(path).questions == (Question(id="a:1", text="Eggs?", answers=("13",), answer_type="number"),)


def test_a_math_answer_is_a_number_an_expression_or_else_a_span(tmp_path):
    golds = ["12", r"\frac{\pi}{2}", "p - q", r"\begin{tikz} no"]
    rows = [{"problem": f"Q{k}", "answer": gold, "subject": "Algebra"} for k, gold in enumerate(golds)]
    found = read(jsonl(tmp_path / "a.jsonl", *rows)).questions
    assert [question.answer_type for question in found] == ["number", "expression", "expression", "span"]
    assert {question.kind for question in found} == {"Algebra"}


def test_the_subjects_of_a_2wiki_row_s_facts_are_its_evidence(tmp_path):
    row = {"_id": "x1", "type": "compositional", "question": "Q?", "answer": "851", "evidences": [["a", "b", "c"]] * 2}
    (question,) = read(jsonl(tmp_path / "a.jsonl", row)).questions
    assert (question.id, question.kind, question.answer_type) == ("x1", "compositional", "number")
    assert question.evidence == ("a",)


def test_an_answer_type_is_the_row_s_or_inferred(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        {"question": "A", "answer": "1; 2", "answer_type": "list"},
        {"question": "B", "answer": "1"},
    )
    assert [question.answer_type for question in read(path).questions] == ["list", "number"]


@pytest.mark.parametrize(("row", "reason", "said"), [
    ({"answer": "x"}, "question: is missing", "field 'question': is missing"),
    ({"question": " ", "answer": "x"}, "question: is empty", "field 'question': is empty"),
    ({"question": "Q"}, "answer: is missing", "field 'answer': is missing"),
    ({"question": "Q", "answer": ""}, "answer: is empty", "field 'answer': is empty"),
    ({"question": "Q", "answer": []}, "answer: is neither text nor a number, nor a list of such", "is neither"),
    ({"question": "Q", "answer": True}, "answer: is neither text nor a number, nor a list of such", "is neither"),
    ({"question": "Q", "answer": "x", "answer_type": "word"}, "answer_type: is none of number, span, list, expression",
     "field 'answer_type'"),
    ({"question": "Q", "answer": "x", "answer_type": "number"}, "answer: cannot be read as number", "'x' cannot be"),
    ({"question": "a\x00b", "answer": "x"}, "question: holds a control character", "control character"),
    ({"question": "first", "answer": "other"}, "question: asked before, with another answer", "asked before"),
    ({"question": "First ", "answer": "1"}, "question: asked before", "asked before"),
    ({"id": "one", "question": "Q", "answer": "x"}, "id: names another question too", "field 'id'"),
])  # fmt: skip
def test_a_row_that_cannot_be_used_is_dropped_counted_and_located(tmp_path, row, reason, said):
    good = {"id": "one", "question": "first", "answer": "1"}
    found = read(jsonl(tmp_path / "a.jsonl", good, row, row))
    assert len(found.questions) == 1 and found.dropped == {reason: 2}
    assert found.rows == len(found.questions) + found.dropped.total() == 3
    assert f"{tmp_path}/a.jsonl:2: " in found.first[reason] and said in found.first[reason]


def test_questions_are_unique(tmp_path):
    row = {"question": "Q", "answer": "x"}
    found = read(jsonl(tmp_path / "a.jsonl", row, row))
    assert len(found.questions) == 1 and found.dropped == {"question: asked before": 1}
    assert "a.jsonl:2" in found.first["question: asked before"]


def test_a_file_without_a_usable_question_is_an_error_that_says_why(tmp_path):
    with pytest.raises(
        InputError, match=r"holds no question that can be used \(.*a.jsonl:1: field 'answer': is missing"
    ):
        read(jsonl(tmp_path / "a.jsonl", {"question": "Q"}))
    with pytest.raises(InputError, match="it is empty"):
        read(jsonl(tmp_path / "b.jsonl"))
    with pytest.raises(InputError, match="does not exist"):
        read(tmp_path / "none.jsonl")


def test_a_damaged_line_is_an_error_with_its_number(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"question": "Q", "answer": "x"}, '{"question": "cut')
    with pytest.raises(InputError, match=r"a.jsonl:2: is not complete JSON"):
        read(path)


def test_json_lists_and_compressed_lines_are_read_too(tmp_path):
    row = {"question": "Q", "answer": "x"}
    (tmp_path / "a.json").write_text(json.dumps([row], indent=2))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    for name in ("a.json", "a.jsonl.gz"):
        assert read(tmp_path / name).questions == (Question(id="a:1", text="Q", answers=("x",)),)


def test_latex_that_was_read_as_an_escape_is_repaired_and_counted(tmp_path):
    path = jsonl(
        tmp_path / "a.jsonl",
        {"question": "Put it in \boxed{}", "answer": "\frac{1}{x}"},
        {"question": "Q", "answer": "1"},
    )
    first, _ = read(path).questions
    assert first.text == r"Put it in \boxed{}" and first.answers == (r"\frac{1}{x}",)
    assert first.answer_type == "expression" and read(path).repaired == 1


# Parquet


def arpo_row(k, *, ability="qa", truth="Paris", system="Put the answer in \boxed{}.", **extra):
    prompt = [{"content": system, "role": "system"}, {"content": f"Question {k}?", "role": "user"}]
    return {
        "data_source": "DR_grpo_mix", "prompt": prompt, "ability": ability, "metadata": None,
        "reward_model": {"ground_truth": truth, "style": "rule"}, "extra_info": {"index": k, "split": "train", **extra},
    }  # fmt: skip


def parquet(path, rows):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def test_arpo_columns_are_read_without_their_system_prompt(tmp_path):
    rows = [
        arpo_row(0, ability="math", truth=r"3\sqrt{3} - 6", question="The radius?"),
        arpo_row(1, ability=None, truth="E. H. Shepard", question="Who drew it?"),
        arpo_row(2, ability="math", truth="7", system="fine", question=None),
        arpo_row(1, ability=None, truth="another", question="who drew it?"),
    ]
    found = read(parquet(tmp_path / "train.parquet", rows))
    assert [(q.id, q.text, q.answers, q.answer_type, q.kind) for q in found.questions] == [
        ("train:1", "The radius?", (r"3\sqrt{3} - 6",), "expression", "math"),
        ("train:2", "Who drew it?", ("E. H. Shepard",), "span", "DR_grpo_mix"),
        ("train:3", "Question 2?", ("7",), "number", "math"),
    ]
    assert found.damaged_prompts == 3 and found.repaired == 0
    assert found.dropped == {"question: asked before, with another answer": 1}


def test_several_ground_truths_are_several_right_answers(tmp_path):
    rows = [arpo_row(0, truth={"target": ["Paris", "Lutetia"]})]
    assert read(parquet(tmp_path / "a.parquet", rows)).questions[0].answers == ("Paris", "Lutetia")


def test_without_pyarrow_and_with_a_damaged_file_the_error_says_what_to_do(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no parquet at all")
    with pytest.raises(InputError, match="is not a Parquet file"):
        read(path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match=r"pip install 'turntree\[parquet\]'"):
        read(path)


# real files


def test_the_public_files_are_read_whole(shared_data):
    expected = {
        "math/gsm8k_test.jsonl.xz": (1319, {"number": 1319}),
        "math/math500_test.jsonl.xz": (500, {"number": 395, "expression": 65, "span": 40}),
        "wiki2/questions.json.xz": (1000, {"span": 985, "number": 15}),
    }
    for name, (count, types) in expected.items():
        found = read(shared_data / name)
        assert found.rows == len(found.questions) == count, name
        assert Counter(question.answer_type for question in found.questions) == types, name
    assert all(question.evidence for question in found.questions)
