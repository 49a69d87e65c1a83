"""Every private name of torch that flash_ext uses, and what it does if torch lacks one.

Any release of torch may rename a private name. So they are looked up here, when flash_ext is
imported, and nowhere else. None is required: without one, public functions give the same results
but take more host time in every call (docs/notes/011-host-time.md). Where no public function exists
torch refuses the call; the comments below say where: gradients by torch.func, compiled autograd.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library

missing: list[str] = []
"""The names that this torch lacks; `python -m flash_ext` prints them."""


_F = TypeVar("_F", bound=Callable[..., Any])


def _find(path: str) -> Any:
    """What torch has under this name, or None."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        missing.append(path)
        return None


# --- What a call has to know ---


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _perhaps() -> bool:
    """Stands for an unknown state: a call that takes it as true goes to the dispatcher."""
    return True


def _in_dual_level() -> bool:
    return forward_ad._current_level >= 0


any_requires_grad: Callable[..., bool] = _find("torch._C._any_requires_grad") or _any_requires_grad
"""Whether any of these tensors, some of which may be None, requires a gradient."""

in_transforms: Callable[[], bool] = _find("torch._C._are_functorch_transforms_active") or _perhaps
"""Whether this is within torch.vmap or a transform of torch.func."""

in_function_mode: Callable[[], bool] = _find("torch._C._is_torch_function_mode_enabled") or _perhaps
"""Whether a TorchFunctionMode is on."""

in_dispatch_mode: Callable[[], int] = _find("torch._C._len_torch_dispatch_stack") or _perhaps
"""How many TorchDispatchModes are on."""

in_trace: Callable[[], bool] = _find("torch._C._is_tracing") or _perhaps
"""Whether torch.jit.trace records."""

in_autocast: Callable[[], bool] = _find("torch._C._is_any_autocast_enabled") or _perhaps
"""Whether autocast is on for a type of device."""

in_dual_level: Callable[[], bool] = (
    _perhaps if _find("torch.autograd.forward_ad._current_level") is None else _in_dual_level
)
"""Whether tensors may have tangents, for derivatives in forward mode."""


def _is_fake(x: Tensor) -> bool:
    return type(x).__name__ == "FakeTensor"


is_fake: Callable[[Tensor], bool] = _find("torch._subclasses.fake_tensor.is_fake") or _is_fake
"""Whether a tensor is a compiler's, without values."""


is_zero_tensor: Callable[[Tensor], bool] = _find("torch.Tensor._is_zerotensor") or (lambda x: False)
"""Whether a tensor is autograd's for zeros, which has no memory. Unknown, our kernels refuse it."""


# --- Ops ---


def entry(op: Any) -> Callable[..., Any]:
    """Calls an OpOverload directly, without OpOverload.__call__."""
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def schema(op: Any) -> str:
    """The schema of an OpOverload; "" where it cannot be had."""
    return str(getattr(op, "_schema", ""))


# --- Autograd ---

autograd_node: Callable[[], Any] = _find("torch._C._current_autograd_node") or (lambda: None)
"""The node that autograd runs on this thread, or None. Without it the gradient of a mask given to
SDPA takes the memory of all scores, as torch's own does."""


def sizes_before_expand(node: Any, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The sizes that a tensor had before the `expand` to sizes whose gradient this node of autograd
    sums. None if the node does something else, to elements of vmap one by one, or does not tell."""
    if node is None or node.name() != "ExpandBackward0":
        return None
    before = getattr(node, "_saved_self_sym_sizes", None)
    (expanded,) = getattr(node, "_input_metadata", None) or (None,)
    if before is None or tuple(getattr(expanded, "shape", ())) != sizes:
        return None
    return tuple(before)


# --- Autograd kernels ---
# torch.library.register_autograd refuses ops with keyword-only tensors.

_single_level = _find("torch.autograd.function._SingleLevelFunction")
_allow_single_level = _find("torch._functorch.utils.enable_single_level_autograd_function")
_set_tangents_enabled = _find("torch.autograd.forward_ad._set_fwd_grad_enabled")
_guard = _find("torch._C._AutoDispatchBelowAutograd")
_local = threading.local()


@contextlib.contextmanager
def _skip_next_autograd_kernel() -> Iterator[None]:
    before = getattr(_local, "skip", False)
    _local.skip = True
    try:
        yield
    finally:
        _local.skip = before


below_autograd: Callable[[], AbstractContextManager[Any]] = _guard or _skip_next_autograd_kernel
"""Within this an op skips its Autograd kernel (`register_autograd_kernel`)."""


def _after_autograd(keys: Any) -> Any:
    """The dispatch keys of a call that come after its Autograd key."""
    reached = False
    while not reached:
        key = keys.highestPriorityTypeId()
        reached = key.name.startswith("Autograd")
        keys = keys.remove(key)
    return keys


def register_autograd_kernel(library: Library, op: Any, kernel: Callable[..., Any]) -> None:
    """Let autograd call `kernel` for an op of the library."""
    name = op.overloadpacket.__name__
    if _guard is not None:
        library.impl(name, kernel, "Autograd")
        return

    def kernel_or_next(keys: Any, *tensors: Any, **options: Any) -> Any:
        if getattr(_local, "skip", False):
            _local.skip = False  # the op is called again by each transform farther out
            return op.redispatch(_after_autograd(keys), *tensors, **options)
        return kernel(*tensors, **options)

    library.impl(name, kernel_or_next, "Autograd", with_keyset=True)


def register_no_gradient(library: Library, op: Any) -> None:
    """Let an op of the library have no gradient: nothing is recorded, and its results need none.

    On the CPU the kernels are Python, whose own calls of torch would be recorded otherwise; on CUDA
    there is nothing to do, which costs no time.
    """

    def kernel(*arguments: Any, **options: Any) -> Any:
        with below_autograd():
            return op(*arguments, **options)

    register_autograd_kernel(library, op, kernel)
    library.impl(op.overloadpacket.__name__, torch.library.fallthrough_kernel, "AutogradCUDA")


_below_in_place = _find("torch._C._AutoDispatchBelowADInplaceOrView")
_after_in_place = _find("torch._C._after_ADInplaceOrView_keyset")


def below_in_place() -> AbstractContextManager[Any]:
    """Within this nothing is recorded, and versions of tensors are not counted: for code whose
    tensors that only the op has. If torch lacks the name it does nothing, which is slower."""
    return contextlib.nullcontext() if _below_in_place is None else _below_in_place()


def register_in_place(library: Library, op: Any, count: int) -> None:
    """Let autograd know that an op of the library writes into a number of its first arguments: if
    it has saved one for a backward pass, that raises. Without torch's names for it nothing is
    noticed on CUDA; on the CPU the kernels write by torch's own ops."""
    if _below_in_place is None or _after_in_place is None:
        return

    def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
        for written in arguments[:count]:
            torch.autograd.graph.increment_version(written)
        with _below_in_place():
            return op.redispatch(keys & _after_in_place, *arguments, **options)

    library.impl(op.overloadpacket.__name__, kernel, "ADInplaceOrView", with_keyset=True)


def recorder(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply, for an op's Autograd kernel.

    `apply` itself would remove the transforms of torch.func from the arguments one by one. Before
    an Autograd kernel the dispatcher has done this: only the innermost transform is left, and the
    outer ones must record the op inside. So under transforms this applies a Function of a single
    level, as torch does in its own Autograd kernels. Elsewhere it skips what `apply` does for
    transforms, which is slower than a launch.

    If torch lacks the names for this it is function.apply, which torch.func refuses. Where
    in_transforms is unknown it always has a single level, which compiled autograd refuses.
    """
    if None in (_single_level, _allow_single_level, _set_tangents_enabled):
        return function.apply

    def forward(ctx: Any, *arguments: Any) -> Any:
        with torch.enable_grad(), _set_tangents_enabled(True):
            return function.forward(ctx, *arguments)

    methods = {"forward": forward, "backward": function.backward, "jvp": function.jvp}
    methods = {name: staticmethod(method) for name, method in methods.items()}
    single_level: Any = type(function.__name__, (_single_level,), methods)
    plain = getattr(super(torch.autograd.Function, function), "apply", function.apply)

    def record(*arguments: Any) -> Any:
        if not in_transforms():
            return plain(*arguments)
        with _allow_single_level():
            return single_level.apply(*arguments)

    return record


# --- Autocast kernels ---

_exclude = _find("torch._C._ExcludeDispatchKeyGuard")
_key_set = _find("torch._C.DispatchKeySet")
_cpu = _find("torch._C.DispatchKey.AutocastCPU")
_cuda = _find("torch._C.DispatchKey.AutocastCUDA")
_autocast_keys = None if None in (_exclude, _key_set, _cpu, _cuda) else _key_set(_cpu).add(_cuda)


def below_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Within this nothing is cast for a device of this type."""
    if _autocast_keys is None:
        return torch.autocast(device_type, enabled=False)
    return _exclude(_autocast_keys)  # type: ignore[no-any-return]


# --- vmap ---
# torch.library.register_vmap refuses ops with keyword-only tensors.

_interpreter = _find("torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter")
_call_rule = _find("torch._functorch.autograd_function.custom_function_call_vmap_helper")


def register_vmap_kernel(library: Library, op: Any, rule: Callable[..., Any]) -> None:
    """Let `torch.vmap` call `rule`. If torch lacks the names for this, elements run one by one.

    Args:
        library: the library of the op.
        op: the OpOverload.
        rule: (info, in_dims, *tensors, options) to the results and their dims, as a rule of
            register_vmap; options is a dict.
    """
    if _interpreter is None or _call_rule is None:
        return

    def call(*arguments: Any) -> Any:
        *tensors, options = arguments
        return op(*tensors, **options)

    def kernel(*tensors: Any, **options: Any) -> Any:
        return _call_rule(_interpreter(), rule, call, *tensors, options)

    library.impl(op.overloadpacket.__name__, kernel, "FuncTorchBatched")


# --- Tensors that are kept ---

_disable_modes = _find("torch.utils._python_dispatch._disable_current_modes")
_disable_functorch = _find("torch._C._DisableFuncTorch")


def ordinary_tensors() -> contextlib.AbstractContextManager[object]:
    """Within this, factories make ordinary tensors, which may be kept: not tensors of inference
    mode, of a compiler's mode or of a transform of torch.func. Without torch's names for it they
    make what the caller's modes make of them."""
    stack = contextlib.ExitStack()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    if _disable_functorch is not None and in_transforms():
        stack.enter_context(_disable_functorch())
    if _disable_modes is not None and in_dispatch_mode():
        stack.enter_context(_disable_modes())
    return stack


def constant_when_compiled(function: _F) -> _F:
    """torch.compiler.assume_constant_result, which would import the compiler: a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_register_builtin = _find("torch.jit._builtins._register_builtin")


def script_as(function: Callable[..., Any], op: str) -> None:
    """Have TorchScript call an op in place of a function, which it would compile otherwise.

    Without this, torch.jit.script refuses code that calls the function.
    """
    if _register_builtin is not None:
        _register_builtin(function, op)


def version(x: Tensor) -> object:
    """A number that a write to x changes. Without torch's name for it nothing equals it."""
    return getattr(x, "_version", object())


def base_of(x: Tensor) -> Tensor:
    """The tensor that x is a view of, or x itself."""
    base = getattr(x, "_base", None)
    return x if base is None else base


_register_pytree = _find("torch.utils._pytree.register_pytree_node")
_attribute_key = _find("torch.utils._pytree.GetAttrKey")


def register_pytree(
    cls: type[Any],
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
    names: tuple[str, ...],
) -> None:
    """Let torch find the tensors, of these names, of an object of this class among arguments.
    Without torch's names for it torch.export and CUDA graphs of callables see none in it."""

    def with_keys(x: Any) -> tuple[list[Any], Any]:
        tensors, rest = flatten(x)
        return list(zip(map(_attribute_key, names), tensors, strict=True)), rest

    if _register_pytree is not None and _attribute_key is not None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        more = {"serialized_type_name": name, "flatten_with_keys_fn": with_keys}
        _register_pytree(cls, flatten, unflatten, **more)


# --- Timing ---

gpu_sleep: Callable[[int], object] = _find("torch.cuda._sleep") or (lambda cycles: None)
"""Keeps the GPU busy for this number of cycles. Without it some times include the CPU's."""


# --- Memory that the GPUs of a host share ---


class SymmetricMemory(NamedTuple):
    """Functions of torch's symmetric memory."""

    allocate: Callable[[int, torch.device], Tensor]
    """This number of bytes, uint8, that peers can map. Not from a pool: it keeps freed memory."""

    rendezvous: Callable[[Tensor, Any], Any]
    """With a process group, all ranks together: a handle with `get_buffer` and `barrier`."""


def symmetric_memory() -> SymmetricMemory | None:
    """The functions, or None if torch lacks them. Looked up late: the import is slow."""
    try:
        module = importlib.import_module("torch.distributed._symmetric_memory")
        empty = module._SymmetricMemory.empty_strided_p2p
        rendezvous = module.rendezvous
    except (ImportError, AttributeError):
        return None
    return SymmetricMemory(
        lambda size, device: empty((size,), (1,), torch.uint8, device), rendezvous
    )


# --- Groups of ranks, in graphs of torch.compile ---


def _find_process_group_of() -> Callable[[str], Any] | None:
    try:
        module = importlib.import_module("torch.distributed.distributed_c10d")
    except ImportError:  # a torch without torch.distributed
        return None
    return getattr(module, "_resolve_process_group", None)


process_group_of: Callable[[str], Any] | None = _find_process_group_of()
"""The process group of this name, or None if torch lacks this: then
`flash_ext.integrations.distributed.attention` breaks graphs."""
