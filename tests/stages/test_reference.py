"""The policy that the KL term pulls towards: what training starts from, or another one, which then teaches."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Lfm2Config, Lfm2ForCausalLM

from completions_server import completion, serve
from fake_tinker import FakeTinker
from fake_vllm import FakeVllm, running
from scripted_tinker import installed
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.engine.answers import refusal
from turntree.engine.checkpoint import save_model
from turntree.engine.teacher import ServedPolicy, open_teacher
from turntree.env.tasks import open_tasks
from turntree.run.received import client_of
from turntree.stages.config import CheckConfig, Device, EpisodesCheckConfig, OwnPathConfig, TrainPivotConfig
from turntree.stages.plan import asked, read_config
from turntree.stages.policy import Policy, load_policy, resolve
from turntree.stages.train_online import TrainOnlineConfig, run_train_online
from turntree.stages.train_pivot import run_train_pivot
from turntree.train.config import CheckpointConfig, OnlineConfig, OptimizerConfig, PivotConfig
from turntree.train.loss_config import LossConfig
from turntree.train.plan import held, memory

SHORT = Sampling(max_tokens=12)
SHARED: dict[str, Any] = {
    "group_size": 3,
    "sampling": SHORT,
    "loss": LossConfig(kl_coefficient=1.0),
    "optimizer": OptimizerConfig(learning_rate=1e-4),
}
ONLINE = TrainOnlineConfig(
    count=3, check=EpisodesCheckConfig(tasks=0), train=OnlineConfig(iterations=8, groups=2, max_turns=3, **SHARED)
)
PIVOT = TrainPivotConfig(
    states="own",
    environment=Part("household"),
    teacher=Part("household"),
    verifier=Part("household"),
    own=OwnPathConfig(tasks=4, count=4, rollouts=4, max_turns=4),
    check=CheckConfig(tasks=0),
    train=PivotConfig(steps=8, groups=4, **SHARED),
)
STAGES = {"online": (run_train_online, ONLINE), "pivot": (run_train_pivot, PIVOT)}


def of_two_steps(config: Any) -> Any:
    few = {"iterations": 2} if isinstance(config, TrainOnlineConfig) else {"steps": 2}
    return replace(config, train=replace(config.train, **few))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the same tokenizer, not far from the start."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    policy = load_policy("household", Device())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += 0.2 * parameter.std(correction=0) * torch.randn_like(parameter)
    policy.save(folder)
    return folder


def divergence(policy: Policy, other: Policy) -> float:
    """KL(policy || other) in nats a token, where the start of training would speak first in eight games."""
    total, count = 0.0, 0
    with open_tasks(Part("household"), {"train": 8}, seed=0) as opened:
        for number, task in enumerate(opened.of("train")):
            prompt = policy.renderer.prompt(task.reset())
            request = GenerationRequest(prompt_ids=prompt, sampling=SHORT, seed=number)
            said = load_policy("household", Device()).engine.generate([request])[0].token_ids
            tokens = torch.tensor([[*prompt, *said]])
            with torch.no_grad():
                ours, theirs = (
                    each.model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for each in (policy, other)
                )
            total, count = total + float((ours.exp() * (ours - theirs)).sum()), count + len(said)
    return total / count


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def distances(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["kl"] for row in rows if row.get("kl") is not None]


@pytest.mark.parametrize("stage", STAGES)
def test_the_start_for_a_reference_is_no_reference_and_another_policy_pulls(
    stage: str, teacher: Path, tmp_path: Path
) -> None:
    run, config = STAGES[stage]
    few = of_two_steps(config)
    run(few, tmp_path / "none")
    run(replace(few, reference=str(resolve("household"))), tmp_path / "start")
    found, wanted = weights(tmp_path / "start"), weights(tmp_path / "none")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert distances(tmp_path / "none")[0] == 0
    run(replace(config, reference=str(teacher)), tmp_path / "taught")
    assert distances(tmp_path / "taught")[0] > 0.01
    start, taught, reference = (
        load_policy(str(each), Device()) for each in ("household", tmp_path / "taught" / "model", teacher)
    )
    assert divergence(taught, reference) < 0.95 * divergence(start, reference)


def carried(folder: Path, layers: list[str]) -> str:
    """A model over household's tokens whose trees are trained chain by chain; of full attention alone, at once."""
    tokenizer = load_policy("household", Device()).tokenizer
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    heads: dict[str, Any] = {"num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    config = Lfm2Config(vocab_size=len(tokenizer), **shape, **heads, layer_types=layers, conv_L_cache=3)
    save_model(Lfm2ForCausalLM(config).eval(), tokenizer, folder)
    return str(folder)


def test_a_reference_of_any_kind_that_is_trained_is_one(tmp_path: Path) -> None:
    keeps_a_state = carried(tmp_path / "conv", ["conv", "full_attention"])
    whole = carried(tmp_path / "whole", ["full_attention", "full_attention"])
    train = replace(ONLINE.train, iterations=1, groups=2, max_turns=2)
    for number, (model, reference) in enumerate([(keeps_a_state, keeps_a_state), (whole, keeps_a_state)]):
        config = replace(ONLINE, model=model, reference=reference, count=2, train=train)
        run_train_online(config, tmp_path / str(number))
        assert (distances(tmp_path / str(number))[0] < 1e-6) == (model == reference)


def test_a_reference_that_cannot_be_one_is_refused(teacher: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(ONLINE, reference=str(teacher), train=replace(ONLINE.train, loss=LossConfig(kl_coefficient=0.0)))
    assert refused.value.field == "reference"
    save_model(tiny_model(), tiny_tokenizer(), tmp_path / "other")
    for folder in ("other", "none"):
        with pytest.raises(InputError) as wrong:
            run_train_online(replace(ONLINE, reference=str(tmp_path / folder)), tmp_path / "run")
        assert folder in str(wrong.value) and not (tmp_path / "run").exists()


def test_a_run_goes_on_with_the_same_reference_only(teacher: Path, tmp_path: Path) -> None:
    config = replace(of_two_steps(ONLINE), reference=str(tmp_path / "teacher"))
    (tmp_path / "teacher").symlink_to(teacher)
    run_train_online(config, tmp_path / "run")
    (tmp_path / "teacher").unlink()
    (tmp_path / "teacher").symlink_to(resolve("household"))
    with pytest.raises(InputError, match="reference"):
        run_train_online(config, tmp_path / "run")


def test_a_plan_counts_the_reference_that_is_named(tmp_path: Path) -> None:
    small, large = tiny_model(), tiny_model(layers=8)
    for name, model in (("small", small), ("large", large)):
        save_model(model, tiny_tokenizer(), tmp_path / name)
    config = replace(ONLINE, model=str(tmp_path / "small"))
    plans = [asked(each, 1, "float32") for each in (config, replace(config, reference=str(tmp_path / "large")))]
    own, other = (memory(read_config(config.model), plan) for plan in plans)
    assert own.reference == held(small.parameters()) and other.reference == held(large.parameters())
    assert replace(other, reference=0, passes=0) == replace(own, reference=0, passes=0)


# a teacher on a server


@pytest.fixture(scope="module")
def served(teacher: Path) -> FakeVllm:
    policy = load_policy(str(teacher), Device())
    return FakeVllm(policy.model, tokenizer=policy.tokenizer)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("prefixes", ["shared", "repeated"])
def test_a_teacher_on_a_server_teaches_what_its_folder_does(
    stage: str, prefixes: Any, teacher: Path, served: FakeVllm, tmp_path: Path
) -> None:
    run, config = STAGES[stage][0], of_two_steps(STAGES[stage][1])
    train = replace(config.train, minibatch=1 if prefixes == "repeated" else None)
    config = replace(config, device=Device(prefixes=prefixes), train=train)
    run(replace(config, reference=str(teacher)), tmp_path / "folder")
    served.asked.clear()
    with running(served) as url:
        run(replace(config, reference=url), tmp_path / "server")
    assert distances(tmp_path / "server") == pytest.approx(distances(tmp_path / "folder"), abs=1e-5)
    found, wanted = weights(tmp_path / "server"), weights(tmp_path / "folder")
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
    sent = sum(len(body["prompt"]) for body in served.of("/v1/completions")[1:])  # the first asks for the tokenizer
    bills = [json.loads((tmp_path / name / "cost.json").read_text(encoding="utf-8")) for name in ("folder", "server")]
    assert bills[1]["scored_tokens"] == sent > 0
    assert bills[0]["trained_tokens"] == bills[1]["trained_tokens"]


def test_a_server_that_cannot_teach_is_refused_before_there_is_a_run(served: FakeVllm, tmp_path: Path) -> None:
    def refused(reference: str, error: type[TurntreeError] = InputError) -> str:
        with pytest.raises(error) as wrong:
            run_train_online(replace(ONLINE, reference=reference), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        return getattr(wrong.value, "field", "") or ""

    with running(served) as url:
        assert refused(f"{url}#other") == "reference"
        served.adapters["adapter"] = tmp_path
        assert refused(url) == "reference"  # which of its models?
        del served.adapters["adapter"]
        warm = replace(ONLINE.train, sampling=replace(SHORT, temperature=0.5))
        with pytest.raises(ConfigError) as wrong:
            replace(ONLINE, reference=url, train=warm)
        assert wrong.value.field == "train.sampling.temperature"
    with running(FakeVllm(tiny_model(), tokenizer=tiny_tokenizer())) as url:
        assert refused(url) == "reference"
    tokenizer = copy.deepcopy(served.tokenizer)
    tokenizer.add_tokens(["<|more|>"], special_tokens=True)
    larger = copy.deepcopy(served.model)
    larger.resize_token_embeddings(len(tokenizer))
    with running(FakeVllm(larger, tokenizer=tokenizer)) as url:
        assert open_teacher(url, tokenizer, 1).context == served.max_context
        swapped = copy.deepcopy(served.tokenizer)
        swapped.add_tokens(["<|other|>", "<|more|>"], special_tokens=True)
        with pytest.raises(InputError) as other:
            open_teacher(url, swapped, 1)
        assert other.value.field == "reference"
    with serve(lambda body: completion("text", reason="length")) as plain:  # which lists no models
        refused(plain.url, TurntreeError)


def test_a_rollout_that_is_longer_than_the_server_s_context_is_said_before_and_named(
    served: FakeVllm, capsys: Any
) -> None:
    with running(served) as url:
        teacher = open_teacher(url, served.tokenizer, served.max_context - 1)
        assert "longer" not in capsys.readouterr().err
        open_teacher(url, served.tokenizer, served.max_context)
        assert "longer" in capsys.readouterr().err
        most = [1] * (served.max_context - 1)
        assert len(teacher.logprobs([most])[0]) == len(most) - 1
        with pytest.raises(InputError) as refused:
            teacher.logprobs([[1, 2], [*most, 1]])
        assert refused.value.field == "reference" and str(len(most) + 1) in str(refused.value)


@pytest.mark.parametrize("later", [False, True])
def test_a_redirect_is_not_followed(later: bool) -> None:
    def elsewhere(handler: Any) -> None:
        handler.send_response(307)
        handler.send_header("Location", f"{other.url}/completions")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with serve(lambda body: completion("text", reason="length")) as other, serve(lambda body: elsewhere) as first:

        def client() -> Any:
            return client_of(first.url, timeout=5.0, field="reference", retries=0, later=later)

        fields: dict[str, Any] = {"cast_to": str, "body": {"prompt": "x"}}

        async def awaited() -> None:
            async with client() as opened:
                await opened.post("/completions", **fields)

        with pytest.raises(Exception) as refused:
            if later:
                asyncio.run(awaited())
            else:
                with client() as opened:
                    opened.post("/completions", **fields)
        assert refusal(refused.value, first.url) is not None and not other.asked and len(first.asked) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        [None, {"5": {"logprob": -9999.0}}],
        None,
        [],
        [None],
        [None, {"7": {"logprob": -1.0}}],
        [None, {"5": {"logprob": 0.7}}],
        [{}, {}],
    ],
)
def test_an_answer_that_scores_not_every_token_is_refused(wrong: Any) -> None:
    with serve(lambda body: completion("", reason="length", prompt_logprobs=wrong)) as server:
        with pytest.raises(InputError) as refused:
            ServedPolicy(server.url, "m").logprobs([(4, 5)])
        assert refused.value.field == "reference"


def test_a_server_that_goes_away_ends_the_run_which_goes_on_with_it(served: FakeVllm, tmp_path: Path) -> None:
    config = replace(ONLINE, train=replace(ONLINE.train, iterations=3), checkpoints=CheckpointConfig(every=1))
    served.asked.clear()
    with running(served) as url:
        run_train_online(replace(config, reference=url), tmp_path / "whole")
        scored = len(served.of("/v1/completions"))
    seen: list[str] = []

    def fails(path: str, body: Any) -> int | None:
        seen.append(path)
        return 400 if len(seen) > scored // 2 else None

    cut = FakeVllm(served.model, tokenizer=served.tokenizer)
    cut.hook = fails
    with running(cut) as url, pytest.raises(TurntreeError):
        run_train_online(replace(config, reference=url), tmp_path / "run")
    with running(served) as elsewhere:
        run_train_online(replace(config, reference=elsewhere), tmp_path / "run")
    found, wanted = weights(tmp_path / "run"), weights(tmp_path / "whole")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_teacher_on_a_server_takes_no_memory(tmp_path: Path) -> None:
    save_model(tiny_model(), tiny_tokenizer(), tmp_path / "model")
    config = replace(ONLINE, model=str(tmp_path / "model"), reference="http://127.0.0.1:1")
    assert memory(read_config(config.model), asked(config, 1, "float32")).reference == 0


def test_what_a_carrier_trained_teaches_there(tmp_path: Path) -> None:
    carried = replace(of_two_steps(ONLINE), device=Device(carrier=Part("tinker", {})))
    with installed(FakeTinker(load_policy("household", Device()).model, ["default", "household"])):
        run_train_online(carried, tmp_path / "first")
        taught = replace(carried, reference=str(tmp_path / "first" / "model"))
        run_train_online(taught, tmp_path / "second")
        assert abs(distances(tmp_path / "first")[0]) < 1e-6 < distances(tmp_path / "second")[0]
        with pytest.raises(InputError) as refused:
            run_train_online(replace(carried, reference=str(resolve("qa"))), tmp_path / "third")
        assert refused.value.field == "reference"


def test_a_server_teaches_what_a_carrier_trains(served: FakeVllm, tmp_path: Path) -> None:
    start = load_policy("household", Device())
    found: list[float] = []
    for name, server in (("start", FakeVllm(start.model, tokenizer=start.tokenizer)), ("taught", served)):
        with running(server) as url, installed(FakeTinker(load_policy("household", Device()).model, ["default"])):
            carried = replace(ONLINE, device=Device(carrier=Part("tinker", {})), reference=url)
            run_train_online(replace(carried, train=replace(ONLINE.train, iterations=1)), tmp_path / name)
        found += distances(tmp_path / name)
    assert abs(found[0]) < 1e-6 and found[1] > 0.01
