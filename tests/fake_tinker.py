"""The SDK of Tinker in one process, over a tiny model with real adapters: what it trains is what PEFT and torch train.

`installed(FakeTinker(model))` puts it in place of the package `tinker`. `averages`: it divides gradients by rows and by
the lengths of rows, as SkyRL's JAX back end does; else it adds up and tells no norms, as the API is documented. `lose`
says, for the name of a request that changes an adapter, whether its "request" or its "answer" is lost. `restarted`:
saved samplers answer no more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from scripted_tinker import AdamParams, Datum, ModelInput, SamplingParams, TensorData, done, path
from turntree.core.completion import GenerationRequest, Sampling
from turntree.engine.plain import PlainEngine
from turntree.train.config import LoRAConfig
from turntree.train.lora import add_adapter

BASE = "base"


def refused(text: str) -> Exception:
    error = ValueError(text)
    error.status_code = 404  # type: ignore[attr-defined]
    return error


class Adapter:
    """One adapter on the server."""

    def __init__(self, server: FakeTinker, rank: int) -> None:
        self.server, self.model = server, copy.deepcopy(server.model)
        add_adapter(self.model, LoRAConfig(rank=rank, alpha=32))
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.parameters.values())
        self.rows, self.steps = 0, 0

    def scores(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([tokens])
        return self.model(input_ids=ids).logits[0].log_softmax(-1)

    def forward_backward(self, data: Sequence[Datum], loss: str, config: dict[str, float] | None) -> Any:
        outputs = []
        for row in data:
            inputs = {name: torch.tensor(value.data) for name, value in row.loss_fn_inputs.items()}
            new = self.scores(row.model_input.tokens).gather(1, inputs["target_tokens"].long()[:, None])[:, 0]
            weights = inputs.get("weights", torch.ones(len(new)))
            losses = -loss_terms(loss, new, inputs, config or {}) * weights
            total = losses.sum() / weights.sum() if self.server.averages else losses.sum()
            total.backward()
            outputs.append({"logprobs": TensorData(new.detach().tolist())})
        self.rows += len(data)
        return SimpleNamespace(loss_fn_outputs=outputs, metrics={})

    def optim_step(self, adam: AdamParams) -> Any:
        if self.server.averages:
            for parameter in self.parameters.values():
                parameter.grad = None if parameter.grad is None else parameter.grad / max(1, self.rows)
        elif adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), adam.grad_clip_norm)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        (group,) = self.optimizer.param_groups
        group |= {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
        group["weight_decay"] = adam.weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rows, self.steps = 0, self.steps + 1
        return SimpleNamespace(metrics={"skyrl.ai/grad_norm": float(norm)} if self.server.averages else None)

    def state(self) -> dict[str, Any]:
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return copy.deepcopy({"weights": weights, "moments": self.optimizer.state_dict(), "steps": self.steps})

    @torch.no_grad()
    def take(self, state: dict[str, Any], moments: bool) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state["weights"][name])
        if moments:
            self.optimizer.load_state_dict(copy.deepcopy(state["moments"]))
            self.steps = state["steps"]


def loss_terms(loss: str, new: torch.Tensor, inputs: dict[str, Any], config: dict[str, float]) -> torch.Tensor:
    if loss == "cross_entropy":
        return new
    ratio, advantages = torch.exp(new - inputs["logprobs"]), inputs["advantages"]
    clipped = ratio.clamp(config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2))
    return {
        "importance_sampling": ratio * advantages,
        "ppo": torch.minimum(ratio * advantages, clipped * advantages),
        "cispo": clipped.detach() * new * advantages,
    }[loss]


class TrainingClient:
    def __init__(self, server: FakeTinker, rank: int) -> None:
        self.server, self.adapter = server, Adapter(server, rank)

    def _change(self, name: str, *arguments: Any) -> Future[Any]:
        lost = self.server.lose(name)
        self.server.asked.append((name, arguments))
        if lost == "request":
            return done(error=ConnectionError("the connection broke"))
        answer = getattr(self.adapter, name)(*arguments)
        self.server.carried_out.append((name, arguments))
        return done(error=ConnectionError("the connection broke")) if lost else done(answer)

    def forward_backward(self, data: list[Datum], loss: str, config: dict[str, float] | None = None) -> Future[Any]:
        return self._change("forward_backward", data, loss, config)

    def optim_step(self, adam: AdamParams) -> Future[Any]:
        return self._change("optim_step", adam)

    def save_state(self, name: str) -> Future[Any]:
        return path(path=self.server.keep(f"tinker://run/weights/{name}", self.adapter.state()))

    def load_state(self, where: str, moments: bool = False) -> Future[Any]:
        if where not in self.server.states:
            return done(error=refused(f"Checkpoint not found: {where}"))
        return done(self.adapter.take(self.server.states[where], moments))

    def load_state_with_optimizer(self, where: str) -> Future[Any]:
        return self.load_state(where, moments=True)

    def save_weights_for_sampler(self, name: str) -> Future[Any]:
        return path(path=self.server.keep(f"tinker://run/sampler_weights/{name}", copy.deepcopy(self.adapter.model)))

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        return SamplingClient(copy.deepcopy(self.adapter.model))


class SamplingClient:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def sample(self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams) -> Future[Any]:
        how = sampling_params
        sampling = Sampling(temperature=how.temperature, max_tokens=how.max_tokens)
        request = GenerationRequest(prompt_ids=tuple(prompt.tokens), sampling=sampling, seed=how.seed)
        (found,) = PlainEngine(self.model, how.stop).generate([request])
        sequence = SimpleNamespace(
            tokens=list(found.token_ids), logprobs=list(found.logprobs), stop_reason=found.finish
        )
        return done(SimpleNamespace(sequences=[sequence]))

    @torch.no_grad()
    def compute_logprobs(self, prompt: ModelInput) -> Future[list[float | None]]:
        ids = torch.tensor([prompt.tokens])
        scores = self.model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return done([None, *scores.tolist()])


class Forgotten(SamplingClient):
    """Of weights that SkyRL lost in a restart."""

    def sample(self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams) -> Future[Any]:
        return done(error=ValueError("Model run not loaded"))


@dataclass
class FakeTinker:
    model: PreTrainedModel
    names: Sequence[str] = (BASE,)
    averages: bool = False
    restarted: bool = False
    lose: Callable[[str], str | None] = lambda name: None
    asked: list[tuple[str, Any]] = field(default_factory=list)
    carried_out: list[tuple[str, Any]] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    clients: list[TrainingClient] = field(default_factory=list)

    def keep(self, where: str, state: Any) -> str:
        self.states[where] = state
        return where

    def get_server_capabilities(self) -> Any:
        served = [SimpleNamespace(model_name=name, max_context_length=None) for name in self.names]
        return SimpleNamespace(supported_models=served)

    def create_lora_training_client(self, base_model: str, *, rank: int, seed: int, train_unembed: bool) -> Any:
        assert base_model in self.names and not train_unembed
        self.clients.append(TrainingClient(self, rank))
        return self.clients[-1]

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        if model_path is not None and model_path not in self.states:
            raise refused(f"Checkpoint not found: {model_path}")
        if model_path is not None and self.restarted:
            return Forgotten(self.model)
        return SamplingClient(self.model if model_path is None else self.states[model_path])

    @property
    def steps(self) -> int:
        """The optimizer steps of the adapter that was made last."""
        return self.clients[-1].adapter.steps

    @property
    def holder(self) -> Any:
        return SimpleNamespace(close=lambda: None)
