"""Trees through models whose layers keep a state instead of every token's keys and values (linear attention, short
convolutions) or leave some of them out (windows, sinks): chain by chain, depth first. Each chain continues the state
that the chain above it left, in the model's own cache, which is copied at a fork; so every unique token is computed
once, by the model's own code for a prompt that goes on.

Tensors of a cache are never written to here: a copy shares them, and gradients flow through them to the chain above.
One process only: ranks that gather a layer for every chain would have to have equally many.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from turntree.pack.packing import PackedBatch
from turntree.pack.slots import chains

_CARRIES = "turntree_carries"


def set_carried(model: PreTrainedModel, carried: bool) -> None:
    """Whether packed trees go through `model` chain by chain."""
    setattr(model, _CARRIES, carried)


def is_carried(model: PreTrainedModel) -> bool:
    return getattr(model, _CARRIES, False)


class _State(DynamicCache):
    """Keeps recurrent states as they are given; the stock one copies them into place, over what a sibling reads."""

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        layer: Any = self.layers[layer_idx]
        layer.recurrent_states[state_idx] = recurrent_states
        layer.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


def carried_states(decoder: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """The hidden states [B, L, D] of all slots that a trained slot depends on; the others are zero."""
    wanted = sorted(set(batch.predecessor_S.tolist()))
    width = decoder.config.get_text_config().hidden_size
    rows: list[Tensor] = []
    for row, last in enumerate(batch.last_BL.tolist()):
        found: list[Tensor] = []
        above: list[tuple[int, _State]] = []  # the chains that this one is below: where they end, and what they left
        for start, end in chains(last):
            while above and above[-1][0] <= start:
                above.pop()
            tokens_1Q = batch.tokens_BL[row : row + 1, start:end]
            if bisect_left(wanted, row * len(last) + start) == bisect_left(wanted, row * len(last) + last[start]):
                found.append(torch.zeros(end - start, width, dtype=decoder.dtype, device=tokens_1Q.device))
                continue
            state = _copied(above[-1][1]) if above else _begun(decoder)
            positions_1Q = batch.positions_BL[row : row + 1, start:end]
            output = decoder(input_ids=tokens_1Q, position_ids=positions_1Q, past_key_values=state, use_cache=True)
            found.append(output.last_hidden_state[0])
            if last[start] > end:
                above.append((last[start], state))
        rows.append(torch.cat(found))
    return torch.stack(rows)


def _begun(decoder: PreTrainedModel) -> _State:
    state = _State(config=decoder.config)
    layers: list[Any] = state.layers
    for layer in layers:
        if hasattr(layer, "conv_states"):
            layer.activate_past_recording()  # which keeps the states of a convolution as they are given, too
    return state


def _copied(state: _State) -> _State:
    copied = copy.copy(state)
    layers: list[Any] = [copy.copy(layer) for layer in state.layers]
    copied.layers = layers
    for layer in layers:
        for name, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(layer, name, dict(value))
        for number, kept in getattr(layer, "conv_states", {}).items():
            if kept is not None:
                layer.conv_states[number] = kept[..., -layer.conv_kernel_size[number] :]
    return copied
