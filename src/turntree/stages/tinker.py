"""`--carrier tinker`: the policy of a stage on a server of Tinker's API (`engine.tinker`).

`model` in the folder of a run holds the tokenizer and `tinker.json`, which says where the server has the adapter:
`--model RUN/model` samples from it and trains on, and `turntree models get RUN/model` fetches it in PEFT's format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from turntree.core.config import from_mapping, to_mapping
from turntree.core.cost import Cost
from turntree.core.errors import ConfigError, InputError
from turntree.engine.hub import context_of
from turntree.engine.limits import TinkerConfig
from turntree.engine.tinker import ALPHA, TinkerAdapter, TinkerEngine, TinkerSession
from turntree.engine.tokenizer import ADAPTER, ADAPTER_WEIGHTS, load_tokenizer
from turntree.run.files import replacing_folder, write_json
from turntree.run.jsonl import read_config
from turntree.stages.config import Device
from turntree.stages.policy import Policy, identity_of, renderer_of, resolve
from turntree.train.config import LoRAConfig, SFTConfig
from turntree.train.ranks import ProcessGroup
from turntree.train.sft import Example
from turntree.train.tinker import STATE, TinkerSFT, TinkerTrainee


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What `tinker.json` says of an adapter: the base by our name and by the server's, where its weights lie for
    training and for sampling, and its rank."""

    base: str
    base_model: str
    weights: str
    sampler: str
    rank: int


def open_policy(model: str, device: Device, config: TinkerConfig) -> Policy:
    """The policy `model` on a server: a base that it serves, or what a run with this carrier has trained."""
    folder = resolve(model, weights=False)
    found = _trained(folder) if (folder / STATE).is_file() else None
    base = resolve(found.base, weights=False) if found else folder
    lora = device.lora or LoRAConfig(rank=found.rank if found else 16, alpha=ALPHA)
    _require_lora(lora, found)
    named = [found.base_model] if found else [str(folder), str(folder.resolve()), model]
    session = TinkerSession(config, [config.base_model] if config.base_model else named)
    tokenizer = load_tokenizer(folder)
    renderer = renderer_of(device.renderer, tokenizer, folder)
    row = read_config(base / "config.json")
    vocabulary = int(row.get("text_config", row)["vocab_size"])
    context = session.max_context or context_of(base)
    if context is None:
        raise InputError("says nowhere how long its context is", path=base / "config.json")
    adapter = TinkerAdapter(session, lora.rank, found.weights if found else None)
    sampler = adapter.sampler(found.sampler) if found else session.sampler()
    engine = TinkerEngine(session, sampler, renderer.stop_ids, vocabulary, context)
    name = f"tinker:{found.sampler if found else session.base_model}"
    return TinkerPolicy(
        source=model,
        model=adapter,  # pyright: ignore[reportArgumentType]
        tokenizer=tokenizer,
        renderer=renderer,
        prefixes=device.prefixes,
        engine=engine,
        hash=name,
        identity=identity_of(name, tokenizer, renderer, device.renderer),
        base=found.base if found else model,
        start=sampler,
        known=vocabulary,
    )


def get_adapter(run: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """`turntree models get`: write the adapter of `run`, a `model` folder that a run with this carrier wrote, in PEFT's
    format with its tokenizer, from the server at TINKER_BASE_URL. It names the base as the run did, so that `--model
    OUT` needs no server. Raises `InputError` where `run` names no adapter or the folder is there."""
    from turntree.engine.checkpoint import load_model, policy_hash  # loads torch, which a carrier does without

    if not (run / STATE).is_file():
        hint = "name RUN/model of a run with --carrier tinker; a model on the Hub needs no folder: --model OWNER/NAME"
        raise InputError("names no adapter on a server", path=run, hint=hint)
    _require_new(out, overwrite)
    found = _trained(run)
    session = TinkerSession(TinkerConfig(), [found.base_model])
    with contextlib.closing(session), replacing_folder(out) as fresh:
        session.fetch(found.sampler, fresh)
        settings = read_config(fresh / ADAPTER) | {"base_model_name_or_path": str(resolve(found.base))}
        settings["target_modules"] = settings.get("target_modules") or adapted(fresh / ADAPTER_WEIGHTS)
        write_json(fresh / ADAPTER, settings)
        load_tokenizer(run).save_pretrained(fresh)
    model = load_model(out)
    return {"model": str(out), "parameters": model.num_parameters(), "policy_hash": policy_hash(model)}


def _require_new(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise InputError("exists already", path=out, hint="pass --overwrite to replace it")
    held = list(out.iterdir()) if out.is_dir() else []
    configs = [path for path in held if path.name in ("config.json", ADAPTER)]
    if held and not (configs and all(path.is_file() for path in held)):
        raise InputError("holds more than a model, and would be replaced", path=out, hint="choose another --out")


def adapted(weights: Path) -> list[str]:
    """The names of the modules that an adapter's file has weights of. SkyRL's config leaves them open, and PEFT would
    then take those that are usual for the architecture (q and v) and drop the weights of all others."""
    with safe_open(weights, framework="np") as held:
        names: list[str] = held.keys()
    return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names})


def _require_lora(lora: LoRAConfig, found: Trained | None) -> None:
    """Raise `ConfigError` for an adapter that the API has no words for."""
    usual = "leave it out: a Tinker server adapts all linear modules but the head"
    wrong = {
        "alpha": (lora.alpha != ALPHA, f"set it to {ALPHA}: a Tinker server scales by {ALPHA} over the rank"),
        "targets": (lora.targets != LoRAConfig().targets, usual),
        "rank": (found is not None and lora.rank != found.rank, f"the adapter of --model has {found and found.rank}"),
    }
    for name, (is_wrong, hint) in wrong.items():
        if is_wrong:
            raise ConfigError(f"is {getattr(lora, name)}", field=f"device.lora.{name}", hint=hint)


def _trained(folder: Path) -> Trained:
    return from_mapping(Trained, read_config(folder / STATE), path=folder / STATE)


@dataclass(frozen=True, kw_only=True)
class TinkerPolicy(Policy):
    """`model` is the adapter on the server; `base` names the model that it adapts, `start` the weights that samplers
    began with (None: the base's); `known` is the number of its tokens."""

    base: str
    start: Any
    known: int

    @property
    def adapter(self) -> TinkerAdapter:
        adapter: Any = self.model
        return adapter

    @property
    def vocabulary(self) -> int:
        return self.known

    def trains_on_trees(self, tokens: int, *, field: str, ranks: int = 1, reference: Any = None) -> bool:
        return False

    def reads(self, tokens: int) -> int:
        return self.engine.max_context

    def open_reference(self, source: str, device: Device) -> tuple[Any, str]:
        """One that a run with this carrier has trained, or the base."""
        folder = resolve(source, weights=False)
        path = _trained(folder).sampler if (folder / STATE).is_file() else None
        if path is None and source != self.base:
            hint = f"name a folder that a run with this carrier has written, or its base {self.base}"
            raise InputError("is not on the server", path=folder, field="reference", hint=hint)
        return self.adapter.session.sampler(path), f"tinker:{path or self.adapter.session.base_model}"

    def trainee(self, shared: bool, group: ProcessGroup, reference: Any = None) -> TinkerTrainee:
        return TinkerTrainee(self.model, self.engine, self.renderer, shared, group, reference or self.start)

    def imitation(self, examples: Sequence[Example], config: SFTConfig, group: ProcessGroup) -> TinkerSFT:
        return TinkerSFT(self.adapter, examples, config)

    def save(self, folder: Path) -> None:
        adapter = self.adapter
        with replacing_folder(folder) as fresh:
            self.tokenizer.save_pretrained(fresh)
            weights, sampler = adapter.save("model"), adapter.save_for_sampling("model")
            served = adapter.session.base_model
            row = Trained(base=self.base, base_model=served, weights=weights, sampler=sampler, rank=adapter.rank)
            write_json(fresh / STATE, to_mapping(row))

    def bill(self, cost: Cost) -> dict[str, float] | None:
        return self.adapter.session.config.prices.bill(cost)
