"""How far trainer and bfloat16 sampler are apart where they choose other experts, and where the sampler's choice is
replayed: `python benchmarks/routes.py` prints a table, of a random Qwen3-MoE."""

import copy
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from routed import as_told, by_token, chosen
from turntree.core.completion import Completion
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.config import CreditConfig
from turntree.engine.compatibility import score
from turntree.pack.packing import pack
from turntree.train.config import LossConfig
from turntree.train.forward import slot_scores
from turntree.train.losses import loss_normalizer, policy_loss

GROUPS, SIZE, TOKENS, LAYERS = (2, 4, 8, 2) if "--quick" in sys.argv else (4, 8, 64, 8)
LOSS, SIZES = LossConfig(kl_coefficient=0.0), {"hidden_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "norm_topk_prob": True}
torch.manual_seed(0)
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "initializer_range": 0.15}
config = Qwen3MoeConfig(vocab_size=2048, **SIZES, **HEADS, **EXPERTS)
model = Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
for layer in model.model.layers:
    torch.nn.init.normal_(layer.mlp.gate.weight, std=0.15)
sampler = copy.deepcopy(model).bfloat16()
trees, credits, draw = [], [], random.Random(0)
for number in range(GROUPS):
    tree, prompt = RolloutTree(str(number)), tuple(draw.randrange(2048) for _ in range(TOKENS))
    root, rows = tree.add(None, NodeKind.PROMPT, prompt).id, torch.tensor([prompt] * SIZE)
    for _ in range(TOKENS):
        rows = torch.cat([rows, sampler(input_ids=rows).logits[:, -1].float().softmax(-1).multinomial(1)], 1)
    for ids in rows[:, TOKENS:].tolist():
        with chosen(sampler) as found:
            logprobs, _ = score(sampler, prompt, ids)
        routes = as_told(sampler, by_token(sampler, found)[:-1])
        told = Completion(token_ids=ids, logprobs=logprobs, entropies=logprobs, finish="length", routes=routes)
        tree.stop(tree.add_completion(root, told, Message("assistant", "")).id, StopReason.COMPLETED)
    rewards = Rewards({leaf: Verdict(float(draw.random() < 0.5), "drawn") for leaf in tree.leaves()})
    trees, credits = [*trees, tree], [*credits, LOSS.estimator(CreditConfig())(tree, rewards)]
(batch,) = pack(trees, credits, max_tokens=1 << 20)
print("| trainer | experts | log-probability, mean difference | largest | loss, difference |\n|---|---|---|---|---|")
for trainer, name in ((model, "float32"), (sampler, "bfloat16, packed")):
    for kind, given in (("chosen by the trainer", replace(batch, routes_BLR=None)), ("replayed", batch)):
        found_S, sampled_T = slot_scores(trainer, given).logprobs_S.float(), batch.sampling_logprobs_T.float()
        off_T = (found_S[batch.slot_T] - sampled_T).abs()
        same_S = found_S.index_copy(0, batch.slot_T, sampled_T)
        divisor = loss_normalizer([batch], LOSS)
        found, same = (float(policy_loss(x, batch, LOSS, normalizer=divisor)[0]) for x in (found_S, same_S))
        print(f"| {name} | {kind} | {off_T.mean():.4f} | {off_T.max():.3f} | {abs(found - same):.5f} |")
