"""What the pages show runs, and what they and the docstrings point to exists."""

import ast
import re
import shlex
import shutil
import sys

import pages
import pytest

import turntree

WITH_COMMANDS = [page for page in pages.PAGES if any(block.kind == "sh" for block in pages.blocks(page))]
SNIPPETS = [
    pytest.param(block.text, id=f"{page.relative_to(pages.REPOSITORY)}-{number}")
    for page in pages.PAGES
    if page not in WITH_COMMANDS
    for number, block in enumerate(pages.blocks(page))
]
SOURCES = sorted((pages.REPOSITORY / "src").rglob("*.py"))
SMALL = {  # what a command is given on top, so that it takes a second or two
    "train online --environment 'gateway:": "--iterations 1 --groups 1 --group-size 2 --count 4 --held-out-count 1",
    "train online": "--iterations 1 --groups 2 --group-size 4 --count 4 --held-out-count 2 --max-turns 2",
    "train pivot": "--steps 1 --set train.groups=2 --set train.group_size=4 --set check.max_turns=2",
    "sft": "--set check.max_turns=2",
    "evaluate": "--count 4",
    "profile": "--limit 24 --rollouts 8",
    "traces record": "--count 12",
}
MOST_LINES = 30  # of code on a page that says how to bring a part


@pytest.mark.parametrize("code", SNIPPETS)
def test_every_python_snippet_runs_as_it_stands(code, tmp_path):
    """In a fresh interpreter and an empty folder, as a reader would try it. A step that is shown teaches."""
    said = pages.run_python(code, tmp_path)
    if "update_step(" in code:
        metrics = ast.literal_eval(said.splitlines()[0])
        assert metrics["grad_norm"] > 0 and metrics["zero_variance_fraction"] == 0


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(pages.REPOSITORY)))
def test_a_page_can_be_followed_from_its_first_block_to_its_last(page, reader):
    """Files are written, programs run, commands run on tiny settings: each finds what the blocks above it made."""
    for block in pages.blocks(page):
        if block.file:
            (reader / block.file).write_text(block.text)
        elif block.kind == "python":
            pages.run_python(block.text, reader)
        for words in block.commands() if block.kind == "sh" else []:
            small = next((small for command, small in SMALL.items() if shlex.join(words).startswith(command)), "")
            pages.run_command(words, shlex.split(small)) if block.is_run else pages.parse(words)
    unused = {block.file for block in pages.blocks(page) if block.file} - {
        f"{name}.py" for name in sys.modules if (reader / f"{name}.py").exists()
    }
    assert not unused, "every file that a page shows is loaded by one of its commands"


def test_the_readme_is_read_in_two_minutes_and_its_links_lead_to_results_and_limits():
    page = (pages.REPOSITORY / "README.md").read_text()
    assert len(page.splitlines()) <= 90
    assert page.count("(docs/results/index.md)") == 1 and page.count("(docs/design/limits.md)") == 1
    assert not any(not block.is_run for block in pages.blocks(pages.REPOSITORY / "README.md")), "all commands run"
    assert {"audit", "profile", "export", "train"} <= {
        words[0] for block in pages.blocks(pages.REPOSITORY / "README.md") for words in block.commands()
    }


def test_the_changes_of_what_was_never_released_fit_on_a_page():
    """A merge that joins both sides of this file brings back what was cut."""
    assert len((pages.REPOSITORY / "CHANGELOG.md").read_text().splitlines()) <= 60


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """The folder of a reader, with the examples in it."""
    shutil.copytree(pages.REPOSITORY / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(pages.REPOSITORY))])
    for name in [name for name in sys.modules if name.partition(".")[0] == "examples"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_commands_and_options_that_pages_name_in_passing_exist():
    wrong = []
    for page in pages.PAGES:
        for words in map(str.split, re.findall(r"`turntree ([a-z][^`]*)`", page.read_text())):
            wrong += [f"{page.name}: turntree {' '.join(words)}"] if pages.unknown_options(words) else []
    assert not wrong


@pytest.mark.parametrize(
    "page", sorted((pages.REPOSITORY / "docs" / "how-to").glob("*.md")), ids=lambda page: page.stem
)
def test_a_part_of_ones_own_takes_at_most_thirty_lines(page):
    code = "".join(block.text for block in pages.blocks(page) if block.kind == "python")
    assert 0 < sum(1 for line in code.splitlines() if line.strip()) <= MOST_LINES


def test_the_reference_has_every_public_name():
    page = (pages.REPOSITORY / "docs" / "reference.md").read_text()
    assert sorted(re.findall(r"^::: turntree\.(\w+)$", page, re.MULTILINE)) == sorted(
        set(turntree.__all__) - {"__version__"}
    )


def test_the_site_leads_to_every_page():
    """A page that the navigation lacks is found by accident only."""
    shown = set(re.findall(r'"([\w./-]+\.md)"', (pages.REPOSITORY / "zensical.toml").read_text()))
    docs = pages.REPOSITORY / "docs"
    assert shown == {str(page.relative_to(docs)) for page in docs.rglob("*.md")}


def test_what_pages_and_docstrings_point_to_exists():
    """Links, paths of pages, and headings that are quoted behind a path. Sections have no numbers."""
    wrong: list[str] = []
    for page in [*pages.PAGES, *pages.REPOSITORY.glob("C*.md"), *SOURCES]:
        text, name = page.read_text(), str(page.relative_to(pages.REPOSITORY))
        wrong += [f"{name}: {found}" for found in re.findall(r"\(architecture(?: page)?,\s+(?:section\s+)?\d", text)]
        for path, heading in re.findall(r'\b(docs/[\w/-]+\.md)(?:,\s+"([^"]+)")?', text):
            target = pages.REPOSITORY / path
            if not target.is_file() or (heading and f"# {' '.join(heading.split())}\n" not in target.read_text()):
                wrong.append(f"{name}: {path} {heading}")
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text) if page.suffix == ".md" else []
        wrong += [f"{name}: {link}" for link in links if not (page.parent / link).exists()]
    assert not wrong


def test_what_pages_name_with_its_module_is_there():
    """Classes: `credit.lower` may as well be a key of a configuration."""
    wrong: list[str] = []
    for page in pages.PAGES:
        for module, name in re.findall(r"`((?:[a-z_]+\.)+)([A-Z][a-z]\w+)`", page.read_text()):
            ending = f"/{module.replace('tt.', 'turntree.')[:-1].replace('.', '/')}"
            places = [path for path in SOURCES if str(path)[:-3].removesuffix("/__init__").endswith(ending)]
            if not any(re.search(rf"\b{name}\b", path.read_text()) for path in places):
                wrong.append(f"{page.name}: {module}{name}")
    assert not wrong
