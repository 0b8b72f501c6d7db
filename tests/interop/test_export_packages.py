"""Exports in the real packages (`make test-exports`): each loader reads the rows as they were written, and the reward
in the trainer is the verdict of our verifier. A package that is absent is skipped."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from chat_templates import chatml, tokenizer_of
from exported_pivots import BOTH, CONVERSATION, FIND, TOOLS, write_pivots
from turntree.cli.main import main
from turntree.core.config import Part
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.stages.export import ExportConfig, run_export
from turntree.stages.policy import resolve
from turntree_interop.judging import unpack_state
from turntree_interop.nemo_gym import BATCH, Nemo

SERVER = "resources_servers.single_step_tool_use_with_argument_comparison"
CALL = "<tool_call>\n" + json.dumps({"name": "find_order", "arguments": {"order_id": "W1"}}) + "\n</tool_call>"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tokenizer of a policy whose template shows tools and calls."""
    tokenizer_of(chatml()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def exported(folder: Path, to: str, model: Path) -> Path:
    config = ExportConfig(pivots=str(write_pivots(folder)), pivot_format=Part(to), model=str(model))
    assert len(run_export(config, folder / "out")["notes"]) == (2 if to == "nemo-gym" else 0)
    return folder / "out"


def reward_module(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_reward", folder / "reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_prompts(tokenizer: Any, prompts: list[list[dict[str, Any]]]) -> None:
    """Messages that a trainer renders without tools give the prompt that was profiled with them."""
    for prompt, history in zip(prompts, (CONVERSATION[:2], CONVERSATION[:4]), strict=True):
        chat = [message.to_chat() for message in history]
        given = {"tokenize": False, "add_generation_prompt": True}
        whole = tokenizer.apply_chat_template(chat, tools=list(TOOLS), **given)
        assert tokenizer.apply_chat_template(prompt, **given) == whole


def test_datasets_loads_the_file(tmp_path: Path, model: Path) -> None:
    datasets = pytest.importorskip("datasets")
    file = str(exported(tmp_path, "trl", model) / "pivots.parquet")
    rows = datasets.load_dataset("parquet", data_files=file, cache_dir=str(tmp_path / "cache"))["train"]
    assert [row["pass_rate"] for row in rows] == [0.25, 0.25]
    assert [Message.from_chat(row["demonstration"]) for row in rows] == [FIND, BOTH]
    assert unpack_state(rows[1]["state"]) == TurnState("t", 1, CONVERSATION[:4], BOTH, TOOLS)


class TestVerl:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("verl")

    def test_its_data_set_gives_the_prompts_and_its_reward_manager_our_verdicts(
        self, tmp_path: Path, model: Path
    ) -> None:
        from omegaconf import OmegaConf
        from verl.trainer.ppo.reward import get_custom_reward_fn
        from verl.utils.dataset.rl_dataset import RLHFDataset
        from verl.utils.tokenizer import hf_tokenizer

        out, tokenizer = exported(tmp_path, "verl", model), hf_tokenizer(str(model))
        config = OmegaConf.create({"cache_dir": str(tmp_path / "c"), "max_prompt_length": 4000, "truncation": "error"})
        data = RLHFDataset(str(out / "pivots.parquet"), tokenizer, config)
        assert len(data) == 2
        check_prompts(tokenizer, [data[0]["raw_prompt"], data[1]["raw_prompt"]])
        settings = {"custom_reward_function": {"path": str(out / "reward.py"), "name": "compute_score"}}
        score = get_custom_reward_fn(OmegaConf.create({"reward": settings}))
        rewards = [self.managed(score, tokenizer, data[0], text) for text in (CALL, CALL.replace("W1", "W2"), "Hi.")]
        assert rewards == [1.0, 0.0, 0.0]

    def managed(self, score: Any, tokenizer: Any, row: dict[str, Any], said: str) -> float:
        """What verl's own reward manager makes of a response."""
        import torch
        from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

        ids = tokenizer(said, return_tensors="pt")["input_ids"]
        item = SimpleNamespace(
            batch={"responses": ids[0], "attention_mask": torch.ones(ids.shape[1] + 3, dtype=torch.long)},
            non_tensor_batch={key: row[key] for key in ("data_source", "reward_model", "extra_info")},
        )

        class Batch(list[Any]):
            def __getitem__(self, place: Any) -> Any:
                return self if isinstance(place, slice) else super().__getitem__(place)

        async def run() -> float:
            manager = NaiveRewardManager(None, tokenizer, score)
            manager.loop = asyncio.get_running_loop()
            return (await manager.run_single(Batch([item])))["reward_score"]  # pyright: ignore

        return asyncio.run(run())


class TestSkyRL:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("skyrl_gym")

    def test_its_data_set_gives_the_prompts_and_the_environment_our_verdicts(self, tmp_path: Path, model: Path) -> None:
        import skyrl_gym
        from skyrl.train.dataset.dataset import PromptDataset
        from transformers import AutoTokenizer

        out, tokenizer = exported(tmp_path, "skyrl", model), AutoTokenizer.from_pretrained(model)
        data = PromptDataset(str(out / "pivots.parquet"), tokenizer, max_prompt_length=4000, num_workers=1)
        (one, name, extras, _), (two, *_) = data[0], data[1]
        check_prompts(tokenizer, [one, two])
        reward_module(out)  # registers the environment
        for said, reward in ((CALL, 1.0), (CALL.replace("W1", "W2"), 0.0)):
            answer = skyrl_gym.make(name, env_config={}, extras=extras).step(said)
            assert (answer["reward"], answer["done"], answer["observations"]) == (reward, True, [])


class TestNemoGym:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        if not hasattr(pytest.importorskip("nemo_gym"), "__path__"):
            pytest.skip("nemo_gym is our benchmark of this name, which another test put on the path")

    def test_its_server_reads_the_rows_and_pays_what_our_nemo_pays(self, tmp_path: Path, model: Path) -> None:
        app = importlib.import_module(f"{SERVER}.app")
        out = exported(tmp_path, "nemo-gym", model)
        one, both = (json.loads(line) for line in (out / "pivots.jsonl").read_text().splitlines())
        request = app.SingleStepToolUseArgumentComparisonRunRequest
        assert json.loads(request.model_validate(one).expected_action.arguments) == {"order_id": "W1"}
        with pytest.raises(ValueError, match="expected_action"):
            request.model_validate({**one, "expected_action": {"type": "call"}})
        utils = importlib.import_module(f"{SERVER}.common.verification_utils")
        if hasattr(utils, "FunctionCallBatchAction"):  # after 0.4.0
            rows = [(one, FIND), (both, BOTH)]
        else:
            rows = [(one, FIND)]
            with pytest.raises(ValueError, match=BATCH):
                request.model_validate(both)
        for row, demonstration in rows:
            read = request.model_validate(row)
            assert len(read.responses_create_params.input) == len(row["responses_create_params"]["input"])
            state = TurnState("t", 0, (), demonstration, TOOLS)
            right, other = demonstration.tool_calls, ToolCall("find_order", {"order_id": "W2"})
            for calls in (right, (other,), (*right, other), right[:1]):
                found = Nemo().judge(state, Message("assistant", "", calls)).reward
                assert self.paid(app, row, calls) == pytest.approx(found)

    def paid(self, app: ModuleType, row: dict[str, Any], calls: tuple[ToolCall, ...]) -> float:
        """What their server pays for calls in a response of the model."""
        from unittest.mock import MagicMock

        from nemo_gym.server_utils import ServerClient

        name = "SingleStepToolUseArgumentComparison"
        settings = {"host": "", "port": 1, "entrypoint": "", "name": "server"}
        comparing = {"tool_call_comparator_config": {"word_count_similarity_threshold": 0.1}}
        config = getattr(app, f"{name}ResourcesServerConfig").model_validate(settings | comparing)
        server = getattr(app, f"{name}ResourcesServer")(config=config, server_client=MagicMock(spec=ServerClient))
        items = [
            {"type": "function_call", "call_id": str(n), "name": call.name, "arguments": json.dumps(call.arguments)}
            for n, call in enumerate(calls)
        ]
        asked = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        response = {"id": "1", "created_at": 1, "model": "m", "object": "response", "output": items, **asked}
        request = getattr(app, f"{name}VerifyRequest").model_validate({**row, "response": response})
        return asyncio.run(server.verify(request)).reward


class TestTrl:
    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("trl")

    def test_two_steps_of_grpo_on_the_exported_pivots_with_our_verifier_as_reward(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from datasets import load_dataset
        from trl import GRPOConfig, GRPOTrainer

        self.household(tmp_path, monkeypatch)
        rows = load_dataset("parquet", data_files="out/pivots.parquet", cache_dir=str(tmp_path / "cache"))["train"]
        said: list[tuple[str, str, float | None]] = []
        paid = reward_module(tmp_path / "out").reward

        def reward(completions: Any, state: Any, **columns: Any) -> list[float | None]:
            found = paid(completions=completions, state=state, **columns)
            said.extend(zip((one[0]["content"] for one in completions), state, found, strict=True))
            return found

        settings = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "learning_rate": 1e-3}
        sizes = {"num_generations": 8, "per_device_train_batch_size": 16, "max_completion_length": 24, "max_steps": 2}
        config = GRPOConfig(output_dir="trl", logging_steps=1, seed=3, **settings, **sizes)
        trainer = GRPOTrainer(model=str(resolve("default")), reward_funcs=reward, args=config, train_dataset=rows)
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        trainer.train()
        log = [row for row in trainer.state.log_history if "reward" in row]
        assert len(log) == 2 and len(said) == 32
        assert {reward for *_, reward in said} == {0.0, 1.0}  # both, so that there is a gradient
        assert any(row["grad_norm"] > 0 for row in log)
        after = trainer.model.parameters()
        assert any(not one.equal(other) for one, other in zip(before, after, strict=True))
        self.check_verdicts(said)

    def household(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pivots of the embedded policy that it takes about every second time, exported into `out`."""
        monkeypatch.chdir(folder)
        commands = (
            "traces household --count 16 --out traces.jsonl",
            "profile --traces traces.jsonl --limit 60 --rollouts 8 --max-tokens 24 --out profile.jsonl",
            "select profile.jsonl --threshold 0.8 --out pivots.jsonl",
            "export pivots pivots.jsonl --to trl --model default --out out",
        )
        for command in commands:
            main(command.split())

    def check_verdicts(self, said: list[tuple[str, str, float | None]]) -> None:
        """The rewards in the trainer are those of the verifier alone."""
        from turntree.core.config import Part
        from turntree.stages.verifier import open_verifier

        with open_verifier(Part("default")) as verifier:
            for text, state, reward in said:
                assert verifier.judge(unpack_state(state), Message("assistant", text)).reward == reward
