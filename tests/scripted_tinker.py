"""The SDK of Tinker without a model and without torch: it answers with drawn tokens and counts what it is asked.

Every token is equally likely, so log-probabilities are known; weights are the number of steps. `fake_tinker` is the
same SDK over a model.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


@dataclass
class TensorData:
    data: list[float]

    @classmethod
    def from_numpy(cls, values: np.ndarray) -> TensorData:
        return cls(values.tolist())


@dataclass
class ModelInput:
    tokens: list[int]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> ModelInput:
        return cls(list(tokens))


@dataclass
class Datum:
    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


@dataclass
class AdamParams:
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass
class SamplingParams:
    max_tokens: int
    seed: int
    stop: Sequence[int] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


def done(value: Any = None, error: Exception | None = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value) if error is None else future.set_exception(error)
    return future


def path(**named: Any) -> Future[Any]:
    return done(SimpleNamespace(**named))


@dataclass
class ScriptedTinker:
    """The service, its training client and its sampler in one."""

    names: Sequence[str]
    tokens: int  # drawn below this number
    steps: int = 0
    states: dict[str, int] = field(default_factory=dict)

    def get_server_capabilities(self) -> Any:
        served = [SimpleNamespace(model_name=name, max_context_length=None) for name in self.names]
        return SimpleNamespace(supported_models=served)

    def create_lora_training_client(self, *arguments: Any, **named: Any) -> ScriptedTinker:
        return self

    create_sampling_client = save_weights_and_get_sampling_client = create_lora_training_client

    def forward_backward(self, data: Sequence[Datum], loss: str, config: Any = None) -> Future[Any]:
        scores = [[-math.log(self.tokens)] * len(datum.model_input.tokens) for datum in data]
        return path(loss_fn_outputs=[{"logprobs": TensorData(row)} for row in scores], metrics={})

    def optim_step(self, adam: AdamParams) -> Future[Any]:
        self.steps += 1
        return path(metrics=None)

    def save_state(self, name: str) -> Future[Any]:
        self.states[f"tinker://run/weights/{name}"] = self.steps
        return path(path=f"tinker://run/weights/{name}")

    save_weights_for_sampler = save_state

    def load_state_with_optimizer(self, where: str) -> Future[Any]:
        self.steps = self.states[where]
        return done()

    def sample(self, prompt: ModelInput, num_samples: int, sampling_params: SamplingParams) -> Future[Any]:
        draw = random.Random(sampling_params.seed)
        drawn = [draw.randrange(self.tokens) for _ in range(sampling_params.max_tokens)]
        end = next((n + 1 for n, token in enumerate(drawn) if token in sampling_params.stop), len(drawn))
        stopped = "stop" if drawn[end - 1] in sampling_params.stop else "length"
        scores = [-math.log(self.tokens)] * end
        return path(sequences=[SimpleNamespace(tokens=drawn[:end], logprobs=scores, stop_reason=stopped)])

    def compute_logprobs(self, prompt: ModelInput) -> Future[list[float | None]]:
        return done([None, *[-math.log(self.tokens)] * (len(prompt.tokens) - 1)])

    @property
    def holder(self) -> Any:
        return SimpleNamespace(close=lambda: None)


@contextlib.contextmanager
def installed(server: Any, version: str = "0.19.0") -> Iterator[Any]:
    """`import tinker` gives an SDK whose only server is this one."""
    module: Any = ModuleType("tinker")
    module.__version__, module.ServiceClient = version, lambda **settings: server
    module.types = SimpleNamespace(
        TensorData=TensorData,
        ModelInput=ModelInput,
        Datum=Datum,
        AdamParams=AdamParams,
        SamplingParams=SamplingParams,
    )
    before = sys.modules.get("tinker")
    sys.modules["tinker"] = module
    try:
        yield server
    finally:
        del sys.modules["tinker"]
        if before is not None:
            sys.modules["tinker"] = before
