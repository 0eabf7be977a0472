"""Private names of torch that the package uses, each behind a probe, with a public fallback: slower, or a refusal.

    python -c "import moe_fp8_ext._torch as t; print(t.report())"     prints which of the two is in use

`MOE_FP8_PUBLIC_TORCH=1` in the environment, when the package is imported, forces all fallbacks: so tests run them, and
so a torch that has lost a name can be told from other trouble. What is chosen is bound once, at import.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

T = TypeVar("T")
ONLY_PUBLIC = os.environ.get("MOE_FP8_PUBLIC_TORCH") == "1"


class Choice(NamedTuple):
    name: str
    purpose: str
    is_private: bool
    fallback: str


_CHOICES: list[Choice] = []


def _choose(names: str, purpose: str, private: Callable[[], T], fallback: T, meaning: str) -> T:
    """What `private` returns if torch has all that it looks up, else the fallback."""
    found, is_private = fallback, False
    if not ONLY_PUBLIC:
        try:
            found, is_private = private(), True
        except (AttributeError, ImportError):
            pass
    _CHOICES.append(Choice(names, purpose, is_private, meaning))
    return found


def report() -> str:
    """One line a name: what it is for, and whether torch has it or what happens instead."""
    lines = [f"torch {torch.__version__}"]
    for choice in _CHOICES:
        lines.append(f"{choice.name}: {choice.purpose}; {'in use' if choice.is_private else choice.fallback}")
    return "\n".join(lines)


OpOverload = type(torch.ops.aten.add.Tensor)


# ---- dispatch --------------------------------------------------------------------------------------------------------


class Keysets(NamedTuple):
    """Where kernels of the Autograd and ADInplaceOrView keys go on."""

    after_autograd: object
    after_writes: object


below_autograd = _choose(
    "torch._C._AutoDispatchBelowAutograd",
    "calls of ops that bypass the Autograd kernels",
    lambda: torch._C._AutoDispatchBelowAutograd,
    nullcontext,
    "every op passes them, a few microseconds a call",
)


def _keysets() -> Keysets:
    OpOverload.redispatch  # noqa: B018  the probe
    return Keysets(torch._C._after_autograd_keyset, torch._C._after_ADInplaceOrView_keyset)


keysets = _choose(
    "torch._C._after_autograd_keyset, _after_ADInplaceOrView_keyset, OpOverload.redispatch",
    "Autograd kernels of this package's own",
    _keysets,
    None,
    "torch.library.register_autograd; forward-mode errors and the write count of torch.ops.moe_fp8 are torch's own",
)
any_requires_grad = _choose(
    "torch._C._any_requires_grad",
    "whether an argument requires a gradient",
    lambda: torch._C._any_requires_grad,
    lambda *args, **kwargs: any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())),
    "a loop",
)
in_functorch = _choose(
    "torch._C._are_functorch_transforms_active",
    "whether torch.func may ask for another derivative",
    lambda: torch._C._are_functorch_transforms_active,
    lambda: True,
    "always assumed, so that every op passes the Autograd kernels",
)


def _forward_ad_level() -> Callable[[], bool]:
    forward_ad._current_level  # noqa: B018  the probe
    return lambda: forward_ad._current_level >= 0


in_forward_ad = _choose(
    "torch.autograd.forward_ad._current_level",
    "whether forward-mode derivatives may be asked for",
    _forward_ad_level,
    lambda: True,
    "always assumed, so that tangents are looked for in every call",
)
can_bind_ops = _choose(
    "OpOverload._op, _torchdynamo_inline",
    "wrappers that call the C++ op directly, with errors of our own for arguments of a wrong kind",
    lambda: torch.ops.aten.add.Tensor._op is not None,
    False,
    "wrappers call the op, whose errors for wrong kinds are torch's",
)


def schema_of(op: OpOverload) -> torch.FunctionSchema:
    """The schema of an op. There is no public name for it."""
    return op._schema


def name_of(op: OpOverload) -> str:
    """The name of an op, without its namespace."""
    return op._schema.name.partition("::")[2]


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _fake_tensor_test() -> Callable[[Tensor], bool]:
    import importlib.util

    if importlib.util.find_spec("torch._subclasses.fake_tensor") is None:
        raise ImportError

    def is_fake(x: Tensor) -> bool:
        from torch._subclasses.fake_tensor import FakeTensor  # not above: the import is slow

        return isinstance(x, FakeTensor)

    return is_fake


is_fake = _choose(
    "torch._subclasses.fake_tensor.FakeTensor",
    "whether a tensor has no values to validate",
    _fake_tensor_test,
    lambda x: type(x) not in (Tensor, torch.nn.Parameter),
    "contents of any subclass of Tensor are not validated",
)


def _check_symbolic(ok: torch.SymBool, message: Callable[[], str]) -> None:
    if not ok:
        raise RuntimeError(message())


check_symbolic = _choose(
    "torch._check",
    "conditions on symbolic sizes that a graph checks when it runs",
    lambda: torch._check,
    _check_symbolic,
    "a condition is decided while the graph is traced, for one size",
)


def _state() -> Callable[[Tensor], tuple[int, ...]]:
    probe = torch.empty(0)
    probe._version, probe.untyped_storage()._cdata  # noqa: B018

    def state_of(x: Tensor) -> tuple[int, ...]:
        storage = x.untyped_storage()
        return x._version, storage._cdata, storage.data_ptr()

    return state_of


state_of = _choose(
    "Tensor._version, UntypedStorage._cdata",
    "whether a weight is as it was, for reuse_weights",
    _state,
    None,
    "reuse_weights has no effect: weights are quantized in every call",
)
base_of = _choose(
    "Tensor._base",
    "the parameter that a weight is a view of, for reuse_weights",
    lambda: (torch.empty(0)._base, lambda x: x._base)[1],
    lambda x: None,
    "views of parameters are quantized in every call",
)


def _modes() -> Callable[[], bool]:
    keys = torch._C._TorchDispatchModeKey
    tracing = keys.FAKE, keys.PROXY, keys.FUNCTIONAL
    depth, mode_of = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode
    return lambda: bool(depth()) and any(mode_of(mode) for mode in tracing)


is_traced = _choose(
    "torch._C._TorchDispatchModeKey, _get_dispatch_mode, _len_torch_dispatch_stack",
    "whether a graph records what is computed, for reuse_weights",
    _modes,
    lambda: True,
    "always assumed: weights are quantized in every call",
)


def _hooks() -> Callable[[torch.nn.Module], bool]:
    names = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    probe = torch.nn.Identity()
    probe._compiled_call_impl, *(getattr(probe, name) for name in names)  # noqa: B018
    return lambda module: module._compiled_call_impl is None and not any(getattr(module, name) for name in names)


is_unwatched = _choose(
    "Module._forward_hooks and three like it, Module._compiled_call_impl",
    "whether calling a module is calling its forward, for activations of Transformers",
    _hooks,
    lambda module: False,
    "the model's own activation is called between two products",
)
grouped_mm = _choose(
    "torch._grouped_mm",
    "products in bfloat16",
    lambda: torch._grouped_mm,
    getattr(torch.nn.functional, "grouped_mm", None),
    "torch.nn.functional.grouped_mm, the same product",
)
grouped_mm_ops = _choose(
    "torch.ops.aten._grouped_mm",
    "products in bfloat16 that save_ops lists",
    lambda: [torch.ops.aten._grouped_mm.default],
    [],
    "save_ops leaves them out: they are computed again",
)


# ---- autograd and distributed ----------------------------------------------------------------------------------------


def _graph_task() -> Callable[[], bool]:
    task = torch._C._current_graph_task_id
    return lambda: task() != -1


in_backward = _choose(
    "torch._C._current_graph_task_id",
    "whether backward is running, where a checkpoint may compute forward again",
    _graph_task,
    lambda: False,
    "taken for forward: a gather in fp8 may begin with the other direction, a static exchange may check more often",
)


class WrapperSubclass(NamedTuple):
    """What a weight that FSDP2 gathers in fp8 is made with."""

    make: Callable[..., Tensor]
    no_torch_function: object
    local_tensor: Callable[[Tensor], Tensor]


def _wrapper_subclass() -> WrapperSubclass:
    from torch._C import _disabled_torch_function_impl

    return WrapperSubclass(Tensor._make_wrapper_subclass, _disabled_torch_function_impl, lambda w: w._local_tensor)


wrapper_subclass = _choose(
    "Tensor._make_wrapper_subclass, torch._C._disabled_torch_function_impl, DTensor._local_tensor",
    "weights that FSDP2 gathers in fp8",
    _wrapper_subclass,
    None,
    "gather_in_fp8_ raises",
)


def _offsets_by_values(parameter: Tensor) -> tuple[int, ...]:
    from torch.distributed.tensor import distribute_tensor

    numbers = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
    local = distribute_tensor(numbers, parameter.device_mesh, parameter.placements).to_local()
    first = int(local.flatten()[0]) if local.numel() else 0
    offsets = []
    for size in reversed(parameter.shape):
        offsets.append(first % size)
        first //= size
    return tuple(reversed(offsets))


def _offsets() -> Callable[[Tensor], tuple[int, ...]]:
    if ONLY_PUBLIC:
        raise AttributeError
    return lambda parameter: tuple(parameter.__create_chunk_list__()[0].offsets)


offsets_of = _choose(
    "DTensor.__create_chunk_list__",
    "where a rank's part of a parameter begins",
    _offsets,
    _offsets_by_values,
    "numbers of the size of the parameter are distributed to find out",
)
