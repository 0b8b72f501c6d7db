"""Load a policy with its tokenizer, renderer and engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError, InputError
from turntree.core.progress import notice
from turntree.core.protocols import Renderer, StreamingEngine
from turntree.engine.checkpoint import (
    load_model,
    load_tokenizer,
    policy_hash,
    save_model,
    template_hash,
    tokenizer_hash,
)
from turntree.engine.compatibility import check_positions, positions_of
from turntree.engine.endpoint import EndpointEngine
from turntree.engine.hub import folder_of
from turntree.engine.limits import EndpointConfig, Prefixes
from turntree.pack.attention import set_tree_attention
from turntree.pack.head import vocabulary_size
from turntree.render.families import FamilyRenderer
from turntree.render.template import ChatRenderer
from turntree.stages.config import AUTO, HF, Device
from turntree.train.config import SFTConfig
from turntree.train.forward import set_checkpointing
from turntree.train.isolation import shares_prefixes
from turntree.train.loop import Trainee
from turntree.train.lora import add_adapter, freeze
from turntree.train.ranks import ProcessGroup
from turntree.train.sft import SFT, Example, check_head

_OURS = (AUTO.name, "template", "family")


@dataclass(frozen=True)
class Weights:
    """The argument `policy` of an engine's factory. `source` is the name or folder that it was loaded from, `prefixes`
    that of `Device`."""

    source: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    prefixes: Prefixes


@dataclass(frozen=True)
class Policy(Weights):
    """`hash` names the exact weights; a fresh adapter changes nothing yet and is not in it. `identity` names all that
    decides what is sampled from a prompt (weights, tokenizer, chat template, renderer): a profile records it, training
    and a run that goes on refuse another."""

    engine: StreamingEngine
    hash: str
    identity: dict[str, str]

    @property
    def vocabulary(self) -> int:
        """The number of tokens that it knows."""
        return vocabulary_size(self.model)

    def trains_on_trees(self, tokens: int, *, field: str, ranks: int = 1) -> bool:
        """Whether trees of paths of up to `tokens` tokens are packed (`isolation.shares_prefixes`)."""
        return shares_prefixes(self.model, tokens, self.prefixes, field=field, ranks=ranks)

    def trainee(self, shared: bool, group: ProcessGroup) -> Trainee:
        """The policy under training."""
        return Trainee(self.model, self.engine, self.renderer, shared, group)

    def reads(self, tokens: int) -> int:
        """The most tokens that it can learn from in one sequence, of at most `tokens`. Raises `InputError` for a model
        that cannot be fine-tuned."""
        check_head(self.model)
        positions = positions_of(self.model) or tokens
        check_positions(self.model, min(tokens, positions), field="sft.max_tokens")
        return positions

    def imitation(self, examples: Sequence[Example], config: SFTConfig, group: ProcessGroup) -> SFT:
        """Fine-tuning of the policy on examples."""
        return SFT(self.model, examples, config, group)

    def save(self, folder: Path) -> None:
        """Write it as a folder that `load_policy` reads."""
        save_model(self.model, self.tokenizer, folder)

    def bill(self, cost: Cost) -> dict[str, float] | None:
        """What a server asks for this cost; None where there is no server with prices."""
        return None


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
    on the Hub that cannot be fetched. Sets the threads of this process. A carrier opens its own."""
    if device.carrier is not None:
        return parts.build("carriers", device.carrier, field="device.carrier", model=source, device=device)
    folder = resolve(source)
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=device.dtype, device=device.name)
    set_threads(model, device.threads)
    weights = policy_hash(model)
    freeze(model, device.frozen)
    if device.lora is not None:
        add_adapter(model, device.lora)
    loaded = Weights(source, model, tokenizer, renderer_of(device.renderer, tokenizer, folder), device.prefixes)
    _check_stops(loaded, folder)
    engine = parts.build("engines", device.engine, field="device.engine", policy=loaded)
    _set_passes(model, device)
    identity = identity_of(weights, tokenizer, loaded.renderer, device.renderer)
    return Policy(source, model, tokenizer, loaded.renderer, device.prefixes, engine, weights, identity)


def _check_stops(loaded: Weights, folder: Path) -> None:
    """Raises `InputError` where the policy cannot say what ends its turns."""
    tokens = loaded.model.config.get_text_config().vocab_size
    if unknown := sorted(stop for stop in loaded.renderer.stop_ids if stop >= tokens):
        stop = loaded.tokenizer.convert_ids_to_tokens(unknown[0])
        problem = f"{stop!r} ends a turn, and is token {unknown[0]} of a model with {tokens}"
        raise InputError(problem, path=folder, hint="resize_token_embeddings, or use the tokenizer that came with it")


def _set_passes(model: PreTrainedModel, device: Device) -> None:
    set_tree_attention(model, device.attention)
    if device.gradient_checkpointing:
        set_checkpointing(model)


def renderer_of(part: Part, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Renderer:
    renderer = parts.build("renderers", part, field="device.renderer", tokenizer=tokenizer, folder=folder)
    if part.name == AUTO.name:
        _say(f"renderer {_named(renderer, part)}, by the model's folder (why: turntree check model {folder})")
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


# the number of CPU threads: by the model's size and the machine, unless the configuration sets it

# Number of parameters from which threads help. In small matrix products threads wait for each other longer than they
# compute (measured: up to a hundred times longer on a shared machine).
MANY = 30_000_000
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processor in a period, or "max"


def set_threads(model: PreTrainedModel, asked: int | None) -> int:
    """Set the threads of this process and print their number: the same number gives the same bits."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    count = asked or (1 if parameters < MANY else available())
    torch.set_num_threads(count)
    _say(f"{count} thread{'s' if count > 1 else ''} for {parameters / 1e6:.1f} M parameters (key device.threads)")
    return count


def available() -> int:
    """The CPUs that this process may use: by its affinity, its container's share, and at most the user's
    OMP_NUM_THREADS (which the command keeps as TURNTREE_THREADS, 0 if unset, before it sets its own)."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    said = os.environ.get("TURNTREE_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(own, _quota() or own, int(said) if said.isdecimal() and int(said) else own))


def _quota() -> int | None:
    """Whole processors of the container's share, one at least; None where it has no limit."""
    try:
        allowed, period = _QUOTA.read_text().split()
        return max(1, int(allowed) // int(period))
    except (OSError, ValueError):
        return None


@functools.cache
def _say(text: str) -> None:
    """Once in a process: a comparison loads many policies."""
    notice(text)
