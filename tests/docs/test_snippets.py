"""What the pages show runs, and what they and the docstrings point to exists."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
SNIPPETS = [
    pytest.param(match.group(1), id=f"{page.relative_to(REPOSITORY)}-{number}")
    for page in PAGES
    for number, match in enumerate(re.finditer(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
]
SOURCES = sorted((REPOSITORY / "src" / "turntree").rglob("*.py"))


@pytest.mark.parametrize("code", SNIPPETS)
def test_every_python_snippet_runs_as_it_stands(code, tmp_path):
    """In a fresh interpreter and an empty folder, as a reader would try it. A step that is shown teaches."""
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    if "update_step(" in code:
        metrics = ast.literal_eval(done.stdout)
        assert metrics["grad_norm"] > 0 and metrics["zero_variance_fraction"] == 0


def test_what_pages_and_docstrings_point_to_exists():
    """Links, paths of pages, and headings that are quoted behind a path. Sections have no numbers."""
    wrong: list[str] = []
    for page in [*PAGES, *SOURCES]:
        text, name = page.read_text(), str(page.relative_to(REPOSITORY))
        wrong += [f"{name}: {found}" for found in re.findall(r"\(architecture(?: page)?,\s+(?:section\s+)?\d", text)]
        for path, heading in re.findall(r'\b(docs/[\w/-]+\.md)(?:,\s+"([^"]+)")?', text):
            target = REPOSITORY / path
            if not target.is_file() or (heading and f"# {' '.join(heading.split())}\n" not in target.read_text()):
                wrong.append(f"{name}: {path} {heading}")
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text) if page.suffix == ".md" else []
        wrong += [f"{name}: {link}" for link in links if not (page.parent / link).exists()]
    assert not wrong
