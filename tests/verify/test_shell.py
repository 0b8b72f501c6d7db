"""Scripts are equal exactly when they do the same, as far as words can tell; in doubt they are not."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tree_sitter_bash")

from turntree.verify.shell.commands import COMMANDS
from turntree.verify.shell.script import Script, _remembered  # pyright: ignore[reportPrivateUsage]


def same(one: str, other: str, folder: str | None = None) -> bool:
    return Script.of(one, folder).meaning == Script.of(other, folder).meaning


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ls -la", "ls -l -a\n"),
        ("pytest -v tests/a.py", "pytest -xvs tests/a.py"),
        ("pytest a b", "pytest b a"),
        ("cat 'a.py'", "cat ./a.py"),
        ("grep -rn foo src", "grep foo src --recursive --line-number"),
        ("grep --include='*.py' -r x .", "grep -r --include=*.py x ."),
        ("tail -20 f", "tail -n 20 f"),
        ("rm -rf a", "rm -f -r a"),
        ("pip3 install -U x", "pip install --upgrade x"),
        ("git add a b", "git add b a"),
        ("make 2>&1", "make"),
        ("make &> f", "make > f 2>&1"),
        ("a |& b", "a 2>&1 | b"),
        ("a 2>e >o", "a >o 2>e"),
        ("> a echo hi", "echo hi > a"),
        ("a; b", "a\nb  # then b"),
        ("a && \\\n b", "a && b"),
        ("a && b | c > f", "a && b | c >f"),
        ("echo `ls`", "echo $(ls)"),
        ("echo ${x}", "echo $x"),
        ('echo " "', "echo ' '"),
        ("bash -c 'a b'", 'bash -c "a b"'),
        ("ls -lt", "ls -tl"),
        ("grep -rE a b", "grep -E -r a b"),
        ("tail -f -n 5 a", "tail -n 5 -f a"),
        ("du -sh a", "du -h -s a"),
        ("cp -rf a b", "cp -fr a b"),
        ("rm -R a", "rm -r a"),
        ("cp -Rf a b", "cp --recursive -f a b"),
        ("mkdir a b", "mkdir b a"),
        ("grep x a b", "grep x b a"),
        ("cd x && pytest -q a 2>&1", "cd x && pytest a"),
        ("pytest -q a > /dev/null", "pytest a > /dev/null"),
        ("pytest -x a | tail", "pytest a | tail"),
        ("cat ./a | tail", "cat a | tail"),
        ("grep x ./a | tail", "grep x a | tail"),
        ("mkdir ./a > log", "mkdir a > log"),
        ("git --no-pager diff | cat", "git diff --no-color | cat"),
        ("for i in a b; do\n echo $i\ndone", "for i in a b; do echo $i; done"),
    ],
)
def test_what_does_the_same_is_the_same(one: str, other: str) -> None:
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("pip install x", "pip uninstall x"),
        ("cat a", "cat b"),
        ("cat a b", "cat b a"),
        ("cp a b", "cp b a"),
        ("grep a b", "grep b a"),
        ("rm -f -i a", "rm -i -f a"),
        ("cp -i -f a b", "cp -f -i a b"),
        ("ls -aA", "ls -Aa"),
        ("ls -tS", "ls -St"),
        ("ls -S --sort=time", "ls --sort=time -S"),
        ("ls -oC", "ls -Co"),
        ("head -qv a b", "head -vq a b"),
        ("tail -qv a b", "tail -vq a b"),
        ("grep -lL x a", "grep -Ll x a"),
        ("grep -r x --include='*.py' --exclude='t*' .", "grep -r x --exclude='t*' --include='*.py' ."),
        ("npm test -- --grep a --file b", "npm test -- --grep b --file a"),
        ("PYTHONUNBUFFERED=$(rm -rf /) python a.py", "python a.py"),
        ("PYTHONUNBUFFERED=$(rm -rf /) python a.py", "PYTHONUNBUFFERED=1 python a.py"),
        ("echo `echo \\$HOME`", "echo $(echo \\$HOME)"),
        ('echo "`echo \\"a\\"`"', 'echo "$(echo \\"a\\")"'),
        ("apt-get install -qq x", "apt-get install -q x"),
        ("file -b -b a", "file -b a"),
        ("make 2> e", "make 2> e 2>&1"),
        ("make 2> /dev/null", "make 2> /dev/null 2>&1"),
        ("cat > f <<'EOF_1'\n$HOME\nEOF_1", "cat > f <<EOF_1\n$HOME\nEOF_1"),
        ("cat > f <<'E-F'\n$HOME\nE-F", "cat > f <<E-F\n$HOME\nE-F"),
        ("python x.py > output_a", "python x.py > output_b"),
        ("a > f", "a >> f"),
        ("a > f 2>&1", "a 2>&1 > f"),
        ("a 2>&1 | tail", "a | tail"),
        ("x=$(a 2>&1)", "x=$(a)"),
        ("(a 2>&1) | b", "(a) | b"),
        ("{ a 2>&1; } > f", "{ a; } > f"),
        ("while a; do b 2>&1; done | c", "while a; do b; done | c"),
        ("echo *", "echo '*'"),
        ('echo " "', 'echo ""'),
        ('echo "$x "', 'echo "$x"'),
        ("echo ~", "echo '~'"),
        ("echo $x", 'echo "$x"'),
        ("echo '$x'", 'echo "$x"'),
        ("a\\ b", "a b"),
        ("./run", "run"),
        ("a && b", "a; b"),
        ("a && b", "a || b"),
        ("a &", "a"),
        ("! a", "a"),
        ("X=1 a", "a"),
        ("PAGER=x git log", "git log"),
        ("(cd a; ls)", "cd a; ls"),
        ("if a; then b; else c; fi", "if a; then b; fi; c"),
        ("[ -f a ]", "[ -d a ]"),
        ("cat <<E\na\nE", "cat <<E\nb\nE"),
        ("cat <<E\n$a\nE", "cat <<'E'\n$a\nE"),
        ("echo $((1+2))", "echo $((1-2))"),
        ("ls; rm -rf /", "ls"),
        ("echo 'unfinished", "echo unfinished"),
    ],
)
def test_what_does_another_thing_is_another_script(one: str, other: str) -> None:
    assert not same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ls -F | grep /", "ls | grep /"),
        ("rm -v *.pyc | wc -l", "rm *.pyc | wc -l"),
        ("f=$(ls -F); ./$f", "f=$(ls); ./$f"),
        ("pytest -q a > out", "pytest a > out"),
        ("cd x && pytest -q a > out", "cd x && pytest a > out"),
        ("python -m pytest -q a &> out", "python -m pytest a &> out"),
        ("pytest -qq a | tail -1", "pytest -q a | tail -1"),
        ("(pytest -q a) | tail -1", "(pytest a) | tail -1"),
        ("grep --color=always a f > o", "grep a f > o"),
        ("git diff --color > o", "git diff --no-color > o"),
        ("grep foo a b | head -1", "grep foo b a | head -1"),
        ("wc -l b a | head -1", "wc -l a b | head -1"),
        ("which python3 python | head -1", "which python python3 | head -1"),
        ("grep -rn foo src > hits", "grep -rn foo ./src > hits"),
        ("ls src/*.py > list", "ls ./src/*.py > list"),
        ("x=$(wc -l a)", "x=$(wc -l ./a)"),
        ("rm -v a > log", "rm -v ./a > log"),
        ("head a b | sort", "head a ./b | sort"),
    ],
)
def test_what_is_printed_counts_where_it_leads_elsewhere_than_to_the_terminal(one: str, other: str) -> None:
    assert not same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("rmdir a/b a", "rmdir a a/b"),
        ("rmdir a/* a", "rmdir a a/*"),
        ("mkdir a a/b", "mkdir a/b a"),
        ("mkdir a a-b a/b", "mkdir a/b a-b a"),
        ("mkdir $a $a/b", "mkdir $a/b $a"),
        ("rm -d a/b a", "rm -d a a/b"),
        ("chmod 000 . a", "chmod 000 a ."),
        ("chmod 000 / /a", "chmod 000 /a /"),
        ("sort -s -k1,1 b a", "sort -s -k1,1 a b"),
        ("du -s a a/b", "du -s a/b a"),
    ],
)
def test_the_order_of_what_lies_in_one_another_counts(one: str, other: str) -> None:
    assert not same(one, other)


class TestFolders:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("cd /repo && pytest a", "pytest a"),
            ("pytest tests/a.py", "pytest /repo/tests/a.py"),
            ("cd /repo && ls tests/*.py", "ls /repo/tests/*.py"),
            ("cd sub && ls", "cd /repo/sub/ && ls"),
            ("a && cd /repo && b", "a && b"),
            ("(cd /x; ls) > y; cat a", "(cd /x; ls) > y; cat /repo/a"),
            ("{ ls -a -l; } 2>&1 | tail; cat a", "{ ls -la; } 2>&1 | tail; cat /repo/a"),
        ],
    )
    def test_a_path_is_that_of_the_folder_where_the_shell_is(self, one: str, other: str) -> None:
        assert same(one, other, "/repo")

    @pytest.mark.parametrize("folder", [None, "/repo"])
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("cp -r dist/. /var/www", "cp -r dist /var/www"),
            ("rm -rf build/.", "rm -rf build"),
            ("mv a/. b", "mv a b"),
            ("ls link/.", "ls link"),
            ("ls link/./", "ls link/"),
            ("mkdir a/.", "mkdir a"),
            ("cp -r . /var/www", "cp -r /repo /var/www"),
        ],
    )
    def test_what_lies_in_a_folder_is_not_the_folder(self, one: str, other: str, folder: str | None) -> None:
        assert not same(one, other, folder)

    def test_a_dot_elsewhere_in_a_path_says_nothing(self) -> None:
        assert same("cat ./a/./b", "cat a/b")
        assert same("cat ./a/./b", "cat /repo/a/b", "/repo")
        assert same("ls ./", "ls .")
        assert same("cd . && ls a", "cd /repo/. && ls /repo/a", "/repo")

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("cd /repo && ls", "cd /other && ls"),
            ("cd /repo || rm -rf x", "rm -rf x"),  # a step that succeeds keeps what is behind || from running
            ("a || cd /repo && b", "a || b"),
            ("pytest /repo/../a", "pytest /a"),  # /repo may be a link
            ("cat a", "cat /a"),
        ],
    )
    def test_a_step_that_matters_stays(self, one: str, other: str) -> None:
        assert not same(one, other, "/repo")


def test_commands_that_destroy_are_named_and_reading_is_known() -> None:
    assert not Script.of("ls -la | grep x 2>/dev/null").destroys
    assert Script.of("ls -la | grep x").only_reads
    for text in ("rm a", "sudo rm a", "bash -c 'rm a'", "echo x > a", "git reset --hard", "find . -delete", "rm 'a"):
        assert Script.of(text).destroys, text
        assert not Script.of(text).only_reads, text


plain = st.text("ab-=.,/ $*'\"~{}", max_size=5)  # a backslash before a space is compared as text


def spelled(word: str, how: int) -> str:
    """A word in one of three spellings that bash reads as the same text."""
    if how == 0:
        return "'" + word.replace("'", "'\\''") + "'"
    if how == 1:
        return '"' + "".join(f"\\{c}" if c in '"$`\\' else c for c in word) + '"'
    return spelled(word, 0) if not word or " " in word else "".join(f"\\{c}" for c in word)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.tuples(plain, st.integers(0, 2), st.integers(0, 2)), max_size=3), min_size=1, max_size=8))
def test_spellings_of_a_word_are_one_word_and_bash_agrees(commands: list[list[tuple[str, int, int]]]) -> None:
    pairs = [[" ".join(["printf", *(spelled(w, hows[k]) for w, *hows in words)]) for k in (0, 1)] for words in commands]
    assert all(same(*pair) for pair in pairs)
    apart = [" ".join(["printf '<%s>'", *(spelled(w, how) for w, how, _ in words)]) for words in commands]
    printed = subprocess.run(["bash", "-c", "\necho\n".join(apart)], capture_output=True, text=True, check=True).stdout
    said = ["".join(f"<{w}>" for w, *_ in words) or "<>" for words in commands]
    assert printed == "\n".join(said)  # the spellings mean what this test believes


def test_scripts_that_count_as_the_same_print_the_same(tmp_path: Path) -> None:
    """Random texts after a harmless command, in a folder with files that patterns match."""
    draw = random.Random(1)
    pieces = [
        "a",
        "x",
        "'",
        '"',
        "\\",
        " ",
        "-",
        "=",
        "~",
        "*",
        "{",
        ",",
        "}",
        "#",
        "\t",
        "é",
        "$x",
        "|cat",
        "`",
        "!",
        "]",
    ]
    for name in ("xa", "x-", "a"):
        (tmp_path / name).touch()
    groups: dict[object, list[str]] = {}
    for _ in range(3000):
        text = "printf '<%s>' x" + "".join(draw.choices(pieces, k=draw.randint(0, 6)))
        groups.setdefault(Script.of(text).meaning, []).append(text)
    equal = [sorted(set(texts))[:4] for texts in groups.values() if len(set(texts)) > 1]
    assert len(equal) > 30
    for texts in equal:
        said = {subprocess.run(["bash", "-c", t], capture_output=True, cwd=tmp_path, check=False).stdout for t in texts}
        assert len(said) == 1, texts


PIECES = ["-", "-n", "--include=", "$x", '"$x"', "*", "'a b'", "a/b.py", "$(ls)", "~", "--", "{a,b}"]
PIECES += ["install", "-5", ">f", "|", ";"]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(COMMANDS)), st.lists(st.sampled_from(PIECES), max_size=4), st.sampled_from(["", " "]))
def test_a_known_command_is_read_with_any_words(name: str, words: list[str], joint: str) -> None:
    text = " ".join([name, joint.join(words)])
    for folder in (None, "/repo"):
        assert same(text, text + "\n", folder)


@settings(max_examples=60, deadline=None)
@given(st.text("ab'\"\\$(){}<>|&;# \n*=~-", max_size=25), st.text("ab'\"\\$(){}<>|&;# \n*=~-", max_size=25))
def test_any_text_is_read_and_equals_itself(one: str, other: str) -> None:
    assert same(one, one)
    assert same(one, other) == same(other, one)


IN_REPO = [
    ("eval 'cd /tmp'; rm -rf build", "eval 'cd /tmp'; rm -rf /repo/build"),
    ("pushd sub && pytest tests", "pushd sub && pytest /repo/tests"),
    (". ./env.sh; rm x", ". ./env.sh; rm /repo/x"),
    ("command cd /tmp; rm x", "command cd /tmp; rm /repo/x"),
    ("time cd /tmp; rm x", "time cd /tmp; rm /repo/x"),
    ("$GO /tmp; rm x", "$GO /tmp; rm /repo/x"),
    ("cd build 2>/dev/null; rm -rf out", "cd build 2>/dev/null; rm -rf /repo/out"),
    ("cd /tmp > /dev/null && rm -rf work", "cd /tmp > /dev/null && rm -rf /repo/work"),
    ("{ cd /tmp; } 2>/dev/null; rm a", "{ cd /tmp; } 2>/dev/null; rm /repo/a"),
    ("{ cd /tmp && ls; } > x; rm a", "{ cd /tmp && ls; } > x; rm /repo/a"),
    ("FOO=1 cd /tmp; rm a", "FOO=1 cd /tmp; rm /repo/a"),
    ("cd /repo && cd - && rm x", "cd - && rm x"),
    ("cd /repo; rm -r $OLDPWD", "rm -r $OLDPWD"),
    ("a && FOO=1 cd /tmp > x; rm a", "a && FOO=1 cd /tmp > x; rm /repo/a"),
    ("a && { cd /x; }; rm y", "a && { cd /x; }; rm /x/y"),
    ("cd /x & rm a", "cd /x & rm /x/a"),
    ("cd /x || rm y", "cd /x || rm /x/y"),
    ("test -d b || cd /x && rm y", "test -d b || cd /x && rm /x/y"),
    ("f() { cd /tmp; }; cd /repo; f; rm x", "f() { cd /tmp; }; cd /repo; f; rm /repo/x"),
    ("alias cd=:; cd /x; rm y", "alias cd=:; cd /x; rm /x/y"),
    ("f() { rm x; }; cd /tmp; f", "f() { rm /repo/x; }; cd /tmp; f"),
    ("for i in 1 2; do rm x; cd sub; done", "for i in 1 2; do rm /repo/x; cd sub; done"),
    ("while rm x; do cd sub; done", "while rm /repo/x; do cd sub; done"),
    ("if cd /x; then ls; else rm a; fi", "if cd /x; then ls; else rm /x/a; fi"),
    ("if cd /x; then ls; elif rm a; then ls; fi", "if cd /x; then ls; elif rm /x/a; then ls; fi"),
    ("cat <<EOF && cd /tmp\nhi\nEOF\nrm y", "cat <<EOF && cd /tmp\nhi\nEOF\nrm /repo/y"),
    ("git -C /x add a", "git -C /x add /repo/a"),
    ("ls && cd /repo > out", "ls > out"),
    ("ls; cd /repo & pwd", "ls & pwd"),
    ("f() { ls 2>&1; }; f > x", "f() { ls; }; f > x"),
    ("rm {a,b}", 'rm {a","b}'),
    ("rm {a,b}", "rm {a\\,b}"),
    ("rm [a-z]", 'rm [a"-"z]'),
    ("ls ~root", 'ls ~"root"'),
    ("PATH=a:~/b ls", "PATH=a:'~'/b ls"),
    ("pytest 't.py::t[a//b]'", "pytest 't.py::t[a/b]'"),
    ("cat a\r\nrm b", "cat a\nrm b"),
    ("cat <<EOF > f\n$x\nEOF", "cat <<'EOF' > f\n$x\nEOF"),
    ("cat <<EOF > f\na \nEOF", "cat <<EOF > f\na\nEOF"),
]


@pytest.mark.parametrize(("one", "other"), IN_REPO)
def test_a_step_that_goes_elsewhere_by_other_means_and_quotes_inside_a_pattern_count(one: str, other: str) -> None:
    assert not same(one, other, "/repo")


@pytest.mark.parametrize("text", ["cd /repo &", "{ cd /repo & }", "ls; cd /repo &"])
def test_a_step_in_the_background_is_read(text: str) -> None:
    assert Script.of(text, "/repo").parsed


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cat > f <<EOF\nx\nEOF", "cat <<EOF > f\nx\nEOF"),
        ("cat <<'EOF'\n$x\nEOF", 'cat <<"END"\n$x\nEND'),
    ],
)
def test_a_document_is_its_text_and_whether_it_is_expanded(one: str, other: str) -> None:
    assert same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "cat >> a.py <<'EOF'\n    def f(self):\n        return 1\nEOF",
            "cat >> a.py <<'EOF'\ndef f(self):\n        return 1\nEOF",
        ),
        ("cat > a <<EOF\n\n\na\nEOF", "cat > a <<EOF\na\nEOF"),
        ("cat > a <<EOF\n\n\nEOF", "cat > a <<EOF\nEOF"),
        ("python - <<EOF\n  print(1)\nEOF", "python - <<EOF\nprint(1)\nEOF"),
        ("cat <<EOF > a\n  $x\nEOF", "cat <<EOF > a\n$x\nEOF"),
        ("cat <<-EOF\n  a\n\tEOF", "cat <<-EOF\na\n\tEOF"),
        ("cat <<EOF\na\n  EOF\nEOF\nls -a -l", "cat <<EOF\na\n  EOF\nEOF\nls -la"),  # the first end is none
        ("cat <<EOF | wc\na\n  EOF\nls -a -l\nEOF", "cat <<EOF | wc\na\n  EOF\nls -la\nEOF"),
        ("cat <<-EOF\na\n  EOF\nEOF\nls -a -l", "cat <<-EOF\na\n  EOF\nEOF\nls -la"),
    ],
)
def test_white_space_at_the_beginning_of_a_document_counts(one: str, other: str) -> None:
    assert not same(one, other)


def test_a_document_behind_letters_of_several_bytes_is_read_to_its_end() -> None:
    assert Script.of("echo é; cat <<'EOF' > ü\n  é\nEOF\nls -a -l").parsed
    assert same("echo é; cat <<'EOF' > ü\n  é\nEOF\nls -a -l", "echo é; cat <<'EOF' > ü\n  é\nEOF\nls -la")


@pytest.mark.parametrize(
    "text",
    [
        "ls && echo x > y",
        "{ ls; } > f",
        "for i in a; do echo $i; done > f",
        "cat <<EOF | bash\nsed -i s/a/b/ f\nEOF",
        "cat <<< $(sed -i x f)",
        "echo ${x:=$(sed -i x f)}",
        "cat <> f",
        "tree -o f",
        "rg --pre 'sed -i' x",
        "export PATH=/x",
    ],
)
def test_what_writes_a_file_or_runs_another_command_does_not_only_read(text: str) -> None:
    assert not Script.of(text).only_reads


def test_a_long_script_is_compared_as_text_and_what_was_read_of_it_is_not_kept() -> None:
    long = "<" * 21_000  # a damaged script takes the parser quadratic time: 24 s for 99,000 characters
    assert not Script.of(long).parsed
    assert same(long, long) and not same(long, long + "<")
    before = _remembered.cache_info().currsize
    assert Script.of("echo " + "a" * 5_000).parsed
    assert _remembered.cache_info().currsize == before


@pytest.mark.parametrize("option", ["--include", "--exclude-dir"])
def test_braces_that_make_several_words_are_not_quoted_ones(option: str) -> None:
    assert not same(f"grep -rn foo {option}=*.{{js,ts}} .", f"grep -rn foo {option}='*.{{js,ts}}' .")
    assert same(f"grep -rn foo {option}=*.py .", f"grep -rn foo {option}='*.py' .")
