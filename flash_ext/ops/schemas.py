"""The schemas of the ops. See `flash_ext.ops` for what they promise."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library

from .options import schema_options

library = Library("flash_ext", "DEF")


def define(
    signature: str, returns: str, tags: tuple[torch.Tag, ...] = (), more_options: str = ""
) -> Any:
    """Define an op that takes the options, and return its default overload."""
    name = signature.partition("(")[0]
    library.define(f"{signature}, {schema_options()}{more_options}) -> {returns}", tags=tags)
    return getattr(torch.ops.flash_ext, name).default


_TRACEABLE = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

fwd = define("fwd(Tensor q, Tensor k, Tensor v", "(Tensor out, Tensor lse)", _TRACEABLE)
bwd = define(
    "bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    _TRACEABLE,
    ", bool need_dbias=True",
)
# Asks the device what it can do, so it has no fake kernel: it is never part of a graph.
check = define(
    "check(Tensor q, Tensor k, Tensor v", "(int variant, int backward, str why, str copied)"
)

# What integrations/sdpa.py switches on and off.
library.define("sdpa_override_CUDA(bool on, bool with_out) -> ()")
