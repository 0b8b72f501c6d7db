"""Search: nothing in a query breaks it, the right documents come first, a corpus error is one line."""

import json
import lzma
import sqlite3
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree_worlds.documents import Document, read_documents
from turntree_worlds.search import SearchIndex, build_index, match_expression

DOCUMENTS = (
    Document("a", "Lyon", "A city on the Rhône. It is not the capital."),
    Document("b", "Paris", "The capital of France, on the Seine."),
    Document("d", "Rail", "Trains from Lyon. It is quick."),
    Document("c", "Seine", "A river. " + "It flows and flows. " * 200 + "It ends in Le Havre."),
)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    path = tmp_path_factory.mktemp("index") / "index.db"
    build_index(DOCUMENTS, path)
    with SearchIndex(path) as opened:
        yield opened


def test_the_best_document_comes_first_and_a_title_counts_for_more(index):
    best, second, *_ = index.search("What is the capital of France?")
    assert best.id == "b" != second.id
    assert [document.id for document in index.search("lyon")] == ["a", "d"]


def test_words_are_found_in_other_forms_and_without_accents(index):
    assert index.search("rivers")[0].id == "c" and index.search("rhone")[0].id == "a"


def test_a_snippet_shows_the_stretch_that_matched(index):
    (found,) = index.search("Havre")
    assert "Le Havre" in found.snippet and len(found.snippet) < 600 < len(found.text)


def test_no_more_than_asked_for(index):
    assert len(index.search("the capital city river", 2)) == 2


@pytest.mark.parametrize("query", ["", "   ", "?!", "...", "_", "🦀", "\x00"])
def test_a_query_without_words_finds_nothing(index, query):
    assert index.search(query) == []


@pytest.mark.parametrize(
    "query",
    ['"capital', "capital AND", "NEAR(capital", "title: capital", "capital*", "-capital", "(capital", "a'b capital"],
)
def test_the_engines_own_syntax_means_nothing(index, query):
    assert "b" in {document.id for document in index.search(query)}


@given(st.text())
def test_no_query_breaks_the_engine(index, query):
    index.search(query)
    assert match_expression(query).count('"') % 2 == 0


def test_any_number_of_threads_may_search(index):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(index.search("capital")[0].id)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [index.search("capital")[0].id] * 8


def test_an_open_index_cannot_be_written(index):
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        index._connection().execute("DELETE FROM documents")


def test_the_hash_is_that_of_the_documents(tmp_path):
    described = [build_index(documents, tmp_path / "i.db") for documents in (DOCUMENTS, DOCUMENTS, DOCUMENTS[:2])]
    assert described[0] == described[1] and described[0]["hash"] != described[2]["hash"]
    moved = build_index([Document("a", "xy", "z")], tmp_path / "i.db")["hash"]
    assert moved != build_index([Document("a", "x", "yz")], tmp_path / "i.db")["hash"]


def test_a_failed_build_leaves_the_old_index(tmp_path):
    path = tmp_path / "i.db"
    build_index(DOCUMENTS, path)
    with pytest.raises(InputError, match="two documents have the id 'a'"):
        build_index([*DOCUMENTS, DOCUMENTS[0]], path)
    with SearchIndex(path) as index:
        assert index.documents == 4
    assert [file.name for file in tmp_path.iterdir()] == ["i.db"]


def test_documents_come_from_rows_text_files_and_folders(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "rows.jsonl").write_text('{"text": "one"}\n\n{"id": 7, "title": "t", "text": "two"}\n')
    (tmp_path / "note.txt").write_text("three")
    (tmp_path / "image.png").write_bytes(b"\xff")
    assert list(read_documents(tmp_path)) == [
        Document("deep/rows.jsonl:1", "", "one"),
        Document("7", "t", "two"),
        Document("note.txt", "note", "three"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}', "a.jsonl:2: field 'txt': unknown key; known keys"),
        ("a.jsonl", '{"text": 3}', "a.jsonl:1: field 'text': is not text"),
        ("a.jsonl", '{"title": "x"}', "a.jsonl:1: field 'text': is not text"),
        ("a.jsonl", '{"text": " "}', "a.jsonl:1: field 'text': is empty"),
        ("a.jsonl", "{", "a.jsonl:1: is the beginning of JSON over several lines"),
        ("a.jsonl", '{"text": x}', "a.jsonl:1: is not complete JSON"),
        ("a.txt", "", "a.txt: is empty"),
        ("a.pdf", "x", "is neither .jsonl nor text"),
    ],
)
def test_a_bad_corpus_is_an_error_that_names_the_place(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message):
        list(read_documents(tmp_path / name))


@pytest.mark.parametrize("name", ["nofile", "nofile.jsonl", "nofile.txt"])
def test_a_corpus_that_there_is_not_is_said_to_be_none(tmp_path, name):
    with pytest.raises(InputError, match=f"{name}: does not exist"):
        list(read_documents(tmp_path / name))


def test_a_folder_without_documents_is_an_error(tmp_path):
    with pytest.raises(InputError, match="holds no documents"):
        list(read_documents(tmp_path))


def test_what_is_no_index_is_refused(tmp_path):
    (tmp_path / "text").write_text("no database, but long enough to have a header that is none" * 20)
    with pytest.raises(InputError, match="is not a search index"):
        SearchIndex(tmp_path / "text")
    with pytest.raises(InputError, match="no such file"):
        SearchIndex(tmp_path / "absent")
    build_index(DOCUMENTS, tmp_path / "old.db")
    connection = sqlite3.connect(tmp_path / "old.db")
    connection.execute("UPDATE description SET value = 'turntree/search-index/0' WHERE key = 'schema'")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match=r"search-index/0.*build it again"):
        SearchIndex(tmp_path / "old.db")


def test_the_command_builds_an_index_and_says_what_it_holds(tmp_path, capsys):
    from turntree.cli.main import main

    rows = [{"id": document.id, "title": document.title, "text": document.text} for document in DOCUMENTS]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["index", "build", str(tmp_path / "d.jsonl"), "--out", str(tmp_path / "i.db"), "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    with SearchIndex(tmp_path / "i.db") as index:
        assert (told["documents"], told["hash"]) == (4, index.hash)


def test_answers_of_real_questions_are_found_by_searching_the_subjects_of_their_evidence(shared_data, tmp_path):
    """2WikiMultiHopQA: 966 of 1,000 answers are in the top 3 of the searches an expert would make (measured once with
    plain BM25); one search with the question finds half."""
    with lzma.open(shared_data / "wiki2" / "corpus.json.xz", "rt") as file:
        corpus = json.load(file)
    with lzma.open(shared_data / "wiki2" / "questions.json.xz", "rt") as file:
        questions = json.load(file)[::20]
    build_index((Document(str(i), row["title"], row["text"]) for i, row in enumerate(corpus)), tmp_path / "i.db")

    def seen(queries, answer):
        texts = [f"{found.title} {found.text}" for query in queries for found in index.search(query, 3)]
        return any(answer.lower() in text.lower() for text in texts)

    with SearchIndex(tmp_path / "i.db") as index:
        assert index.documents == 6119
        asked = [row for row in questions if row["answer"].lower() not in ("yes", "no")]
        expert = sum(seen([subject for subject, _, _ in row["evidence"]], row["answer"]) for row in asked)
        once = sum(seen([row["question"]], row["answer"]) for row in asked)
    assert expert >= 0.93 * len(asked)
    assert once < 0.8 * expert
