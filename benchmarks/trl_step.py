"""One optimizer step of TRL's GRPOTrainer on given tokens, advantages and old log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from turntree.core.labels import Credit
from turntree.core.tree import RolloutTree
from turntree.engine.tokenizer import load_tokenizer
from turntree.train.losses import LossConfig
from turntree.train.optimizer import OptimizerConfig
from turntree_worlds.household.entry import POLICY as EMBEDDED


class TRLStep:
    """One step of TRL's GRPOTrainer on the rollouts of a one-state tree, `rows` at a time.

    The loss of TRL that is the mean over trained tokens, which ours is: "bnpo", accumulated over equal micro-batches.
    """

    def __init__(self, model: PreTrainedModel, loss: LossConfig, optimizer: OptimizerConfig, folder: str) -> None:
        settings = GRPOConfig(
            output_dir=folder, use_cpu=model.device.type == "cpu", bf16=False, report_to=[],
            gradient_checkpointing=False, loss_type="bnpo",
            beta=0.0, epsilon=loss.clip_low, epsilon_high=loss.clip_high, temperature=loss.temperature,
            per_device_train_batch_size=16, num_generations=16, learning_rate=optimizer.learning_rate,
            adam_beta1=optimizer.betas[0], adam_beta2=optimizer.betas[1], weight_decay=optimizer.weight_decay,
            disable_dropout=True,
        )  # fmt: skip
        self.trainer = GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": "unused"}]),
            processing_class=load_tokenizer(EMBEDDED),
        )
        self.trainer.create_optimizer()
        self.max_grad_norm = optimizer.max_grad_norm
        self.model = self.trainer.model.train()

    def prepare(self, tree: RolloutTree, credit: Credit, rows: int) -> list[dict[str, torch.Tensor]]:
        actions = [node for node in tree if node.sampled]
        prompt_1P = torch.tensor([tree[0].token_ids])
        inputs = []
        for start in range(0, len(actions), rows):
            chosen = actions[start : start + rows]
            ids_BC = torch.tensor([node.token_ids for node in chosen])
            prompts_BP = prompt_1P.expand(len(chosen), -1).contiguous()
            given = [credit.nodes[node.id] for node in chosen]
            inputs.append({
                "prompt_ids": prompts_BP,
                "prompt_mask": torch.ones_like(prompts_BP),
                "completion_ids": ids_BC,
                "completion_mask": torch.ones_like(ids_BC),
                "advantages": torch.tensor([c.positive + c.negative for c in given]),
                "old_per_token_logps": torch.tensor([node.logprobs for node in chosen]),
            })  # fmt: skip
        return inputs

    def backward(self, inputs: Sequence[dict[str, torch.Tensor]]) -> None:
        trainer = self.trainer
        trainer.current_gradient_accumulation_steps = len(inputs)
        for part in inputs:
            trainer.accelerator.backward(trainer.compute_loss(self.model, part))

    def step(self, inputs: Sequence[dict[str, torch.Tensor]]) -> None:
        self.backward(inputs)
        self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.trainer.optimizer.step()
        self.model.zero_grad()
