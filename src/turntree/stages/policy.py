"""Load a policy with everything that speaks for it: weights, tokenizer, renderer, engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.protocols import StreamingEngine
from turntree.engines.checkpoint import load_model, load_tokenizer, policy_hash, template_hash, tokenizer_hash
from turntree.engines.endpoint import EndpointConfig, EndpointEngine
from turntree.engines.hub import folder_of
from turntree.renderers.template import ChatRenderer
from turntree.stages.config import HF, Device
from turntree.stages.threads import set_threads
from turntree.training.attention import set_tree_attention
from turntree.training.forward import set_checkpointing
from turntree.training.lora import Reference, add_adapter, frozen_reference

DEFAULT = "default"
_VERBS = ("generate", "submit", "cancel", "poll", "update_weights", "weights_changed")
_FIGURES = ("policy_version", "max_context", "in_flight")


@dataclass(frozen=True)
class Weights:
    """What the factory of an engine gets as `policy`. `source` is the name or folder that it was loaded from."""

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer


@dataclass(frozen=True)
class Policy(Weights):
    """`hash` names the exact weights; a fresh adapter changes nothing yet and is not in it. `identity` names all that
    decides what is sampled from a prompt (weights, tokenizer, chat template): a profile records it, training and a run
    that goes on refuse another."""

    engine: StreamingEngine
    hash: str
    identity: dict[str, str]

    def reference(self) -> Reference:
        """The policy to stay near, for the KL term: with an adapter its base, at no memory; otherwise a frozen copy of
        the weights as they are now, so ask before training starts."""
        return frozen_reference(self.model)


def policy_name(model: str, environment: Part) -> str:
    """The name or folder of the policy that plays: "default" is the one that the environment registered under its own
    name, where it did (`turntree.policies`)."""
    return environment.name if model == DEFAULT and environment.name in parts.names("policies") else model


@dataclass(frozen=True)
class Speaker:
    """A policy as those see it who only sample from it, in this process or on a server. `identity` names its weights
    as far as they are known, its tokenizer and its chat template."""

    engine: StreamingEngine
    renderer: ChatRenderer
    identity: dict[str, str]

    def forget(self) -> None:
        """Drop what the engine has kept, so that what is sampled next depends on nothing before."""
        self.engine.weights_changed(self.engine.policy_version)


@contextlib.contextmanager
def open_speaker(model: str, endpoint: EndpointConfig | None, device: Device) -> Iterator[Speaker]:
    """The policy `model`, or what a server serves by that name."""
    if endpoint is None:
        policy = load_policy(model, device)
        yield Speaker(policy.engine, policy.renderer, policy.identity)
        return
    if device.engine.name != HF.name:
        hint = "leave --endpoint out, or the engine"
        raise ConfigError("samples in place of the server at --endpoint", field="device.engine", hint=hint)
    endpoint = dataclasses.replace(endpoint, tokenizer=str(folder_of(endpoint.tokenizer)))
    tokenizer = load_tokenizer(endpoint.tokenizer)
    renderer = ChatRenderer(tokenizer)
    with EndpointEngine(endpoint, model, tokenizer, renderer.stop_ids) as engine:
        yield Speaker(engine, renderer, identity_of(engine.identity, tokenizer))


def resolve(source: str) -> Path:
    """The folder of a policy: a registered name (`turntree.policies`), the folder itself, or the local copy of a model
    on the Hub."""
    return parts.load("policies", source).target if source in parts.names("policies") else folder_of(source)


def load_policy(source: str, device: Device) -> Policy:
    """Raises `InputError` in one line when the folder, its weights or its chat template are missing, and for a model
    on the Hub that cannot be fetched. Sets the threads of this process."""
    folder = resolve(source)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=device.dtype, device=device.name)
    set_threads(model, device.threads)
    weights = policy_hash(model)
    if device.lora is not None:
        add_adapter(model, device.lora)
    loaded = Weights(source, model, tokenizer, ChatRenderer(tokenizer))
    engine = _engine(device.engine, loaded)
    set_tree_attention(model, device.attention)
    if device.gradient_checkpointing:
        set_checkpointing(model)
    return Policy(source, model, tokenizer, loaded.renderer, engine, weights, identity_of(weights, tokenizer))


def _engine(part: Part, policy: Weights) -> StreamingEngine:
    """Raises `InputError` for what is no engine, before it is asked for anything."""
    engine = parts.build("engines", part, policy=policy)
    missing = [name for name in (*_VERBS, *_FIGURES) if not hasattr(engine, name)]
    if missing:
        problem = f"{part.name!r} gave {type(engine).__name__}, which has no {', '.join(missing)}"
        raise InputError(problem, field="device.engine", hint="see turntree.core.protocols.StreamingEngine")
    return engine


def identity_of(weights: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """By the names under which artifacts record them; `weights` is their name."""
    return {
        "policy_hash": weights,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
    }
