"""An adapter on a frozen base: trained as exactly as whole weights are, its reference for free, on disk as PEFT's."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from random_trees import sampled_near, scored_trees
from test_parity import CASES, flat_loss, in_pieces, normalise_in_double
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from model_families import FAMILIES, family_model, seeing_model
from packed_gradient import relative_error
from tiny_models import save_tiny_checkpoint, tiny_mixture, tiny_model, tiny_tokenizer
from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.errors import ConfigError, InputError
from turntree.credit.credit import CreditRule
from turntree.engine.checkpoint import load_model, policy_hash, save_model
from turntree.engine.tokenizer import load_tokenizer
from turntree.pack.attention import set_tree_attention
from turntree.stages.config import Device
from turntree.stages.policy import load_policy
from turntree.train.forward import set_checkpointing
from turntree.train.isolation import check_path_isolation
from turntree.train.lora import AdapterOff, LoRAConfig, add_adapter, frozen_reference, reference_model
from turntree.train.losses import loss_normalizer
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.update import batch_loss, update_step

IDS = torch.arange(1, 12)[None]


def adapted(base: torch.nn.Module, *, spread: float = 0.0, **config) -> torch.nn.Module:
    """A copy of `base` with an adapter, moved off the base by `spread`."""
    model = copy.deepcopy(base)
    add_adapter(model, LoRAConfig(**{"rank": 4, "alpha": 8} | config))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for name, parameter in model.named_parameters():
            if "lora_B" in name and spread:
                parameter.normal_(std=spread)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def test_a_fresh_adapter_changes_nothing_and_is_all_that_trains() -> None:
    base = tiny_model()
    model = adapted(base)
    assert torch.equal(logits(model), logits(base))
    assert all(("lora_" in name) == p.requires_grad for name, p in model.named_parameters())


def test_the_adapter_of_the_start_is_the_same_whatever_was_drawn_before() -> None:
    base = tiny_model()
    first = adapted(base)
    torch.rand(5)
    second = adapted(base)
    states = [torch.cat([p.flatten() for p in m.parameters() if p.requires_grad]) for m in (first, second)]
    assert torch.equal(states[0], states[1]) and states[0].any()


def test_the_targets_are_the_named_modules() -> None:
    model = adapted(tiny_model(), targets=("q_proj", "v_proj"))
    trained = {name.split(".lora_")[0].rsplit(".", 1)[1] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0}, {"targets": ()}])
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LoRAConfig(**wrong)


def test_unknown_targets_and_a_second_adapter_are_refused() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=r"field 'lora\.targets'.*no_such_module"):
        add_adapter(model, LoRAConfig(targets=("no_such_module",)))
    with pytest.raises(InputError, match="already has an adapter"):
        add_adapter(adapted(tiny_model()), LoRAConfig())


def test_the_reference_is_the_base_inside_and_the_policy_again_outside() -> None:
    base = tiny_model()
    model = adapted(base, spread=0.5)
    reference = AdapterOff(model)
    before = logits(model)
    with reference_model(reference) as inside:
        assert inside is model and torch.equal(logits(inside), logits(base))
    assert torch.equal(logits(model), before) and not torch.equal(before, logits(base))
    assert any(p.requires_grad for p in model.parameters())


def test_a_fresh_adapter_s_reference_is_its_base_without_a_copy() -> None:
    model = adapted(tiny_model())
    reference = frozen_reference(model)
    assert isinstance(reference, AdapterOff) and reference.policy is model


def test_an_adapter_that_was_trained_before_is_held_near_itself_and_not_near_its_base() -> None:
    """The copy takes the memory of an adapter: the frozen base is shared."""
    model = adapted(tiny_model(), spread=0.5)
    start = logits(model)
    reference = frozen_reference(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    with reference_model(reference) as inside:
        assert torch.equal(logits(inside), start) and not torch.equal(logits(model), start)
        assert not any(p.requires_grad for p in inside.parameters())
        own = {id(p) for p in inside.parameters()} - {id(p) for p in model.parameters()}
        assert len(own) == sum(p.requires_grad for p in model.parameters()) > 0


def test_a_trained_part_beside_lora_s_matrices_makes_a_copy() -> None:
    model = adapted(tiny_model())
    model.get_output_embeddings().requires_grad_(True)
    assert not isinstance(frozen_reference(model), AdapterOff)


def test_a_policy_without_adapter_has_a_frozen_copy_as_reference() -> None:
    model = tiny_model()
    reference = frozen_reference(model)
    assert not any(p.requires_grad for p in reference.parameters())
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert not torch.equal(logits(model), logits(reference))


@pytest.mark.parametrize("memory", ["plain", "saving"])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_the_adapter_takes_the_flat_steps_with_its_base_as_the_reference(case, memory: str) -> None:
    draw = random.Random(11)
    base = tiny_model("qwen3", 24, hidden_size=32, dtype=torch.float64)
    normalise_in_double(base)
    ours, theirs = adapted(base, spread=0.1).double(), adapted(base, spread=0.1).double()
    if memory == "saving":
        set_tree_attention(ours)
        set_checkpointing(ours)
    shapes, rewards = scored_trees(draw)
    trees = [sampled_near(base, tree, draw, spread=0.2) for tree in shapes]
    rule = CreditRule(per_rollout=case.config().per_rollout_credit)
    batches = in_pieces(trees, [rule(t, r) for t, r in zip(trees, rewards, strict=True)], max_tokens=0)
    optimizer = Optimizer(ours.parameters(), OptimizerConfig(learning_rate=1e-2, max_grad_norm=1e9))
    stock = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], 1e-2, (0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        normalizer = loss_normalizer(batches, case.config())
        for batch in batches:
            batch_loss(ours, AdapterOff(ours), batch, case.config(), normalizer)[0].backward()
        stock.zero_grad()
        flat_loss(theirs, base, trees, rewards, case).backward()
        found, expected = (torch.cat([p.grad.flatten() for p in m.parameters() if p.requires_grad])
                           for m in (ours, theirs))  # fmt: skip
        assert relative_error(found, expected) <= 1e-10
        optimizer.step()
        stock.step()
    assert all(torch.equal(a, b) for a, b in zip(frozen(ours), frozen(theirs), strict=True))


def frozen(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p for p in model.parameters() if not p.requires_grad]


def test_an_update_moves_the_adapter_and_leaves_the_base() -> None:
    draw = random.Random(3)
    base = tiny_model("qwen3", 24, hidden_size=32)
    model = adapted(base)
    shapes, rewards = scored_trees(draw)
    trees = [sampled_near(base, tree, draw, spread=0.1) for tree in shapes]
    case = CASES[0]
    batches = in_pieces(trees, [CreditRule()(t, r) for t, r in zip(trees, rewards, strict=True)],
                        max_tokens=0)  # fmt: skip
    optimizer = Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-2))
    first = update_step(model, AdapterOff(model), optimizer, batches, case.config())
    second = update_step(model, AdapterOff(model), optimizer, batches, case.config())
    assert first["kl"] == pytest.approx(0.0, abs=1e-9) and second["kl"] > 1e-4
    with reference_model(AdapterOff(model)) as inside:
        assert torch.equal(logits(inside), logits(base))


def test_a_bfloat16_base_trains_an_adapter_in_single_precision() -> None:
    model = adapted(tiny_model(dtype=torch.bfloat16), spread=0.1)
    assert model.dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    set_tree_attention(model)
    check_path_isolation(model)


# on disk


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "base")


def saved(base_folder: Path, name: str = "adapter") -> tuple[torch.nn.Module, Path]:
    model = adapted(load_model(base_folder), spread=0.3)
    return model, save_model(model, load_tokenizer(base_folder), base_folder.parent / name)


def test_only_the_adapter_is_saved_and_it_comes_back_bit_by_bit(base_folder: Path) -> None:
    model, folder = saved(base_folder)
    assert not (folder / "model.safetensors").exists() and not (folder / "config.json").exists()
    loaded = load_model(folder)
    assert torch.equal(logits(loaded), logits(model)) and policy_hash(loaded) == policy_hash(model)
    assert not loaded.training and any(p.requires_grad for p in loaded.parameters())
    assert load_tokenizer(folder).chat_template


def test_the_folder_is_one_that_peft_reads(base_folder: Path) -> None:
    from peft import PeftModel

    model, folder = saved(base_folder)
    theirs = PeftModel.from_pretrained(load_model(base_folder), str(folder))
    assert torch.equal(logits(theirs), logits(model))


def test_the_same_adapter_is_the_same_file(base_folder: Path) -> None:
    first, second = (saved(base_folder, name)[1] for name in ("one", "two"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    targets = json.loads((first / "adapter_config.json").read_text())["target_modules"]
    assert targets == sorted(targets)


def test_another_scale_of_the_same_matrices_is_another_policy(base_folder: Path) -> None:
    model, folder = saved(base_folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 4 * config["lora_alpha"]}))
    assert not torch.allclose(logits(load_model(folder)), logits(model), atol=1e-2)
    assert policy_hash(load_model(folder)) != policy_hash(model)


def test_targets_that_are_one_regular_expression_stay_one(base_folder: Path) -> None:
    from peft import LoraConfig

    targets = r"model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
    model = load_model(base_folder)
    model.add_adapter(LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    folder = save_model(model, load_tokenizer(base_folder), base_folder.parent / "adapter")
    again = save_model(load_model(folder), load_tokenizer(folder), base_folder.parent / "again")
    assert json.loads((again / "adapter_config.json").read_text())["target_modules"] == targets
    assert policy_hash(load_model(again)) == policy_hash(model)


def test_an_adapter_without_its_base_or_its_weights_says_so_in_one_line(base_folder: Path) -> None:
    _, folder = saved(base_folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "some/hub-name"}))
    with pytest.raises(
        InputError, match=r"adapter_config\.json: field 'base_model_name_or_path': 'some/hub-name' is not a folder here"
    ):
        load_model(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors"):
        load_model(folder)


def test_an_adapter_of_another_shape_is_refused(base_folder: Path) -> None:
    _, folder = saved(base_folder)
    wider = tiny_model(hidden_size=96)
    wider.save_pretrained(base_folder)
    with pytest.raises(InputError, match=r"adapter: (cannot be loaded as an adapter of|does not fit)"):
        load_model(folder)


def test_weights_of_modules_that_an_adapter_s_config_does_not_name_are_not_dropped_in_silence(
    base_folder: Path,
) -> None:
    """As some servers save them: the weights of all modules, and a config that names none or few."""
    _, folder = saved(base_folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["q_proj"]}))
    with pytest.raises(InputError) as refused:
        load_model(folder)
    assert refused.value.path == folder


def test_the_kl_term_of_an_adapter_from_a_folder_begins_at_zero(base_folder: Path) -> None:
    _, folder = saved(base_folder)
    policy = load_policy(str(folder), Device())
    with reference_model(frozen_reference(policy.model)) as inside:
        assert torch.equal(logits(inside), logits(policy.model))


def test_an_adapter_trains_the_linear_modules_of_a_mixture_and_neither_its_experts_nor_its_router() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, num_experts=4, num_experts_per_tok=2, **sizes, **heads))
    before = model.eval()(input_ids=IDS).logits
    add_adapter(model, LoRAConfig(rank=4))
    trained = {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj"}
    version = sum(p._version for p in model.parameters())
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert sum(p._version for p in model.parameters()) == version, "the engine takes that for an update"


EXPERTS = ("all-linear", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[1:]], ids=["beside all that is linear", "alone"])
def test_experts_are_adapted_where_they_are_named_and_the_update_is_that_of_flat_rows(targets) -> None:
    draw = random.Random(5)
    base = tiny_mixture(24)
    model = adapted(base, spread=0.1, targets=targets)
    trained = {name.split(".lora_")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".experts" in name} and not any("gate" in name for name in trained)
    shapes, rewards = scored_trees(draw)
    trees = [sampled_near(base, tree, draw, spread=0.2) for tree in shapes]
    case = CASES[0]
    batches = in_pieces(trees, [CreditRule()(t, r) for t, r in zip(trees, rewards, strict=True)], max_tokens=0)
    normalizer = loss_normalizer(batches, case.config())
    grads = []
    for loss in (
        lambda: sum(batch_loss(model, AdapterOff(model), batch, case.config(), normalizer)[0] for batch in batches),
        lambda: flat_loss(model, base, trees, rewards, case),
    ):
        model.zero_grad()
        loss().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    assert relative_error(*grads) <= 1e-4 and grads[0].any()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_adapted_experts_come_back_from_disk_and_are_sampled_as_they_score(tmp_path: Path) -> None:
    folder = save_model(tiny_mixture(), tiny_tokenizer(), tmp_path / "base")
    model = adapted(load_model(folder), spread=0.3, targets=EXPERTS)
    there = save_model(model, load_tokenizer(folder), tmp_path / "adapter")
    loaded = load_model(there)
    assert torch.equal(logits(loaded), logits(model)) and not torch.equal(logits(loaded), logits(load_model(folder)))
    engine = load_policy(str(there), Device()).engine
    prompt = tuple(range(1, 12))
    requests = [
        GenerationRequest(prompt_ids=prompt, sampling=Sampling(max_tokens=6), seed=seed, retain=True) for seed in (1, 2)
    ]
    for found in engine.generate(requests):
        with torch.no_grad():
            scored = loaded(input_ids=torch.tensor([[*prompt, *found.token_ids]])).logits[0, 10:-1].log_softmax(-1)
        expected = scored.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found.logprobs), expected, atol=1e-5)


def test_an_adapter_leaves_alone_what_sees() -> None:
    model = seeing_model("Mistral 3, Devstral 2")
    add_adapter(model, LoRAConfig(rank=4))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 4 * 7 * 2 and all("language_model" in name for name in trained)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_leaves_every_base_alone_or_says_which_targets_do(name: str) -> None:
    try:
        add_adapter(model := family_model(name), LoRAConfig(rank=4))
    except ConfigError as error:
        if "Mamba" in str(error):  # PEFT's own words, with the name to leave out
            return
        targets = json.loads(str(error).partition("targets=")[2].rstrip("')"))
        add_adapter(model := family_model(name), LoRAConfig(rank=4, targets=tuple(targets)))
    before = [parameter._version for parameter in model.parameters()]
    model(input_ids=IDS)
    assert [parameter._version for parameter in model.parameters()] == before


def test_a_plain_folder_of_peft_has_the_tokenizer_of_its_base(base_folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    plain = get_peft_model(load_model(base_folder), LoraConfig(r=2, target_modules=["q_proj"]))
    plain.peft_config["default"].base_model_name_or_path = str(base_folder)
    plain.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "tokenizer.json").exists()
    assert load_tokenizer(tmp_path / "plain").get_vocab() == load_tokenizer(base_folder).get_vocab()
    load_policy(str(tmp_path / "plain"), Device())


def test_a_peft_that_transformers_will_not_save_with_is_refused_before_anything_is_trained(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = adapted(load_model(base_folder))
    save_model(model, load_tokenizer(base_folder), base_folder.parent / "adapter")
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "999.1")
    for refused in (lambda: adapted(tiny_model()), lambda: load_model(base_folder.parent / "adapter")):
        with pytest.raises(ConfigError, match=r"device.lora.*wants PEFT 999.1.*pip install 'peft>=999.1'"):
            refused()
