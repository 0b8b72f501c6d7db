"""Rollout logs by the frameworks' own writers: `python tests/logs/real_writers.py NAME FOLDER`, with the package NAME
installed, or a checkout of it on `PYTHONPATH`.

Every writer logs the same rollouts, PLAYED, as far as its framework can say them; `tests/logs/real` holds what they
wrote, and `test_real_logs.py` reads it. Models and servers are stand-ins; whatever writes the file is the framework's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

PLAYED: list[dict[str, list[float | None]]] = [
    {"1+1": [1.0, 1.0, 1.0, 1.0], "2+2": [0.0, 0.0, 0.0, 0.0], "3+3": [0.0, 1.0, 0.0, 1.0]},
    {"1+1": [1.0, 1.0, 1.0, 1.0], "4+4": [1.0, 0.0, None, 0.0], "5+5": [0.0, 0.0, 0.0, 0.0]},
]
"""The rewards of every rollout by step and question. None: the rollout failed, and its framework knows it."""


class Rollout(NamedTuple):
    step: int
    question: str
    number: int
    reward: float | None

    @property
    def gold(self) -> str:
        return str(2 * int(self.question[0]))

    @property
    def answer(self) -> str:
        return self.gold if self.reward else "7"


def rollouts(step: int | None = None) -> Iterator[Rollout]:
    for number, groups in enumerate(PLAYED):
        for question, rewards in groups.items():
            for place, reward in enumerate(rewards):
                if step in (None, number):
                    yield Rollout(number, question, place, reward)


def trl(folder: Path) -> None:
    """GRPOTrainer with `log_completions`, two updates on a tiny model. A reward function that returns None for a
    completion leaves it without a reward."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from tiny_models import tiny_model, tiny_tokenizer

    left = [{question: list(rewards) for question, rewards in groups.items()} for groups in PLAYED]

    def played(prompts: list[str], trainer_state: Any, **_: Any) -> list[float | None]:
        return [left[trainer_state.global_step][prompt].pop(0) for prompt in prompts]

    rows = [{"prompt": question, "gold": str(2 * int(question[0]))} for groups in PLAYED for question in groups]
    config = GRPOConfig(
        str(folder), per_device_train_batch_size=12, num_generations=4, max_completion_length=4, max_steps=2,
        log_completions=True, logging_steps=1, shuffle_dataset=False, report_to=[], save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    tokenizer = tiny_tokenizer()
    GRPOTrainer(
        model=tiny_model(), reward_funcs=played, args=config, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    ).train()  # fmt: skip


def _rows(step: int) -> list[Rollout]:
    """In the order in which a trainer's batch has them: the rollouts of a group apart from each other."""
    found = list(rollouts(step))
    return found[::2] + found[1::2]


def _coded(texts: list[str]) -> Any:
    """Texts as a tensor of code points, padded with zeros, for a tokenizer whose words are characters."""
    import torch

    longest = max(map(len, texts))
    return torch.tensor([[*map(ord, text), *[0] * (longest - len(text))] for text in texts])


class Characters:
    """A tokenizer of characters, as far as writers use one."""

    pad_token_id = eos_token_id = 0

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(one) for one in (ids.tolist() if hasattr(ids, "tolist") else ids) if one)

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return [self.decode(row) for row in rows]


def verl(folder: Path) -> None:
    """RayPPOTrainer's `_log_rollout_data`, on batches of its DataProto. A reward that is missing is 0 there."""
    import numpy as np
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer: Any = object.__new__(RayPPOTrainer)
    trainer.tokenizer = Characters()
    trainer._init_dump_executor()
    for step in range(len(PLAYED)):
        rows = _rows(step)
        responses = _coded([row.answer for row in rows])
        scores = responses * 0.0
        scores[:, -1] = scores.new_tensor([row.reward or 0.0 for row in rows])
        batch = DataProto.from_dict(
            tensors={"prompts": _coded([row.question for row in rows]), "responses": responses,
                     "token_level_scores": scores},
            non_tensors={"reward_model": np.array([{"ground_truth": row.gold} for row in rows], dtype=object)},
        )  # fmt: skip
        trainer.global_steps = step
        trainer._log_rollout_data(batch, {"acc": [row.reward or 0.0 for row in rows]}, {}, str(folder))
    trainer._shutdown_dump_executor()


def verl_v1(folder: Path) -> None:
    """The same of trainer v1, whose batches lie in a transfer queue: that is a stand-in."""
    import torch
    from verl.trainer.ppo.v1 import trainer_base

    (owner,) = (kind for kind in vars(trainer_base).values() if "_log_rollout_data" in getattr(kind, "__dict__", ()))
    owner.__abstractmethods__ = frozenset()
    trainer: Any = object.__new__(owner)
    trainer.tokenizer = Characters()
    trainer._init_dump_executor()
    for step in range(len(PLAYED)):
        rows = _rows(step)

        def jagged(texts: list[str]) -> Any:
            return torch.nested.nested_tensor([torch.tensor([*map(ord, text)]) for text in texts], layout=torch.jagged)

        data = {
            "uid": torch.tensor([0]),
            "prompts": jagged([row.question for row in rows]),
            "responses": jagged([row.answer for row in rows]),
            "rm_scores": torch.tensor([[row.reward or 0.0] for row in rows]),
        }
        data["reward_model"] = SimpleNamespace(tolist=lambda rows=rows: [{"ground_truth": row.gold} for row in rows])
        trainer_base.tq = SimpleNamespace(kv_batch_get=lambda data=data, **_: data)
        trainer.global_steps = step
        keys = [f"{row.question}_{row.number}_0" for row in rows]
        trainer._log_rollout_data(SimpleNamespace(keys=keys, partition_id="train"), {}, str(folder))
    trainer._shutdown_dump_executor()


def areal(folder: Path) -> None:
    """WorkflowExecutor's `_dump_trajectory`: a task's rollouts are one batch. A rollout that failed is not dumped."""
    import torch
    from areal.infra.workflow_executor import WorkflowExecutor

    executor: Any = object.__new__(WorkflowExecutor)
    executor._tokenizer = Characters()
    executor._get_dump_dir = lambda is_eval: str(folder / "rollout")
    executor.config = SimpleNamespace(tokenizer_path="characters")
    for step, groups in enumerate(PLAYED):
        for task, question in enumerate(groups):
            rows = [row for row in rollouts(step) if row.question == question and row.reward is not None]
            ids = _coded([row.question + row.answer.ljust(2) for row in rows])
            loss = torch.zeros_like(ids)
            loss[:, len(question) :] = 1
            trajectory = {
                "input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": loss,
                "rewards": torch.tensor([row.reward for row in rows]), "versions": loss * 0 + step,
            }  # fmt: skip
            done, why = asyncio.run(executor._dump_trajectory(trajectory, 10 * step + task, False))
            assert done, why


def agent_lightning(folder: Path) -> None:
    """What its verl adapter uploads, with the fill value that a missing reward has there."""
    import io
    import zipfile

    from agentlightning.verl import rollout_adapter
    from agentlightning.verl.agl_rollout_manager import CompletedRollout

    def call(row: Rollout) -> SimpleNamespace:
        return SimpleNamespace(
            prompt={"token_ids": [*map(ord, row.question)]}, response={"token_ids": [*map(ord, row.answer)]}
        )

    for step in range(len(PLAYED)):
        done = [
            CompletedRollout.model_construct(
                rollout_id=f"ro-{step}-{place}", data_id=row.question, step=step, sample_idx_in_step=place,
                final_reward=row.reward, triplets=[call(row)],
            )
            for place, row in enumerate(_rows(step))
        ]  # fmt: skip
        records = rollout_adapter._build_compact_rollout_trajectory_records(
            done, tokenizer=Characters(), reward_fillna_value=0.0
        )
        zipped = rollout_adapter._build_zipped_jsonl(records, "train_trajectories.jsonl")
        zipfile.ZipFile(io.BytesIO(zipped)).extractall(folder / f"step_{step}")


def slime(folder: Path) -> None:
    """`save_debug_rollout_data` of a checkout, and the lines of docs/audit.md that make JSON of what it saves."""
    import torch
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample

    folder.mkdir(parents=True, exist_ok=True)
    for step, groups in enumerate(PLAYED):
        samples = [
            Sample(
                group_index=len(groups) * step + [*groups].index(row.question), index=place, prompt=row.question,
                tokens=[*map(ord, row.question + row.answer)], response=row.answer, response_length=len(row.answer),
                label=row.gold, reward=row.reward,
                status=Sample.Status.ABORTED if row.reward is None else Sample.Status.COMPLETED,
            )
            for place, row in enumerate(rollouts(step))
        ]  # fmt: skip
        save_debug_rollout_data(str(folder / "{rollout_id}.pt"), samples, rollout_id=step, evaluation=False)
        saved = folder / f"{step}.pt"
        rows = torch.load(saved, weights_only=True)["samples"]
        (folder / f"{step}.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
        saved.unlink()


def rllm(folder: Path) -> None:
    """EpisodeLogger of a checkout, as its engines call it, with validation episodes beside those of training."""
    from rllm.types import Episode, Step, Trajectory
    from rllm.utils.episode_logger import EpisodeLogger
    from rllm.workflows.workflow import TerminationReason

    logger = EpisodeLogger(str(folder))
    for step in range(len(PLAYED)):
        episodes = [
            Episode(
                id=f"{row.question}:{row.number}", task={"question": row.question, "answer": row.gold},
                termination_reason=TerminationReason.ERROR if row.reward is None else TerminationReason.ENV_DONE,
                is_correct=bool(row.reward),
                trajectories=[Trajectory(name="solver", reward=row.reward or 0.0, steps=[
                    Step(observation=row.question, action=row.answer, model_response=row.answer, done=True)])],
            )
            for row in _rows(step)
        ]  # fmt: skip
        logger.log_episodes_batch(episodes, step, "train", 0)
        logger.log_episodes_batch(episodes[:2], step, "val", 0)


def prime_rl(folder: Path) -> None:
    """FileMonitor of a checkout, on episodes of verifiers 0.4: all of them as they end, one group in a later step than
    it began, and what was trained on once more. A rollout that succeeded has the error of its first try."""
    import importlib.util
    from types import ModuleType
    from unittest.mock import MagicMock

    import verifiers.v1 as vf

    for absent in ("torch", "torch.distributed", "torch.nn", "wandb"):  # which the file monitor does not use
        sys.modules.setdefault(absent, MagicMock())
    monitors = ModuleType("prime_rl.monitors")  # without the other monitors, which need their servers' packages
    monitors.__path__ = [str(Path(importlib.util.find_spec("prime_rl").submodule_search_locations[0]) / "monitors")]
    sys.modules["prime_rl.monitors"] = monitors
    from prime_rl.configs.monitors import FileMonitorConfig
    from prime_rl.monitors.file import FileMonitor
    from verifiers.v1.episode import EnvInfo, Episode, GroupInfo
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    def episode(row: Rollout) -> Episode:
        data = WireTaskData(idx=int(row.question[0]), prompt=row.question, answer=row.gold)
        task = TraceTask(type="Sums", data=data, key=row.question, hash=row.question)
        said = [
            MessageNode(message=UserMessage(content=row.question), token_ids=[1, 2], mask=[False] * 2),
            MessageNode(parent=0, message=AssistantMessage(content=row.answer), sampled=True, token_ids=[3, 4],
                        mask=[False, True], logprobs=[-0.1]),
        ]  # fmt: skip
        trace = Trace(task=task, agent=AgentInfo(config=vf.AgentConfig.model_construct(), name="solver"), nodes=said)
        if row.number == 1 or row.reward is None:
            trace.record_error(RuntimeError("the sandbox did not start"))
        if row.reward is not None:
            trace.ok, trace.stop_condition = True, "single_turn"
            trace.record_reward("correct", row.reward)
            trace.record_reward("format", 0.5, weight=0.0)
        group = GroupInfo(id=f"{row.step}-{row.question}-5e0c")
        return Episode(env=EnvInfo(id="sums"), task=task, group=group, ok=trace.ok, traces=[trace])

    async def write() -> None:
        monitor = FileMonitor(FileMonitorConfig())
        await monitor.init(folder)
        for step in range(len(PLAYED)):
            for row in _rows(step):
                late = row.question == "3+3" and row.number == 3
                await monitor.log(episode(row), step + late, "train", "all")
            await monitor.log(
                [episode(row) for row in rollouts(step) if row.question == "3+3"], step, "train", "effective"
            )
            await monitor.log({"reward": 0.5}, step)

    asyncio.run(write())


def skyrl(folder: Path) -> None:
    """`evaluate` with SkyRLGymGenerator and an environment of two turns; the inference engine is a stand-in."""
    _skyrl(folder, step_wise=False)


def skyrl_steps(folder: Path) -> None:
    """The same with trajectories of which every step is a row."""
    _skyrl(folder, step_wise=True)


def _skyrl(folder: Path, *, step_wise: bool) -> None:
    import skyrl_gym
    from skyrl.train import evaluate
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    from tiny_models import tiny_tokenizer

    left: dict[str, list[float]] = {}

    class Sums(BaseTextEnv):
        def __init__(self, env_config: Any = None, extras: Any = None) -> None:
            super().__init__()
            self.rewards, self.turns = left[extras["question"]], 0

        def step(self, action: str) -> BaseTextEnvStepOutput:
            self.turns += 1
            if self.turns == 1:
                again = [{"role": "user", "content": "Are you sure?"}]
                return BaseTextEnvStepOutput(observations=again, reward=0.0, done=False, metadata={})
            return BaseTextEnvStepOutput(observations=[], reward=self.rewards.pop(0), done=True, metadata={})

    skyrl_gym.register(id="sums", entry_point=Sums)
    tokenizer = tiny_tokenizer()

    class Engine:
        async def generate(self, request: Any, model: Any = None) -> Any:
            ids = [[*tokenizer.encode("42", add_special_tokens=False), tokenizer.eos_token_id]]
            return {
                "responses": ["42"],
                "response_ids": ids,
                "stop_reasons": ["stop"],
                "response_logprobs": [[-0.1] * len(ids[0])],
            }

        async def finish_session(self, session: Any) -> None: ...

    config = SkyRLTrainConfig()
    config.trainer.export_path = str(folder)
    config.trainer.dump_eval_results = True
    config.generator.max_turns = 2
    config.generator.batched = False
    config.generator.step_wise_trajectories = step_wise
    config.generator.eval_n_samples_per_prompt = 4
    config.environment.env_class = "sums"
    for step, groups in enumerate(PLAYED):
        rows = [
            {"prompt": [{"role": "user", "content": question}], "env_class": "sums", "uid": question,
             "env_extras": {"data_source": "sums", "question": question}}
            for question in groups
        ]  # fmt: skip
        left.update({question: [one or 0.0 for one in rewards] for question, rewards in groups.items()})
        generator = SkyRLGymGenerator(config.generator, config.environment.skyrl_gym, Engine(), tokenizer)
        asyncio.run(evaluate.evaluate([rows], generator, config, step, tokenizer))


def nemo_gym(folder: Path) -> None:
    """RolloutCollectionHelper's `run_from_config`, one collection a step; the agent's server is a stand-in, which says
    of the rollout that failed that its sample is to be masked."""
    import antlr4.atn.ATNDeserializer  # noqa: F401 - before another version of it
    from nemo_gym import rollout_collection as collection
    from omegaconf import OmegaConf

    sys.argv[1:] = []  # Hydra's
    folder.mkdir(parents=True, exist_ok=True)
    for step, groups in enumerate(PLAYED):
        left = {question: list(rewards) for question, rewards in groups.items()}

        class Client:
            global_config_dict = OmegaConf.create({"solver": {"responses_api_agents": {"simple_agent": {}}}})

            async def post(self, server_name: str, url_path: str, json: Any = None, left: Any = left) -> Any:
                if url_path != "/run":
                    return {}
                question = json["responses_create_params"]["input"][0]["content"]
                reward = left[question].pop(0)
                said = {"type": "message", "role": "assistant", "id": "m", "status": "completed",
                        "content": [{"type": "output_text", "text": "42", "annotations": []}]}  # fmt: skip
                response = {"id": "r", "output": [said], "usage": {"output_tokens": 2}}
                return {**json, "response": response, "reward": reward or 0.0, "mask_sample": reward is None}

        async def passed(*_: Any, **__: Any) -> None: ...

        async def body(response: Any) -> Any:
            return response

        collection.get_global_config_dict = lambda client=Client, **_: client.global_config_dict
        collection.RolloutCollectionHelper._call_aggregate_metrics = passed
        collection._environment_server_for_agent = lambda name, _: name
        collection.raise_for_status, collection.get_response_json = passed, body
        collection.setup_server_client_utils = lambda _=None, client=Client: client()
        asked = folder / f"asked_{step}.jsonl"
        asked.write_text("".join(json.dumps({
            "responses_create_params": {"input": [{"role": "user", "content": question}]},
            "agent_ref": {"type": "responses_api_agents", "name": "solver"}, "expected_answer": question,
        }) + "\n" for question in groups))  # fmt: skip
        config = collection.RolloutCollectionConfig(
            input_jsonl_fpath=str(asked), output_jsonl_fpath=str(folder / f"rollouts_{step}.jsonl"), num_repeats=4,
            agent_name="solver",
        )  # fmt: skip
        asyncio.run(collection.RolloutCollectionHelper().run_from_config(config))
        asked.unlink()


WRITERS: dict[str, Callable[[Path], None]] = {
    "trl": trl, "verl": verl, "verl-v1": verl_v1, "areal": areal, "agent-lightning": agent_lightning, "slime": slime,
    "rllm": rllm, "prime-rl": prime_rl, "skyrl": skyrl, "skyrl-steps": skyrl_steps, "nemo-gym": nemo_gym,
}  # fmt: skip

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
