"""Checkpoints hold everything that a next step depends on, whole or not at all."""

import itertools
import json
import random
import shutil

import pytest
import torch
from killed_runs import killed_at
from safetensors import SafetensorError

from tiny_models import tiny_model
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.run.folder import RunDirectory
from turntree.train.checkpoints import CheckpointConfig, Checkpoints, resume
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.trainer import Trainer, Trainers

TENSORS = "shard-00001-model-00001-of-00001.safetensors"  # what one rank writes
SETTINGS = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="cosine", weight_decay=0.1)


def trained(steps, *, seed=0):
    """A model and its optimizer after so many steps; the gradients depend on the weights and the step."""
    model = tiny_model(vocab_size=40, layers=1, seed=seed).requires_grad_(True)
    optimizer = Optimizer(model.parameters(), SETTINGS, 10)
    go_on(model, optimizer, steps)
    return model, optimizer


def held(model, optimizer):
    """As a run holds them, on one rank."""
    return Trainers(Trainer(model, None, optimizer))


def go_on(model, optimizer, steps):
    for _ in range(steps):
        ids = torch.tensor([[optimizer.steps + 1, 3, 5, 7]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def assert_equal(one, two):
    for (name, ours), (_, theirs) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("kind", ["all parameters", "some frozen"])
def test_a_restored_run_takes_the_same_steps_bit_for_bit(tmp_path, kind) -> None:
    def start():
        model = tiny_model(vocab_size=40, layers=1)
        if kind == "some frozen":
            model.get_input_embeddings().requires_grad_(False)
        return model, Optimizer(model.parameters(), SETTINGS, 10)

    model, optimizer = start()
    go_on(model, optimizer, 4)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(4, held(model, optimizer), {"place": [1, 2]})
    go_on(model, optimizer, 5)
    again, its_optimizer = start()
    assert checkpoints.restore(held(again, its_optimizer)) == {"step": 4, "place": [1, 2]}
    go_on(again, its_optimizer, 5)
    assert_equal(model, again)


def test_what_is_saved_is_not_what_comes_after(tmp_path) -> None:
    model, optimizer = trained(2)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(2, held(model, optimizer), {})
    go_on(model, optimizer, 3)
    again, its_optimizer = trained(0, seed=1)
    checkpoints.restore(held(again, its_optimizer))
    assert_equal(again, trained(2)[0])
    assert its_optimizer.steps == 2


def newest(checkpoints: Checkpoints) -> int:
    found = checkpoints.held()
    assert found is not None
    return found["state"]["step"]


def test_the_newest_few_are_kept_and_the_newest_is_restored(tmp_path) -> None:
    with pytest.raises(ConfigError):  # each save would remove itself
        CheckpointConfig(keep=-1)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep=2))
    assert checkpoints.restore(held(*trained(0))) is None
    for step in (9, 10, 11):  # names sort as numbers do
        checkpoints.save(step, held(*trained(1)), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]
    assert newest(checkpoints) == 11


def test_a_folder_half_written_is_no_checkpoint(tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, held(*trained(1)), {})
    for leftover in (".step-00000002.partial", ".step-00000005.partial"):
        (tmp_path / leftover).mkdir()
    assert newest(checkpoints) == 1
    checkpoints.save(2, held(*trained(1)), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def save_next(folder):
    """Go on from the newest checkpoint by one step, and save that."""
    model, optimizer = trained(0)
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=1))
    state = checkpoints.restore(held(model, optimizer)) or {"step": 0}
    go_on(model, optimizer, 1)
    checkpoints.save(state["step"] + 1, held(model, optimizer), {})


def test_a_process_killed_before_any_file_operation_of_a_save_leaves_a_whole_checkpoint(tmp_path) -> None:
    """The one before or the one that was being saved, and the next save goes through."""
    after = {step: trained(step)[0] for step in (1, 2, 3)}
    save_next(tmp_path / "before")
    found = []
    for operation in itertools.count(1):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(operation))
        killed = killed_at(operation, save_next, folder)
        model, optimizer = trained(0)
        found.append(Checkpoints(folder, CheckpointConfig()).restore(held(model, optimizer))["step"])
        assert_equal(model, after[found[-1]])
        save_next(folder)
        Checkpoints(folder, CheckpointConfig()).restore(held(model, optimizer))
        assert_equal(model, after[found[-1] + 1])
        if not killed:
            break
    assert found == sorted(found) and set(found) == {1, 2} and len(found) > 10


def test_there_is_no_pickle(tmp_path) -> None:
    Checkpoints(tmp_path, CheckpointConfig()).save(1, held(*trained(1)), {})
    names = {path.name for path in (tmp_path / "step-00000001").iterdir()}
    assert names == {TENSORS, "state.json"}


def test_a_damaged_file_is_one_line_that_says_how_to_go_on(tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, held(*trained(1)), {})
    weights = tmp_path / "step-00000001" / TENSORS
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match=f"{TENSORS}: is damaged.* delete its folder"):
        checkpoints.restore(held(*trained(0)))
    weights.unlink()
    with pytest.raises(InputError, match=f"{TENSORS}: is missing.* delete its folder"):
        checkpoints.restore(held(*trained(0)))


@pytest.mark.parametrize("name", [TENSORS, "state.json"])
def test_no_flipped_bit_resumes_to_another_result(tmp_path, name) -> None:
    """In the weights, the moments or what the loop remembers: refused, whichever bit it is."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(3, held(*trained(3)), {"place": [1, 2], "cost": {"turns": 7}})
    path = tmp_path / "step-00000003" / name
    whole, draw = path.read_bytes(), random.Random(name)
    for _ in range(60):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        if name == "state.json" and same_json(data, whole):
            continue  # white space
        with pytest.raises(InputError, match=f"{name}: .* delete its folder"):
            checkpoints.restore(held(*trained(0)))
    path.write_bytes(whole)
    assert checkpoints.restore(held(*trained(0))) == {"step": 3, "place": [1, 2], "cost": {"turns": 7}}


def same_json(one, two):
    try:
        return json.loads(bytes(one)) == json.loads(two)
    except ValueError:
        return False


@pytest.mark.parametrize("text", ["{}", "[]", "null", "7", "", "nonsense", "[" * 100_000, '{"schema": "x"}'])
def test_a_state_that_is_none_is_one_line(tmp_path, text) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, held(*trained(1)), {})
    (tmp_path / "step-00000001" / "state.json").write_text(text)
    with pytest.raises(InputError, match=r"state\.json: is (not the state of|damaged).*; delete its folder"):
        checkpoints.restore(held(*trained(0)))


def test_another_runs_checkpoint_is_refused_wherever_it_lies(tmp_path) -> None:
    """As where it is copied here, or where the config.json beside it was replaced."""
    runs = {seed: RunDirectory(tmp_path / str(seed)) for seed in (0, 1)}
    for seed, run in runs.items():
        run.path.mkdir()
        run.begin({"stage": "sft", "config": {"seed": seed, "checkpoints": {"every": seed}}}, overwrite=False)
        Checkpoints(run.checkpoints, CheckpointConfig(), run).save(1, held(*trained(1)), {})
    shutil.copytree(runs[0].checkpoints, runs[1].checkpoints, dirs_exist_ok=True)
    for use in (lambda c: c.restore(held(*trained(0))), lambda c: resume(runs[1], CheckpointConfig())):
        with pytest.raises(InputError, match=r"step-00000001: is of another run, which differs in seed \(0, not 1\)"):
            use(Checkpoints(runs[1].checkpoints, CheckpointConfig(), runs[1]))


def test_a_run_goes_on_after_its_checkpoint_with_the_logs_as_they_were_then(tmp_path, capsys) -> None:
    """What a killed process logged after its checkpoint, or before its first, is logged again."""
    run = RunDirectory(tmp_path / "run", ("metrics.jsonl", "found.jsonl"))
    run.path.mkdir()
    run.begin({"stage": "sft", "config": {}}, overwrite=False)
    run.log({"step": 1})
    checkpoints, done = resume(run, CheckpointConfig(every=2, every_seconds=0))
    assert (done, (run.path / "metrics.jsonl").exists()) == (0, False)
    assert [step for step in range(1, 5) if checkpoints.due(step)] == [2, 4], "as the configuration says"
    for step in (1, 2):
        run.log({"step": step})
    checkpoints.save(2, held(*trained(1)), {})
    run.log({"step": 3})
    run.append("found.jsonl", [{"step": 3}])
    assert capsys.readouterr().err == ""
    again, done = resume(run, CheckpointConfig(every=3, every_seconds=0))
    assert (done, newest(again)) == (2, 2)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    assert not (run.path / "found.jsonl").exists()
    assert [step for step in range(1, 5) if again.due(step)] == [3]
    assert "run resumes after step 2" in capsys.readouterr().err


def test_a_checkpoint_is_due_by_steps_and_by_time(tmp_path) -> None:
    """So that a run of seven slow steps, killed in its last, does not begin anew."""
    now = 0.0
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=10, every_seconds=300), clock=lambda: now)
    saved = []
    for step in range(1, 21):
        now += 120.0 if step < 8 else 1.0
        if checkpoints.due(step):
            checkpoints.save(step, held(*trained(1)), {})
            saved.append(step)
    assert saved == [3, 6, 10, 20]
    often = Checkpoints(tmp_path, CheckpointConfig(every=0, every_seconds=0.5), clock=lambda: now)
    assert not often.due(1)
    now += 0.5
    assert often.due(1), "from when on the last is so old"


def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_checkpoint(tmp_path, monkeypatch) -> None:
    def full(tensors, **rest):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, held(*trained(1)), {})
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save", full)
        with pytest.raises(TurntreeError, match=f"{tmp_path}: cannot be written, because the disk"):
            checkpoints.save(2, held(*trained(2)), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoints.restore(held(*trained(0))) == {"step": 1}


def test_another_models_checkpoint_is_refused(tmp_path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    checkpoints.save(1, held(*trained(1)), {})
    other = tiny_model(vocab_size=41, layers=1)
    with pytest.raises(InputError, match="another model"):
        checkpoints.restore(held(other, Optimizer(other.parameters(), SETTINGS, 10)))


def test_no_checkpoint_is_due_where_none_is_wanted() -> None:
    assert [step for step in range(1, 7) if Checkpoints(None, CheckpointConfig(every=3)).due(step)] == [3, 6]
    assert all(Checkpoints(None, CheckpointConfig(every=1, every_seconds=0)).due(step) for step in range(1, 7))
    assert not any(Checkpoints(None, CheckpointConfig(every=0, every_seconds=0)).due(step) for step in range(1, 7))
    for wrong in ({"every": -1},):
        with pytest.raises(ConfigError):
            CheckpointConfig(**wrong)
