"""Training on a server of Tinker's API is training here: the same step, once, whatever the connection loses."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_trees import sampled_near, scored_trees
from safetensors.torch import save_file

import turntree as tt
from completions_server import serve
from fake_tinker import BASE, FakeTinker, SamplingClient
from scripted_tinker import done, installed
from tiny_models import tiny_model
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.core.labels import Credit
from turntree.core.tree import RolloutTree
from turntree.credit.config import CreditConfig
from turntree.engine.limits import Prices, TinkerConfig
from turntree.engine.tinker import TinkerAdapter, TinkerSession, _once_only
from turntree.stages.carriers import most
from turntree.stages.config import (
    Device,
    EpisodesCheckConfig,
    EvaluateConfig,
    SFTCheckConfig,
    SFTStageConfig,
    TrainOnlineConfig,
    TrainPivotConfig,
)
from turntree.stages.demonstrate import demonstrate
from turntree.stages.evaluate import evaluate
from turntree.stages.policy import load_policy
from turntree.stages.sft import run_sft
from turntree.stages.tinker import adapted
from turntree.stages.train_online import run_train_online
from turntree.train.config import (
    CheckpointConfig,
    LoRAConfig,
    OnlineConfig,
    OptimizerConfig,
    ReinforcedConfig,
    SFTConfig,
)
from turntree.train.loop import Trainee
from turntree.train.lora import add_adapter
from turntree.train.loss_config import LossConfig
from turntree.train.tinker import TinkerTrainee

VOCABULARY = 24
MODEL = tiny_model(vocab_size=VOCABULARY, layers=1)
RANK = 4
ADAM = OptimizerConfig(learning_rate=3e-3, max_grad_norm=0.01)


class Still:
    """An engine that samples nothing."""

    policy_version = 0
    model: Any = None

    def update_weights(self, model: Any, policy_version: int) -> None:
        self.policy_version = policy_version

    def clear_cache(self) -> None: ...


def batch(seed: int, loss: LossConfig, **credit: str) -> tuple[list[RolloutTree], list[Credit]]:
    """Trees of a policy near the model; with action ratios of the model, because there is no clip of whole turns."""
    draw = random.Random(seed)
    trees, rewards = scored_trees(draw)
    trees = [sampled_near(MODEL, tree, draw, 0.0 if loss.ratio == "action" else 0.1) for tree in trees]
    rule = loss.estimator(CreditConfig(**credit))
    return trees, [rule(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]


def there(server: FakeTinker, config: ReinforcedConfig, steps: int = 3) -> Any:
    """A learner on the server, and its engine."""
    session = TinkerSession(TinkerConfig(), [BASE])
    adapter: Any = TinkerAdapter(session, RANK)
    trainee = TinkerTrainee(adapter, Still(), None, reference=session.sampler())  # type: ignore[arg-type]
    return trainee.learner(config, steps * config.updates)


def here(config: ReinforcedConfig, steps: int = 3) -> Any:
    model = copy.deepcopy(MODEL)
    add_adapter(model, LoRAConfig(rank=RANK, alpha=32))
    trainee = Trainee(model, Still(), None)  # type: ignore[arg-type]
    return trainee.learner(config, steps * config.updates)


def scores(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 20)[None]).logits.log_softmax(-1)


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize(
    ("loss", "updates", "attribution"),
    [
        (LossConfig(kl_coefficient=0.0), 1, "soft"),
        (LossConfig(kl_coefficient=0.0, clip_high=0.05, clip_low=0.04), 3, "soft"),
        (LossConfig(kl_coefficient=0.0, ratio="action"), 1, "hard"),
        (LossConfig(kl_coefficient=0.0, normalizer="rollouts"), 1, "hard"),
    ],
)
def test_a_step_there_is_the_step_here(averages: bool, loss: LossConfig, updates: int, attribution: str) -> None:
    """From one adapter, with the optimizer's rates, its clip (where the server has one) and the sampler's
    log-probabilities as the old policy's."""
    adam = replace(ADAM, max_grad_norm=math.inf) if averages else ADAM
    config = ReinforcedConfig(loss=replace(loss, old_logprobs="engine"), updates=updates, optimizer=adam)
    trees, credits = batch(5, config.loss, attribution=attribution)
    with installed(FakeTinker(MODEL, averages=averages)) as server:
        found = there(server, config)
        told, cost = found.learn(trees, credits)
        moved = scores(server.clients[-1].adapter.model)
    local = here(config)
    ours, _ = local.learn(trees, credits)
    assert float((moved - scores(MODEL)).abs().max()) > 0.01
    assert float((moved - scores(local.model)).abs().max()) < 2e-4
    assert told["ratio_mean"] == pytest.approx(ours["ratio_mean"], abs=1e-4) or loss.ratio == "action"
    assert told["clip_fraction"] == pytest.approx(ours["clip_fraction"], abs=1e-4) or loss.ratio == "action"
    sent = sum(len(datum.model_input.tokens) for name, (data, *_) in server.carried_out[-2:-1] for datum in data)
    assert cost.trained_tokens == updates * sent == updates * sum(len(row) - 1 for row in tt.rows(trees, credits))


def test_minibatches_there_are_minibatches_here() -> None:
    """A step on every group, each with its own normaliser and the old policy of the batch, in two rounds."""
    loss = LossConfig(kl_coefficient=0.0, old_logprobs="engine")
    config = ReinforcedConfig(loss=loss, updates=2, minibatch=1, optimizer=ADAM)
    trees, credits = batch(5, loss)
    with installed(FakeTinker(MODEL)) as server:
        told, cost = there(server, config).learn(trees, credits)
        moved, steps = scores(server.clients[-1].adapter.model), server.steps
    local = here(config)
    ours, _ = local.learn(trees, credits)
    assert steps == 2 * sum(bool(credit.nodes) for credit in credits) == 2 * told["trained_groups"] > 2
    assert float((moved - scores(local.model)).abs().max()) < 2e-4
    assert cost.trained_tokens == 2 * sum(len(row) - 1 for row in tt.rows(trees, credits))
    assert told["ratio_mean"] == pytest.approx(ours["ratio_mean"], abs=1e-4)
    assert "difference" not in told


@pytest.mark.parametrize(("kind", "first"), [("k2", True), ("k3", True), ("k3", False)])
def test_the_kl_term_pulls_as_here(kind: Any, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, when policy and base differ. SkyRL leaves out the first token, which has no score."""
    if not first:
        scored = SamplingClient.compute_logprobs
        monkeypatch.setattr(SamplingClient, "compute_logprobs", lambda *given: done(scored(*given).result()[1:]))
    loss = LossConfig(kl_coefficient=0.5, kl=kind, old_logprobs="engine")
    config = ReinforcedConfig(loss=loss, optimizer=ADAM)
    trees, credits = batch(7, loss)
    local = here(config)
    with installed(FakeTinker(MODEL)) as server:
        found = there(server, config)
        for _ in range(2):
            told, _ = found.learn(*_resampled(server.clients[-1].adapter.model, trees, credits))
            local.learn(*_resampled(local.model, trees, credits))
            moved = scores(server.clients[-1].adapter.model)
            assert float((moved - scores(local.model)).abs().max()) < 2e-4
    assert abs(told["kl"]) > 1e-3


def test_in_several_updates_the_clip_leaves_the_pull_alone() -> None:
    config = ReinforcedConfig(loss=LossConfig(kl_coefficient=0.5), updates=2, optimizer=ADAM)
    with installed(FakeTinker(MODEL)) as server:
        there(server, config).learn(*batch(7, config.loss))
    passes = [asked for name, asked in server.carried_out if name == "forward_backward"]
    assert [loss for _, loss, _ in passes[-4:]] == ["ppo", "importance_sampling"] * 2
    assert len(passes[-1][0]) == len(passes[-2][0])


def _resampled(model: Any, trees: list[RolloutTree], credits: Any) -> tuple[list[RolloutTree], Any]:
    """The same tokens with the log-probabilities of this policy."""
    return [sampled_near(model, tree, random.Random(0), 0.0) for tree in trees], credits


def test_rows_sent_are_the_rows_made() -> None:
    config = ReinforcedConfig(loss=LossConfig(kl_coefficient=0.0), optimizer=ADAM)
    trees, credits = batch(3, config.loss)
    with installed(FakeTinker(MODEL)) as server:
        there(server, config).learn(trees, credits)
    (data, loss, clip), made = server.carried_out[-2][1], tt.rows(trees, credits)
    divisor = sum(map(math.fsum, (row.multiplicities for row in made)))
    assert loss == "ppo" and clip == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    for datum, row in zip(data, made, strict=True):
        assert (*datum.model_input.tokens, row.tokens[-1]) == row.tokens
        inputs = {name: value.data for name, value in datum.loss_fn_inputs.items()}
        assert inputs["target_tokens"] == list(row.tokens[1:])
        assert inputs["logprobs"] == pytest.approx(row.logprobs[1:])
        assert inputs["advantages"] == pytest.approx([a / divisor for a in row.advantages[1:]])


# what a server or a connection loses


ONLINE = TrainOnlineConfig(
    count=3,
    check=EpisodesCheckConfig(tasks=1),
    train=OnlineConfig(
        iterations=3,
        groups=2,
        updates=2,
        check_every=2,
        group_size=3,
        max_turns=3,
        sampling=Sampling(max_tokens=12),
        loss=LossConfig(kl_coefficient=0.05),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
    ),
    checkpoints=CheckpointConfig(every=1),
    device=Device(carrier=Part("tinker", {"prices": {"prefill": 1.0, "sample": 2.0, "train": 3.0}})),
)


@pytest.fixture(scope="module")
def household() -> Any:
    return load_policy("household", Device()).model


def without_clock(path: Path) -> list[Any]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "timing"} for row in rows]


def weights_of(server: FakeTinker) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in server.clients[-1].adapter.parameters.items()}


@pytest.fixture(scope="module")
def calm(household: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("calm") / "run"
    with installed(FakeTinker(household, ["default", "household"])) as server:
        run_train_online(ONLINE, out)
        assert server.steps == 6
        return out, weights_of(server)


def test_the_bill_is_that_of_the_tokens(calm: tuple[Path, Any]) -> None:
    told = json.loads((calm[0] / "cost.json").read_text())
    both = [told, told["checks"]]
    bill = Prices(prefill=1.0, sample=2.0, train=3.0).bill(
        sum((Cost(**{k: v for k, v in each.items() if k.endswith("_tokens")}) for each in both), Cost())
    )
    assert told["bill"] == pytest.approx(bill) and bill["train"] > 0


@pytest.mark.parametrize(("which", "number"), [("answer", 0), ("request", 3), ("answer", 8)])
def test_no_step_is_taken_twice_or_lost_where_a_connection_breaks(
    calm: tuple[Path, Any], household: Any, tmp_path: Path, which: str, number: int
) -> None:
    """The request is lost before it is carried out, or its answer after: the run ends, and the same command takes it up
    from the last checkpoint. Everything comes out as if nothing had been."""
    count = iter(range(1000))

    def lose(name: str) -> str | None:
        return which if next(count) == number + 6 else None  # after those that measure the server

    with installed(FakeTinker(household, ["default", "household"], lose=lose)) as server:
        with pytest.raises(TurntreeError, match=r"is not known .*give the same command again"):
            run_train_online(ONLINE, tmp_path / "run")
        broken = server.clients[-1]
        run_train_online(ONLINE, tmp_path / "run")
        assert server.clients[-1] is not broken and server.steps == 6
        found = weights_of(server)
    assert all(torch.equal(value, calm[1][name]) for name, value in found.items())
    for name in ("metrics.jsonl", "rollouts.jsonl", "held_out.jsonl"):
        assert without_clock(tmp_path / "run" / name) == without_clock(calm[0] / name)


def test_what_was_trained_is_sampled_and_trained_on(calm: tuple[Path, Any], household: Any, tmp_path: Path) -> None:
    out = calm[0] / "model"
    assert json.loads((out / "tinker.json").read_text())["rank"] == 16
    playing = EvaluateConfig(
        model=str(out), environment=Part("household"), count=2, max_turns=3, max_tokens=12, device=ONLINE.device
    )
    with installed(FakeTinker(household, ["default", "household"])) as server:
        with pytest.raises(InputError, match="not found"):
            run_train_online(replace(ONLINE, model=str(out)), tmp_path / "other")
        run_train_online(ONLINE, tmp_path / "run")
        again = str(tmp_path / "run" / "model")
        played = evaluate(replace(playing, model=again))["sampled"]
        assert played["censored"] == 0
        server.restarted = True  # SkyRL has the weights of its samplers no more, but those of training
        assert evaluate(replace(playing, model=again))["sampled"] == played
        run_train_online(replace(ONLINE, model=again), tmp_path / "more")
        assert server.steps == 6


def test_sft_there_is_sft_here(household: Any, tmp_path: Path) -> None:
    demonstrate(Part("household", {"count": 6}), tmp_path / "traces.jsonl")
    config = SFTStageConfig(
        traces=str(tmp_path / "traces.jsonl"),
        sft=SFTConfig(epochs=1, batch=2, optimizer=OptimizerConfig(learning_rate=1e-3, max_grad_norm=math.inf)),
        check=SFTCheckConfig(tasks=0),
        device=Device(lora=LoRAConfig(rank=RANK, alpha=32)),
    )
    ours = run_sft(config, tmp_path / "here")
    for averages in (False, True):
        with installed(FakeTinker(household, ["default"], averages=averages)):
            device = replace(config.device, carrier=Part("tinker"))
            found = run_sft(replace(config, device=device), tmp_path / f"there {averages}")
        assert found["steps"] == ours["steps"] and found["loss"] == pytest.approx(ours["loss"], abs=1e-4)


# a request that changes the adapter is sent once


@pytest.mark.parametrize("path", ["forward_backward", "optim_step"])
@pytest.mark.parametrize("loses", [True, False])
def test_a_request_that_changes_the_adapter_reaches_the_server_once(path: str, loses: bool) -> None:
    """Whatever the SDK repeats: it sends the same body again where an answer was lost."""
    import httpx

    def answer(body: dict[str, Any]) -> Any:
        return _hang_up if loses and "seq_id" in body else {"request_id": "1"}

    async def send(url: str) -> list[Any]:
        found: list[Any] = []
        async with _once_only() as client:
            for name, body in [*((path, {"seq_id": number}) for number in (1, 1, 2)), *[("asample", {})] * 2]:
                try:
                    found.append((await client.post(f"{url}/{name}", json=body)).status_code)
                except httpx.TransportError as error:
                    found.append(type(error).__name__)
        return found

    with serve(answer) as server:
        answers = asyncio.run(send(server.url))
    lost = "RemoteProtocolError"
    assert answers == ([lost, 422, lost] if loses else [200, 422, 200]) + [200, 200]
    heard = [(asked["path"].rpartition("/")[2], asked.get("seq_id")) for asked in server.asked]
    assert heard == [(path, 1), (path, 2), ("asample", None), ("asample", None)]


def _hang_up(handler: Any) -> None:
    handler.close_connection = True
    handler.connection.shutdown(2)


def test_the_modules_of_a_fetched_adapter_are_those_of_its_weights(tmp_path: Path) -> None:
    """SkyRL's config names none, and PEFT would drop all but q and v."""
    layer = "base_model.model.model.layers.0"
    names = [f"{layer}.{module}.lora_{end}.weight" for module in ("self_attn.q_proj", "mlp.up_proj") for end in "AB"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "adapter_model.safetensors")
    assert adapted(tmp_path / "adapter_model.safetensors") == ["q_proj", "up_proj"]


# without torch


ALONE = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        lacking = name.partition(".")[0] in ("torch", "peft", "accelerate")
        return None if lacking else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
sys.path.insert(0, sys.argv[1])
from scripted_tinker import ScriptedTinker, installed
from turntree.cli.main import main

with installed(ScriptedTinker(["household"], 64)) as server:
    for words in sys.argv[2].split(";"):
        try:
            main(words.split())
        except SystemExit as ended:
            assert not ended.code, words
print(server.steps, [name for name in ("torch", "peft") if name in sys.modules])
"""


def test_a_machine_without_torch_trains_there(tmp_path: Path) -> None:
    """`--dry-run`, a whole run that gates and takes steps on parts of its batches, and the evaluation of what came of
    it, in an interpreter to which torch is not installed."""
    short = "--set train.max_turns=2 --set train.sampling.max_tokens=6"
    size = "--set train.iterations=2 --set train.groups=2 --set train.minibatch=1 --set train.group_size=3"
    train = f"train online --environment household --carrier tinker --gate divergence --set gate.turn=1 {short} {size}"
    train += f" --set check.tasks=1 --set count=2 --out {tmp_path / 'run'}"
    play = f"evaluate --environment household --carrier tinker --model {tmp_path / 'run' / 'model'} --set count=1"
    play += " --set max_turns=2 --set max_tokens=6"
    tests = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", ALONE, tests, f"{train} --dry-run;{train};{play}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps, loaded = done.stdout.splitlines()[-1].split(maxsplit=1)
    assert loaded == "[]" and 0 < int(steps) <= 4
    assert json.loads((tmp_path / "run" / "model" / "tinker.json").read_text())["base_model"] == "household"


# what is refused before anything is sampled


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampling": Sampling(temperature=0.7)}, "sampling.temperature"),
        ({"updates": 2, "loss": LossConfig(ratio="action", kl_coefficient=0)}, "loss.ratio"),
        ({"minibatch": 2, "loss": LossConfig(ratio="action", kl_coefficient=0)}, "loss.ratio"),
    ],
)
def test_what_the_api_cannot_train_is_refused(change: dict[str, Any], field: str) -> None:
    config = ReinforcedConfig(**change)
    with installed(FakeTinker(MODEL)):
        adapter: Any = TinkerAdapter(TinkerSession(TinkerConfig(), [BASE]), RANK)
        with pytest.raises(ConfigError) as error:
            TinkerTrainee(adapter, Still(), None).learner(config, 1)  # type: ignore[arg-type]
    assert error.value.field == field


@pytest.mark.parametrize(
    ("device", "field"),
    [
        (Device(carrier=Part("tinker"), lora=LoRAConfig(alpha=16)), "device.lora.alpha"),
        (Device(carrier=Part("tinker"), lora=LoRAConfig(targets=("q_proj",))), "device.lora.targets"),
        (Device(carrier=Part("tinker", {"base_model": "other"})), "model"),
        (Device(carrier=Part("tinker", {"url": "nowhere"})), "device.carrier.url"),
    ],
)
def test_what_a_server_does_not_offer_is_refused(household: Any, device: Device, field: str) -> None:
    with installed(FakeTinker(household, ["default", "household"])), pytest.raises(InputError) as error:
        load_policy("household", device)
    assert error.value.field == field


def test_an_sdk_that_is_missing_or_too_old_is_named() -> None:
    with pytest.raises(InputError) as error:
        TinkerSession(TinkerConfig(), [BASE])
    assert error.value.field == "device.carrier" and "turntree[tinker]" in str(error.value.hint)
    with installed(FakeTinker(MODEL), version="0.9.3"), pytest.raises(ConfigError, match=r"0\.9\.3 is here"):
        TinkerSession(TinkerConfig(), [BASE])


def test_a_server_that_does_not_answer_is_named_at_once() -> None:
    with installed(FakeTinker(MODEL)), pytest.raises(InputError, match="no Tinker server answers"):
        TinkerSession(TinkerConfig(url="http://127.0.0.1:9"), [BASE])


@pytest.mark.parametrize("name", ["dtype", "engine", "attention"])
def test_settings_of_this_process_do_nothing_there(name: str) -> None:
    value: Any = {"dtype": "bfloat16", "engine": Part("vllm"), "attention": "flex_attention"}[name]
    with pytest.raises(ConfigError) as error:
        Device(carrier=Part("tinker"), **{name: value})
    assert error.value.field == f"device.{name}"


@pytest.mark.parametrize("minibatch", [None, 1, 2])
def test_trees_that_nothing_is_learned_from_are_counted_in_mini_batches_of_their_own_too(minibatch: int | None) -> None:
    loss = LossConfig(kl_coefficient=0.0, old_logprobs="engine")
    trees, credits = batch(5, loss)
    nothing = Credit({}, rollout_tokens=0.0, rollouts=0.0, zero_variance=False, censored=4)
    learner = here(ReinforcedConfig(loss=loss, minibatch=minibatch, optimizer=ADAM))
    told, _ = learner.learn([*trees, *trees[:2]], [*credits, nothing, nothing])
    assert (told["trees"], told["untrained_trees"]) == (5, 2)


OWN: Any = {"pivots": "p.jsonl", "states": "mixed", "environment": Part("household"), "teacher": Part("household")}


@pytest.mark.parametrize("minibatch", [None, 1])
def test_a_bill_before_the_run_is_the_most_that_it_can_come_to(minibatch: int | None) -> None:
    train = OnlineConfig(groups=2, group_size=2, iterations=3, loss=LossConfig(kl_coefficient=0.1), minibatch=minibatch)
    plain = most(TrainOnlineConfig(train=train))
    refilled = most(TrainOnlineConfig(train=train, filters=(Part("dapo", {"refill_cap": 2.0}),)))
    rows = 3 * 2 * 2 * train.max_context
    assert plain is not None and plain.trained_tokens == rows * (1 if minibatch is None else 2)
    assert refilled is not None and refilled.decoded_tokens == 3 * plain.decoded_tokens
    assert most(TrainPivotConfig(pivots="p.jsonl")) is not None and most(TrainPivotConfig(**OWN)) is None
