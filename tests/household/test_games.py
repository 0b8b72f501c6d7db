"""Loading official games: the same ones from packed lines and from a download's tree; nothing skipped in silence."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from household_players import games_in, generate_games
from household_text import written
from turntree.core.errors import InputError
from turntree_worlds.household.games import draw_games, playable_games

PLAY_TYPE = "pick_and_place_simple"


def row(seed: int, **changes: Any) -> dict[str, Any]:
    """A game's fields as a packed line holds them."""
    game = next(iter(generate_games(seed, 1, task_types=[PLAY_TYPE])))
    fields = {
        "game": f"train/{PLAY_TYPE}-Mug-None-Desk-{seed}/trial_{seed}",
        "task_type": PLAY_TYPE,
        "solvable": True,
    }
    fields |= {**written(game), "walkthrough": ["look"]}
    return {key: value for key, value in (fields | changes).items() if value is not None}


def packed(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(fields) + "\n" for fields in rows)
    if path.suffix == ".xz":
        with lzma.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")
    return path


def tree(root: Path, rows: list[dict[str, Any]]) -> Path:
    """The same games as `alfworld-download` leaves them."""
    for fields in rows:
        folder = root / "json_2.1.1" / fields["game"]
        folder.mkdir(parents=True)
        kept = {key: value for key, value in fields.items() if key not in {"game", "task_type"}}
        (folder / "game.tw-pddl").write_text(json.dumps(kept), encoding="utf-8")
        (folder / "traj_data.json").write_text(json.dumps({"task_type": fields["task_type"]}), encoding="utf-8")
    return root


def test_packed_lines_plain_or_compressed_and_a_tree_hold_the_same_games(tmp_path: Path) -> None:
    rows = [row(seed) for seed in range(3)]
    (tmp_path / "tree").mkdir()
    sources = [
        packed(tmp_path / "train.jsonl", rows),
        packed(tmp_path / "train.jsonl.xz", rows),
        tree(tmp_path / "tree", rows),
        tmp_path / "tree" / "json_2.1.1" / "train",
    ]
    skipped = Counter[str]()
    read = [[record.game() for record in playable_games(source, skipped)] for source in sources]
    texts = [[(game.id, game.task_type, game.intro) for game in games] for games in read]
    assert len(texts[0]) == 3 and all(text == texts[0] for text in texts)
    assert not skipped


def test_the_path_may_hold_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tree(tmp_path, [row(0)])))
    assert [game.task_type for game in games_in("$ALFWORLD_DATA")] == [PLAY_TYPE]


def test_what_the_official_loader_leaves_out_is_counted_by_reason(tmp_path: Path) -> None:
    rows = [
        row(0),
        row(1, solvable=False),
        row(2, solvable=None),
        row(3, game="train/pick_and_place_with_movable_recep-Mug-Pan-Desk-1/trial_3"),
        row(4, game="train/pick_and_place_simple-AppleSliced-None-Desk-1/trial_4"),
        row(5, task_type="juggle"),
    ]
    reasons = {"unsolvable": 1, "never checked for solvability": 1, "movable or sliced task": 2}
    reasons["unknown task type 'juggle'"] = 1
    lines, files = packed(tmp_path / "all.jsonl", rows), tree(tmp_path / "tree", rows)
    assert len(list(playable_games(lines, skipped := Counter()))) == 1 and skipped == reasons
    (tmp_path / "tree" / "json_2.1.1" / rows[0]["game"] / "game.tw-pddl").unlink()
    assert list(playable_games(files, skipped := Counter())) == []
    assert skipped == reasons | {"no game.tw-pddl": 1}


def of_types(*sizes: int) -> list[dict[str, Any]]:
    """Rows that lie sorted by task type, as those of a download do."""
    names = ("pick_and_place_simple", "look_at_obj_in_light", "pick_clean_then_place_in_recep")
    kinds = [name for name, size in zip(names, sizes, strict=False) for _ in range(size)]
    return [row(n, game=f"train/{kind}-{n:03}/t", task_type=kind) for n, kind in enumerate(kinds)]


def test_some_games_of_a_sorted_file_are_of_all_its_task_types_as_often_as_the_file_has_them(tmp_path: Path) -> None:
    path = packed(tmp_path / "sorted.jsonl", of_types(60, 20, 10))
    draws = [draw_games(path, 30, seed=seed) for seed in range(20)]
    counts = {name: sum(report["types"].get(name, 0) for _, report in draws) / 20 for name in draws[0][1]["types"]}
    assert all(len(games) == report["games"] == 30 and report["kept"] == 90 for games, report in draws)
    assert counts == pytest.approx(
        {"pick_and_place_simple": 20, "look_at_obj_in_light": 20 / 3, "pick_clean_then_place_in_recep": 10 / 3}, abs=1.5
    )
    assert len({tuple(game.id for game in games) for games, _ in draws}) == 20, "every seed draws its own"


def test_draws_of_one_seed_are_parts_of_one_order_whatever_the_order_of_the_file(tmp_path: Path) -> None:
    rows = of_types(12, 6, 3)
    one, other = packed(tmp_path / "a.jsonl", rows), packed(tmp_path / "b.jsonl", rows[::-1])
    whole = [game.id for game in draw_games(one, 21, seed=4)[0]]
    assert [game.id for game in draw_games(other, 21, seed=4)[0]] == whole
    assert [game.id for game in draw_games(one, 5, offset=7, seed=4)[0]] == whole[7:12]
    with pytest.raises(InputError) as caught:
        draw_games(one, 5, offset=17)
    assert caught.value.field == "count"


def test_a_packed_generated_game_is_read_back_with_or_without_its_walkthrough(tmp_path: Path) -> None:
    games = list(generate_games(5, 4, task_types=[PLAY_TYPE]))
    rows = [
        {"game": game.id, "task_type": PLAY_TYPE, **written(game), "walkthrough": ["look"], "solvable": True}
        for game in games
    ]
    del rows[1]["walkthrough"]
    read = games_in(packed(tmp_path / "a.jsonl", rows))
    assert [vars(game) for game in read] == [vars(game.parse()) for game in games], "games are equal by id alone"


def bad_line(tmp_path: Path, text: str) -> Path:
    path = packed(tmp_path / "bad.jsonl", [row(0)])
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"game": "train/x", "pddl_pro', "bad.jsonl:2: is not complete JSON"),
        ("[1, 2]\n", "bad.jsonl:2: is list, not an object"),
        (json.dumps(row(1, grammar=None)), "bad.jsonl:2: field 'grammar': is missing or not text"),
        (
            json.dumps(row(1, pddl_problem="(define)")),
            r"bad.jsonl:2: field 'pddl_problem': game train/.* no \(:",
        ),
    ],
)
def test_an_unreadable_line_is_named_after_the_readable_ones_were_given(tmp_path: Path, text: str, said: str) -> None:
    games = games_in(bad_line(tmp_path, text))
    assert next(games).id == row(0)["game"]
    with pytest.raises(InputError, match=said):
        next(games)


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    path = packed(tmp_path / "cut.jsonl.xz", [row(0)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"cut\.jsonl\.xz:1: the compressed file is damaged"):
        list(games_in(path))


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder; run alfworld-download"):
        list(games_in(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"holds no game\.tw-pddl"):
        list(games_in(tmp_path))
    (tmp_path / "games.zip").touch()
    with pytest.raises(InputError, match="is not a packed file"):
        list(games_in(tmp_path / "games.zip"))


def test_a_broken_game_file_in_a_tree_is_named(tmp_path: Path) -> None:
    file = tree(tmp_path, [row(0)]) / "json_2.1.1" / row(0)["game"] / "game.tw-pddl"
    file.write_text('{"solvable": tr', encoding="utf-8")
    with pytest.raises(InputError, match=r"game\.tw-pddl:1: is not complete JSON"):
        list(games_in(tmp_path))


def test_the_official_splits_have_the_sizes_of_the_paper(shared_data: Path) -> None:
    for split, size in {"valid_seen": 140, "valid_unseen": 134, "valid_train": 200}.items():
        games = list(playable_games(shared_data / "alfworld" / f"{split}.jsonl.xz", skipped := Counter()))
        assert len({game.id for game in games}) == len(games) == size
        assert not skipped


def test_official_games_read_the_same_from_a_tree(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "alfworld" / "valid_unseen.jsonl.xz"
    rows = [{**record.fields} for record in islice(playable_games(source), 5)]
    from_tree = {game.id: game.intro for game in games_in(tree(tmp_path, rows))}
    assert from_tree == {game.id: game.intro for game in islice(games_in(source), 5)}
    shutil.rmtree(tmp_path / "json_2.1.1")


def test_the_engine_loads_without_a_tensor_library() -> None:
    program = (
        "import sys; import turntree_worlds.household.games, turntree_worlds.household.experts;"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.strip() == "[]"
