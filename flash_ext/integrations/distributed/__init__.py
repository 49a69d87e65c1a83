"""Sequences longer than one GPU holds: attention of a sequence split over ranks.

    from flash_ext.integrations import distributed as cp

    tokens, labels = (cp.shard(x, group=group) for x in (tokens, labels))  # (B, S) -> (B, rows)
    positions = cp.position_ids(S, group=group, device=tokens.device)
    ...  # the model: everything but attention works on rows
    out = cp.attention(q, k, v, causal=True, group=group)  # in place of flash_ext.attention

`attention` is context parallelism by three methods, and two of them at two levels:

    functional  what people call, and `attention` in a graph of torch.compile
    request     what a call asks for: its checks; ranks that disagree raise instead of waiting
    methods     methods by name, and what "auto" takes by the model in `cost`
    algorithms  the methods: all-gather, ring, Ulysses
    plan        the mask of the whole sequence as local calls (by `packing` for documents): the
                one place with positions
    sharding    which rows a rank has
    local       a call of the plan, on tensors
    transport   every communication, and how collectives do it; copies and sums of rows
    engines     how copies between GPUs do it, in memory that `symmetric` finds
    on_device   numbers of the host on a device, their caches, and streams
"""

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("flash_ext.integrations.distributed needs a torch with torch.distributed")

from . import cost as cost
from .cost import METHODS
from .functional import attention, position_ids, shard, unshard
from .sharding import LAYOUTS, Sharding, sharding

__all__ = [
    "LAYOUTS",
    "METHODS",
    "Sharding",
    "attention",
    "position_ids",
    "shard",
    "sharding",
    "unshard",
]
