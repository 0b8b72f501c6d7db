"""Trees through models whose layers keep a state instead of every token's keys and values (linear attention, short
convolutions) or leave some of them out (windows, sinks): chain by chain, depth first. Each chain continues the state
that the chain above it left, in the model's own cache, which is copied at a fork; so every unique token is computed
once, by the model's own code for a prompt that goes on. Siblings go through it as one batch where they can.

Tensors of a cache are never written to here: a copy shares them, and gradients flow through them to the chain above.
One process only: ranks that gather a layer for every chain would have to have equally many.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from turntree.engine.routes import replayed
from turntree.pack.packing import PackedBatch
from turntree.pack.slots import chains

Span: TypeAlias = tuple[int, int]  # slots [start, end) of a chain
Below: TypeAlias = Mapping[Span | None, Sequence[Span]]  # the chains that continue each chain
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


def carried_states(decoder: PreTrainedModel, batch: PackedBatch, routes: Tensor | None) -> Tensor:
    """The hidden states [B, L, D] of all slots that a trained slot depends on; the others are zero. `routes` are those
    of the slots, as `engine.routes.replayed` takes them."""
    wanted = sorted(set(batch.predecessor_S.tolist()))
    rows: list[Tensor] = []
    for row, last in enumerate(batch.last_BL.tolist()):
        needed = [  # chains that a trained slot depends on
            span
            for span in chains(last)
            if bisect_left(wanted, row * len(last) + span[0]) < bisect_left(wanted, row * len(last) + last[span[0]])
        ]
        found = _walked(decoder, batch, row, _below(needed, last), routes)
        width, kind = decoder.config.get_text_config().hidden_size, {"dtype": decoder.dtype, "device": decoder.device}
        missing = {start: torch.zeros(end - start, width, **kind) for start, end in chains(last) if start not in found}
        rows.append(torch.cat([state for _, state in sorted((found | missing).items())]))
    return torch.stack(rows)


def _below(needed: Sequence[Span], last: Sequence[int]) -> dict[Span | None, list[Span]]:
    """The chains that continue each chain; those that begin a tree continue None."""
    below: dict[Span | None, list[Span]] = {None: []}
    path: list[Span] = []
    for span in needed:
        while path and last[path[-1][0]] <= span[0]:
            path.pop()
        below[path[-1] if path else None].append(span)
        below[span] = []
        path.append(span)
    return below


def _walked(
    decoder: PreTrainedModel, batch: PackedBatch, row: int, below: Below, routes: Tensor | None
) -> dict[int, Tensor]:
    """Hidden states [Q, D] of every chain, by its first slot."""
    tokens_L, positions = batch.tokens_BL[row], batch.positions_BL[row].tolist()
    found: dict[int, Tensor] = {}
    waiting = [(_begun(decoder), 0, group) for group in _together(below[None], below, 0, len(tokens_L))]
    while waiting:
        above, number, group = waiting.pop()
        state = _copied(above)
        rows: Any = torch.full((len(group),), number, device=tokens_L.device)
        state.reorder_cache(rows)
        tokens_NQ = pad_sequence([tokens_L[start:end] for start, end in group], batch_first=True)
        positions_1Q = positions[group[0][0]] + torch.arange(tokens_NQ.shape[1], device=tokens_L.device)[None]
        own = [] if routes is None else [routes[row, start:end] for start, end in group]
        with replayed(pad_sequence(own, batch_first=True) if own else None):
            output = decoder(input_ids=tokens_NQ, position_ids=positions_1Q, past_key_values=state, use_cache=True)
        for place, (start, end) in enumerate(group):
            found[start] = output.last_hidden_state[place, : end - start]
            groups = _together(below[start, end], below, positions[end - 1] + 1, len(tokens_L))
            waiting += [(state, place, siblings) for siblings in groups]
    return found


def _together(siblings: Sequence[Span], below: Below, depth: int, slots: int) -> list[list[Span]]:
    """Siblings that go through the model as one batch: of one length, because nothing may follow what pads a state, or
    leaves, of which none is padded to more than twice its length. Each has the keys of the `depth` tokens above it in a
    copy of its own; all copies are at most eight times the `slots` of the row, whose activations are more."""
    groups: list[list[Span]] = []
    for span in sorted(siblings, key=lambda span: (bool(below[span]), span[0] - span[1])):
        length, (start, end) = span[1] - span[0], groups[-1][0] if groups else (0, 0)
        alike = bool(groups) and bool(below[span]) == bool(below[start, end])
        least = end - start if below[span] else (end - start) / 2  # the first is the longest
        if alike and length >= least and (len(groups[-1]) + 1) * depth <= 8 * slots:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


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
