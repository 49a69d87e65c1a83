"""Sequences longer than one GPU holds: attention of a sequence split over ranks.

    from flash_ext.integrations import distributed as cp

    tokens, labels = (cp.shard(x, group=group) for x in (tokens, labels))  # (B, S) -> (B, rows)
    positions = cp.position_ids(S, group=group, device=tokens.device)
    ...  # the model: everything but attention works on rows
    out = cp.attention(q, k, v, causal=True, group=group)  # in place of flash_ext.attention

`attention` is context parallelism by three methods, and two of them at two levels:

    functional  `attention`, and its autograd node
    graph       the same in a graph of torch.compile
    batch       `shard`, `unshard`, `position_ids`
    request     what a call asks for: its checks, and the method for it
    agree, watch    ranks that disagree raise instead of waiting
    methods     methods by name, and what "auto" takes by the model in `cost`
    gather, ring, ulysses   the methods
    plan        the mask of the whole sequence as local calls, those of documents by `packing`: the
                one place with positions
    calls       what a plan is made of: the mask, and a call
    sharding    which rows a rank has
    local       a call of the plan, on tensors
    rows        copies and sums of rows
    transport   every communication, and how collectives do it
    engines     how copies between GPUs do it: staging, and symmetric memory
    on_device   numbers of the host on a device
    kept        caches, bounded in bytes
"""

import torch.distributed

if not torch.distributed.is_available():
    raise ImportError("flash_ext.integrations.distributed needs a torch with torch.distributed")

from . import cost as cost
from .batch import position_ids, shard, unshard
from .cost import METHODS
from .functional import attention
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
