"""A wave is in the log whole or not at all; a log belongs to one run and one process."""

import pytest

from turntree.core.errors import InputError
from turntree.run.wave_log import open_log

IDENTITY = {"config": {"seed": 0, "profile": {"rollouts": 16}}, "policy": "abc"}


def fill(path, waves):
    with open_log(path, IDENTITY) as log:
        for wave in waves:
            log.append(wave)


def test_waves_are_read_back_in_order_and_more_can_be_added(tmp_path):
    path = tmp_path / "p.waves"
    fill(path, [{"n": 0}, {"n": 1, "text": "\u2028 \ud800 ü"}])
    with open_log(path, IDENTITY) as log:
        assert log.finished == 2
        log.append({"n": 2})
        assert [wave["n"] for wave in log] == [0, 1, 2]
        assert [wave.get("text") for wave in log][1] == "\u2028 \ud800 ü"


def test_two_halves_of_a_character_side_by_side_are_no_damage(tmp_path):
    """Two tokens may each have sampled one half; what is read is the character."""
    path = tmp_path / "p.waves"
    fill(path, [{"text": "\ud83d\ude00"}, {"n": 1}])
    with open_log(path, IDENTITY) as log:
        assert list(log) == [{"text": "\U0001f600"}, {"n": 1}]


def test_a_wave_that_could_not_be_read_again_is_refused_when_it_is_written(tmp_path):
    path = tmp_path / "p.waves"
    with open_log(path, IDENTITY) as log:
        log.append({"n": 0})
        with pytest.raises(ValueError, match="JSON compliant"):
            log.append({"n": float("nan")})
        assert list(log) == [{"n": 0}]


def test_every_cut_leaves_only_whole_waves(tmp_path):
    path = tmp_path / "p.waves"
    fill(path, [{"n": n} for n in range(3)])
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        with open_log(path, IDENTITY) as log:
            assert log.finished == max(0, whole[:size].count(b"\n") - 1)
            log.append({"n": "next"})
            assert [wave["n"] for wave in log] == [*range(log.finished - 1), "next"]


def test_another_run_is_refused_and_what_differs_is_named(tmp_path):
    path = tmp_path / "p.waves"
    fill(path, [{"n": 0}])
    other = {"config": {"seed": 0, "profile": {"rollouts": 8}}, "policy": "abc"}
    expected = r"differs in profile\.rollouts \(16, not 8\); .*--overwrite"
    with pytest.raises(InputError, match=expected) as caught, open_log(path, other):
        pass
    assert "\n" not in str(caught.value)
    with open_log(path, other, overwrite=True) as log:
        assert (log.finished, list(log)) == (0, [])


def test_two_processes_do_not_share_a_log(tmp_path):
    path = tmp_path / "p.waves"
    with (
        open_log(path, IDENTITY),
        pytest.raises(InputError, match="in use by another process"),
        open_log(path, IDENTITY),
    ):
        pass
    fill(path, [{"n": 0}])


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "p.waves"
    fill(path, [{"n": 0}])
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    with pytest.raises(InputError, match=r"p\.waves:3: is not complete JSON"), open_log(path, IDENTITY):
        pass


@pytest.mark.parametrize("kind", ["lost", "changed", "moved", "twice", "binary"])
def test_a_wave_that_is_not_where_it_was_written_is_noticed(tmp_path, kind):
    path = tmp_path / "p.waves"
    fill(path, [{"n": n} for n in range(3)])
    head, *waves = path.read_bytes().splitlines(keepends=True)
    damaged = {
        "lost": [waves[0], waves[2]],
        "changed": [waves[0], waves[1].replace(b'"n": 1', b'"n": 5'), waves[2]],
        "moved": [waves[1], waves[0], waves[2]],
        "twice": [waves[0], waves[0], waves[1], waves[2]],
        "binary": [waves[0], b"\xff\xfe\n", waves[2]],
    }[kind]
    path.write_bytes(head + b"".join(damaged))
    with pytest.raises(InputError, match=r"p\.waves:[23]: is .*pass --overwrite"), open_log(path, IDENTITY):
        pass
