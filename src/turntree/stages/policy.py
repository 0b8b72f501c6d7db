"""A policy with its tokenizer, renderer and engine. No torch, which a carrier does without: `stages.local` loads one
into this process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from turntree.core import parts
from turntree.core.config import Part, is_url
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError
from turntree.core.progress import notice
from turntree.core.protocols import Renderer, StreamingEngine
from turntree.engine.endpoint import EndpointEngine
from turntree.engine.hub import folder_of
from turntree.engine.limits import EndpointConfig, Prefixes
from turntree.engine.teacher import open_teacher
from turntree.engine.tokenizer import load_tokenizer, template_hash, tokenizer_hash
from turntree.render.families import FamilyRenderer
from turntree.render.template import ChatRenderer
from turntree.stages.config import AUTO, HF, Device, ReinforcedTraining
from turntree.train.config import SFTConfig
from turntree.train.loop import Trainee
from turntree.train.ranks import ProcessGroup
from turntree.train.sft import SFT, Example

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OURS = (AUTO.name, "template", "family")


@dataclass(frozen=True)
class Weights:
    """The argument `policy` of an engine's factory. `source` is the name or folder that it was loaded from, `prefixes`
    that of `Device`; no `model` where servers have it."""

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    prefixes: Prefixes


@dataclass(frozen=True)
class Policy(Weights, ABC):
    """`hash` names the exact weights; a fresh adapter changes nothing yet and is not in it. `identity` names all that
    decides what is sampled from a prompt (weights, tokenizer, chat template, renderer): a profile records it, training
    and a run that goes on refuse another."""

    engine: StreamingEngine
    hash: str
    identity: dict[str, str]

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """The number of tokens that it knows."""

    @abstractmethod
    def trains_on_trees(self, tokens: int, *, field: str, ranks: int = 1, reference: Any = None) -> bool:
        """Whether trees of paths of up to `tokens` tokens are packed (`isolation.shares_prefixes`), for this policy and
        what `open_reference` gave."""

    @abstractmethod
    def open_reference(self, source: str, device: Device) -> tuple[Any, str]:
        """Another policy for `trainee`, and the name of its weights. Raises `InputError` for one that cannot be
        compared with this one token by token."""

    def trainee(self, shared: bool, group: ProcessGroup, reference: Any = None) -> Trainee:
        """The policy under training. `reference`: what the KL term pulls towards, where it is not this policy."""
        return Trainee(self.model, self.engine, self.renderer, shared, group, reference)

    @abstractmethod
    def reads(self, tokens: int) -> int:
        """The most tokens that it can learn from in one sequence, of at most `tokens`. Raises `InputError` for a model
        that cannot be fine-tuned."""

    def imitation(self, examples: Sequence[Example], config: SFTConfig, group: ProcessGroup) -> SFT:
        """Fine-tuning of the policy on examples."""
        return SFT(self.model, examples, config, group)

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write it as a folder that `load_policy` reads."""

    def bill(self, cost: Cost) -> dict[str, float] | None:
        """What a server asks for this cost; None where there is no server with prices."""
        return None


def open_reference(config: ReinforcedTraining, policy: Policy) -> tuple[Any, dict[str, str]]:
    """The policy of `reference` for `Policy.trainee`, where it is another one, and what a run records of it."""
    if config.reference is None:
        return None, {}
    if is_url(config.reference):
        longest = min(policy.engine.max_context, config.train.max_tokens)
        teacher = open_teacher(config.reference, policy.tokenizer, longest)
        return teacher, {"reference": f"endpoint:{teacher.model}"}
    reference, weights = policy.open_reference(config.reference, config.device)
    return reference, {"reference": weights}


def policy_name(model: str, environment: Part) -> str:
    """The name or folder of the policy that plays: "default" is the one that the environment registered under its own
    name, where it did (`turntree.policies`)."""
    return environment.name if model == parts.DEFAULT.name and environment.name in parts.names("policies") else model


@dataclass(frozen=True)
class Speaker:
    """A policy for sampling only, in this process or on a server. `identity` names its weights
    as far as they are known, its tokenizer, chat template and renderer."""

    engine: StreamingEngine
    renderer: Renderer
    identity: dict[str, str]


@contextlib.contextmanager
def open_speaker(model: str, endpoint: EndpointConfig | None, device: Device) -> Iterator[Speaker]:
    """The policy `model`, or what a server serves by that name."""
    if endpoint is None:
        policy = load_policy(model, device)
        yield Speaker(policy.engine, policy.renderer, policy.identity)
        return
    for name, is_set in (("engine", device.engine.name != HF.name), ("carrier", device.carrier is not None)):
        if is_set:
            hint = f"leave --endpoint out, or the {name}"
            raise ConfigError("samples in place of the server at --endpoint", field=f"device.{name}", hint=hint)
    folder = folder_of(endpoint.tokenizer, weights=False)
    endpoint = dataclasses.replace(endpoint, tokenizer=str(folder))
    tokenizer = load_tokenizer(folder)
    renderer = renderer_of(device.renderer, tokenizer, folder)
    with EndpointEngine(endpoint, model, tokenizer, renderer.stop_ids) as engine:
        yield Speaker(engine, renderer, identity_of(engine.identity, tokenizer, renderer, device.renderer))


def open_served(source: str, device: Device) -> Speaker:
    """The policy of a folder whose weights servers have, for sampling: without them. `identity` does not name them."""
    tokenizer, renderer = load_renderer(source, device.renderer)
    unweighted = Weights(source, cast(Any, None), tokenizer, renderer, device.prefixes)
    engine = parts.build("engines", device.engine, field="device.engine", policy=unweighted)
    identity = identity_of("", tokenizer, renderer, device.renderer)
    del identity["policy_hash"]
    return Speaker(engine, renderer, identity)


def resolve(source: str, *, weights: bool = True) -> Path:
    """The folder of a policy: a registered name (`turntree.policies`), the folder itself, or the local copy of a model
    on the Hub, with its weights or without."""
    if source in parts.names("policies"):
        return parts.load("policies", source).target
    return folder_of(source, weights=weights)


def load_renderer(source: str, renderer: Part = AUTO) -> tuple[PreTrainedTokenizerBase, Renderer]:
    """The tokenizer and the renderer of a policy, without its weights."""
    folder = resolve(source, weights=False)
    tokenizer = load_tokenizer(folder)
    return tokenizer, renderer_of(renderer, tokenizer, folder)


def load_policy(source: str, device: Device) -> Policy:
    """Raises `InputError` in one line when the folder, its weights or its chat template are missing, and for a model
    on the Hub that cannot be fetched. In this process it sets the threads. A carrier opens its own."""
    if device.carrier is not None:
        return parts.build("carriers", device.carrier, field="device.carrier", model=source, device=device)
    from turntree.stages.local import open_local  # loads torch, which a carrier does without

    return open_local(source, device)


def renderer_of(part: Part, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Renderer:
    renderer = parts.build("renderers", part, field="device.renderer", tokenizer=tokenizer, folder=folder)
    if part.name == AUTO.name:
        say(f"renderer {_named(renderer, part)}, by the model's folder (why: turntree check model {folder})")
    return renderer


def identity_of(
    weights: str, tokenizer: PreTrainedTokenizerBase, renderer: Renderer, part: Part = AUTO
) -> dict[str, str]:
    """By the names under which artifacts record them (`run.artifacts.POLICY`); `weights` is their name, and
    `renderer` is what `part` built."""
    return {
        "policy_hash": weights,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_hash": template_hash(tokenizer),
        "renderer": _named(renderer, part),
    }


def _named(renderer: Renderer, part: Part) -> str:
    """Ours as it describes itself: what `auto` chooses depends on the folder and on the installed packages. Another one
    by its name, its code and the options that are given."""
    if isinstance(renderer, ChatRenderer | FamilyRenderer) and part.name.partition(":")[0] in _OURS:
        return renderer.described
    options = {name: value for name, value in part.options.items() if value is not None}
    said = f" {json.dumps(options, sort_keys=True)}" if options else ""
    return f"{part.name} {parts.identity('renderers', part)}{said}"


@functools.cache
def say(text: str) -> None:
    """Once in a process: a comparison loads many policies."""
    notice(text)
