"""What the mask function of `transformers.py` gives the models: a description of the mask.

The attention function reads the description. Some models compute part of their attention, or all of
it, by themselves, and add the mask to scores. For them the description acts as the tensor that it
describes, in the form of transformers' eager attention: they compute the same as with
attn_implementation="eager", and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..cpu.mask import band

_COMPARE = ("bool", "eq", "ne", "lt", "le", "gt", "ge")
_CONTAIN = ("getitem", "len", "iter", "contains")
_COMPUTE = ("neg", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul")
_COMBINE = ("invert", "and", "rand", "or", "ror", "xor", "rxor")
"""The operators of tensors; Python looks for them in the class, never in __getattr__."""


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query sees, in fewer than B · Sq · Sk numbers.

    It can be used as a tensor: (B, 1, Sq, Sk), of `dtype`, 0 where a query sees a key and the least
    finite number elsewhere, to be added to the scores.
    """

    shape: tuple[int, int, int, int]
    """(B, 1, Sq, Sk)."""
    causal: bool
    window: tuple[int, int] = (-1, -1)
    """Aligned bottom-right like causal, as in `flash_ext.attention`."""
    seqlen_k: int | None = None
    """The keys that are aligned so, if not all: no query sees those after them."""
    padding: Tensor | None = None
    """bool (B, Sk): False hides the key."""
    cu_seqlens: Tensor | None = None
    """int32 (n + 1): the B · S tokens, row after row, as n sequences that do not see each other."""
    seqused_k: Tensor | None = None
    """int32: the same as padding. With cu_seqlens (n): 0 where the sequence is padding. Else (B):
    the keys that come before the padding. Without padding, of a static cache: the keys that are
    there, with the last of which causal is aligned."""
    dense: Tensor | None = None
    """bool (B, 1, Sq, Sk), the whole mask, where nothing shorter describes it."""
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    @property
    def ndim(self) -> int:
        """4."""
        return len(self.shape)

    def dim(self) -> int:
        """4."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor, without creating it."""
        size = torch.Size(self.shape)
        return size if dim is None else size[dim]

    def contiguous(self) -> Mask:
        """Itself, as of a tensor."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """On another device, for layers that are spread over several; another dtype: a tensor."""
        target = args[0] if args else kwargs.get("device")
        if not isinstance(target, (torch.device, str, int)):
            return self.as_tensor().to(*args, **kwargs)
        device = torch.device(target)
        if device == torch.device(self.device):
            return self
        moved = {x.name: getattr(self, x.name) for x in fields(self) if x.type == "Tensor | None"}
        moved = {name: x if x is None else x.to(device) for name, x in moved.items()}
        return replace(self, device=device, **moved)

    def visible(self) -> Tensor:
        """bool (B, 1, Sq, Sk): True where the query sees the key."""
        if self.dense is not None:
            return self.dense
        batch, _, rows, keys = self.shape
        end = keys if self.seqlen_k is None else self.seqlen_k
        device = torch.device(self.device)
        if self.seqused_k is not None and self.padding is None:
            query = torch.arange(rows, device=device)[:, None] - rows
            return torch.arange(keys, device=device) <= query + self.seqused_k[:, None, None, None]
        visible = band(rows, end, self.causal, *self.window).visible(0, rows, 0, keys, device)
        visible = visible & (torch.arange(keys, device=device) < end)
        visible = visible.expand(batch, 1, rows, keys)
        if self.padding is not None:
            visible = visible & self.padding[:, None, None]
        elif self.cu_seqlens is not None:
            token = torch.arange(batch * keys, device=device)
            ids = torch.searchsorted(self.cu_seqlens, token, right=True).view(batch, 1, keys)
            visible = visible & (ids[..., None] == ids[:, :, None])
        return visible

    def as_tensor(self) -> Tensor:
        """(B, 1, Sq, Sk) of `dtype`, as transformers' eager_mask returns it; read-only."""
        return self._new_tensor() if torch.compiler.is_compiling() else self._tensor

    @cached_property
    def _tensor(self) -> Tensor:
        warnings.warn(
            "flash_ext: this model uses its attention mask by itself and gets the tensor of eager "
            "attention. What it does not take from transformers.AttentionInterface it computes as "
            "with attn_implementation='eager'.",
            stacklevel=4,
        )
        return self._new_tensor()

    def _new_tensor(self) -> Tensor:
        visible = self.visible()
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return mask.masked_fill(~visible, torch.finfo(self.dtype).min)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name.endswith("_"):
            self._refuse_writes()
        return getattr(self.as_tensor(), name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse_writes()

    def _refuse_writes(self) -> NoReturn:
        raise TypeError(
            "flash_ext: this model writes to its attention mask: use another attn_implementation"
        )

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = {name: _as_tensors(x) for name, x in (kwargs or {}).items()}
        return function(*_as_tensors(args), **named)


def _as_tensors(x: Any) -> Any:
    """x, which may hold masks, with their tensors."""
    if isinstance(x, (tuple, list)):
        return type(x)(map(_as_tensors, x))
    return x.as_tensor() if isinstance(x, Mask) else x


def _of_tensor(name: str) -> Callable[..., Any]:
    def operator(self: Mask, *args: Any) -> Any:
        return getattr(self.as_tensor(), name)(*args)

    return operator


for _name in (*_COMPARE, *_CONTAIN, *_COMPUTE, *_COMBINE):
    setattr(Mask, f"__{_name}__", _of_tensor(f"__{_name}__"))
