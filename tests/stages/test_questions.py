"""Questions of files: what is trained on and what is checked on have no question in common, however it is written."""

import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree.domains.qa.door import read_splits

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
    asked, checked, (report, _) = read_splits(source, count, held_out, checks)
    left = {unicodedata.normalize("NFC", t) for t in ASKED} - {text for text, _ in again}
    assert len(asked) == min(count, len(left) + 1), "no more and no less is left out"
    assert not keys(asked) & keys(checked) and {q.text for q in asked} <= {*left, "Only here?"}
    assert report["dropped"] == {"held out": len(ASKED) - len(left)}
    assert report["rows"] == report["kept"] + sum(report["dropped"].values())


def test_one_file_gives_both_without_a_common_question(tmp_path):
    source = written(tmp_path / "all.jsonl", [*ASKED, *(text.upper() for text in ASKED)])
    asked, checked, (report,) = read_splits(source, 3, None, 9)
    assert (len(asked), len(checked), report["dropped"]) == (3, 2, {"question: asked before": 5})
    asked, checked, _ = read_splits(source, 9, f"{tmp_path}/./all.jsonl", 2)
    assert (len(asked), len(checked)) == (3, 2) and not keys(asked) & keys(checked)


def test_a_file_that_is_held_out_whole_is_refused(tmp_path):
    source, held_out = written(tmp_path / "a.jsonl", ASKED), written(tmp_path / "b.jsonl", map(str.upper, ASKED))
    with pytest.raises(InputError, match="no question that is not held out"):
        read_splits(source, 9, held_out, 9)
