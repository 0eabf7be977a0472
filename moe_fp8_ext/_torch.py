"""Every private name of torch that the package uses, each behind a probe.

If torch lacks the name, or the name does not behave as the probe expects, a public fallback takes its place. The
fallback is slower, or it refuses a feature with an error that says so. The choice is made once, at import, so calls pay
nothing for it.

    python -c "import moe_fp8_ext._torch as t; print(t.report())"     prints every choice

`MOE_FP8_PUBLIC_TORCH=1` in the environment forces all fallbacks when the package is imported. Tests use it. If it makes
an error go away, a private name of torch has changed its meaning.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from inspect import isdatadescriptor
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

T = TypeVar("T")
ONLY_PUBLIC = os.environ.get("MOE_FP8_PUBLIC_TORCH") == "1"


class Choice(NamedTuple):
    """One line of the report."""

    names: str  # private names of torch
    purpose: str
    fallback: str  # what happens without these names; empty if the import fails
    is_private: bool  # whether the private names are in use


_CHOICES: list[Choice] = []
_LACKS = AttributeError, ImportError, RuntimeError, TypeError  # what a probe raises


def _expect(ok: bool) -> None:
    """Ends a probe whose private name does not behave as this package needs."""
    if not ok:
        raise RuntimeError


def _choose(names: str, purpose: str, fallback: T, meaning: str) -> Callable[[Callable[[], T]], T]:
    """Replaces a probe by what it returns, or by the fallback if it raises or private names are switched off."""

    def choose(probe: Callable[[], T]) -> T:
        chosen, is_private = fallback, False
        if not ONLY_PUBLIC:
            try:
                chosen, is_private = probe(), True
            except _LACKS:
                pass
        _CHOICES.append(Choice(names, purpose, meaning, is_private))
        return chosen

    return choose


def _need(names: str, purpose: str, probe: Callable[[], T]) -> T:
    """Returns what `probe` returns. No public name can replace these: without them the import fails."""
    try:
        needed = probe()
    except _LACKS as error:
        text = f"moe_fp8_ext needs {names} of torch for {purpose}, which torch {torch.__version__} lacks"
        raise ImportError(f"{text}: install a torch that this release was tested with") from error
    _CHOICES.append(Choice(names, purpose, "", True))
    return needed


def report() -> str:
    """One line for each choice: the private names, their purpose, and whether they or the fallback are in use."""
    lines = [f"torch {torch.__version__}"]
    for choice in _CHOICES:
        state = "in use" if choice.fallback else "in use, and nothing public replaces it"
        state = state if choice.is_private else f"not in use: {choice.fallback}"
        lines.append(f"{choice.names}: {choice.purpose}; {state}")
    return "\n".join(lines)


def warn_of_unused_gpus() -> None:
    """Warns that a build for the CPU has no kernels for the GPUs of this machine."""
    if (torch.version.cuda or torch.version.hip) and torch.cuda.device_count():
        text = "no nvcc or ROCm was found when it was built, or MOE_FP8_BACKEND asked for the CPU; GPU tensors raise"
        warnings.warn(f"moe_fp8_ext: this build is for the CPU, but torch sees a GPU: {text}", stacklevel=3)


# ---- dispatch --------------------------------------------------------------------------------------------------------

OpOverload = type(torch.ops.aten.add.Tensor)


def _schemas() -> Callable[[OpOverload], torch.FunctionSchema]:
    _expect([a.name for a in torch.ops.aten.add.Tensor._schema.arguments] == ["self", "other", "alpha"])
    return lambda op: op._schema


schema_of = _need("OpOverload._schema", "names and kinds of an op's arguments", _schemas)


def name_of(op: OpOverload) -> str:
    """Returns the name of an op, without its namespace."""
    return schema_of(op).name.partition("::")[2]


class Keysets(NamedTuple):
    """The dispatch keys behind an Autograd or ADInplaceOrView kernel, where that kernel calls the op again."""

    after_autograd: object
    after_writes: object


@_choose(
    "torch._C._AutoDispatchBelowAutograd",
    "calls of ops that bypass their Autograd kernels",
    nullcontext,
    "every call runs the Autograd kernels, which costs microseconds",
)
def below_autograd() -> Callable[[], AbstractContextManager]:
    with torch._C._AutoDispatchBelowAutograd():
        return torch._C._AutoDispatchBelowAutograd


@_choose(
    "torch._C._after_autograd_keyset, torch._C._after_ADInplaceOrView_keyset, OpOverload.redispatch",
    "Autograd kernels with errors of this package",
    None,
    "torch.library.register_autograd; torch itself reports forward-mode derivatives, and no write advances the version"
    " counter for torch.ops.moe_fp8",
)
def keysets() -> Keysets:
    OpOverload.redispatch  # noqa: B018  the probe
    keysets = Keysets(torch._C._after_autograd_keyset, torch._C._after_ADInplaceOrView_keyset)
    _expect(all(isinstance(keyset, torch._C.DispatchKeySet) for keyset in keysets))
    return keysets


@_choose(
    "torch._C._any_requires_grad",
    "whether an argument requires a gradient",
    lambda *args, **kwargs: any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())),
    "a loop over the arguments",
)
def any_requires_grad() -> Callable[..., bool]:
    plain, leaf = torch.empty(0, device="cpu"), torch.empty(0, device="cpu", requires_grad=True)
    private = torch._C._any_requires_grad
    _expect(private(plain, leaf) and private(None, x=leaf) and not private(plain, 1))
    return private


@_choose(
    "torch._C._are_functorch_transforms_active",
    "whether a transform of torch.func is active",
    lambda: True,
    "assumed, so every call runs the Autograd kernels",
)
def in_functorch() -> Callable[[], bool]:
    _expect(isinstance(torch._C._are_functorch_transforms_active(), bool))
    return torch._C._are_functorch_transforms_active


@_choose(
    "torch.autograd.forward_ad._current_level",
    "whether a level of forward-mode derivatives is open",
    lambda: True,
    "assumed, so every call looks for tangents",
)
def in_forward_ad() -> Callable[[], bool]:
    _expect(isinstance(forward_ad._current_level, int))
    return lambda: forward_ad._current_level >= 0


class DirectCalls(NamedTuple):
    """The C++ function of an op, and how Dynamo is told which op a function stands for."""

    function_of: Callable[[OpOverload], Callable]
    set_traced_op: Callable[[Callable, OpOverload], None]


@_choose(
    "OpOverload._op, _torchdynamo_inline",
    "wrappers that call the C++ function of an op and reword torch's errors about the kind of an argument",
    None,
    "wrappers call the op; errors about the kind of an argument are in torch's words",
)
def direct_calls() -> DirectCalls:
    _expect(callable(torch.ops.aten.add.Tensor._op))
    return DirectCalls(lambda op: op._op, lambda function, op: setattr(function, "_torchdynamo_inline", op))


# ---- tensors ---------------------------------------------------------------------------------------------------------


@_choose(
    "torch._subclasses.fake_tensor.FakeTensor",
    "whether a tensor has no values that MOE_FP8_VALIDATE=1 can read",
    lambda x: type(x) not in (Tensor, torch.nn.Parameter),
    "the contents of tensor subclasses are not validated",
)
def is_fake() -> Callable[[Tensor], bool]:
    _expect(importlib.util.find_spec("torch._subclasses.fake_tensor") is not None)

    def is_fake(x: Tensor) -> bool:
        from torch._subclasses.fake_tensor import FakeTensor  # importing it costs a second, and few programs need it

        return isinstance(x, FakeTensor)

    return is_fake


check_symbolic = torch._check  # torch's documentation of export tells users to call it, so it needs no fallback


@_choose(
    "Tensor._version, UntypedStorage._cdata",
    "whether a weight was written to since it was quantized, for reuse_weights",
    None,
    "reuse_weights has no effect: every call quantizes its weights",
)
def state_of() -> Callable[[Tensor], tuple[int, ...]]:
    def state_of(x: Tensor) -> tuple[int, ...]:
        storage = x.untyped_storage()
        return x._version, storage._cdata, storage.data_ptr()

    _expect(all(map(isdatadescriptor, (Tensor._version, torch.UntypedStorage._cdata))))
    return state_of


@_choose(
    "Tensor._base",
    "the parameter that a weight is a view of, for reuse_weights and for main gradients under Megatron's DDP",
    lambda x: None,
    "every call quantizes weights that are views, and DDP does not learn of their main gradients",
)
def base_of() -> Callable[[Tensor], Tensor | None]:
    _expect(isdatadescriptor(Tensor._base))
    return lambda x: x._base


@_choose(
    "torch._C._TorchDispatchModeKey, torch._C._get_dispatch_mode, torch._C._len_torch_dispatch_stack",
    "whether a graph is being traced, for reuse_weights",
    lambda: True,
    "assumed: every call quantizes its weights",
)
def is_traced() -> Callable[[], bool]:
    keys = torch._C._TorchDispatchModeKey
    tracing = keys.FAKE, keys.PROXY, keys.FUNCTIONAL
    depth, mode_of = torch._C._len_torch_dispatch_stack, torch._C._get_dispatch_mode

    def is_traced() -> bool:
        return bool(depth()) and any(mode_of(mode) for mode in tracing)

    for mode in tracing:
        mode_of(mode)
    _expect(isinstance(depth(), int))
    return is_traced


@_choose(
    "Module._forward_hooks, Module._forward_pre_hooks, Module._backward_hooks, Module._backward_pre_hooks,"
    " Module._compiled_call_impl",
    "whether a fused activation may replace a module of Transformers",
    lambda module: False,
    "the layer calls the model's own activation between its two products",
)
def has_no_hooks() -> Callable[[torch.nn.Module], bool]:
    names = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"

    def has_no_hooks(module: torch.nn.Module) -> bool:
        return module._compiled_call_impl is None and not any(getattr(module, name) for name in names)

    module = torch.nn.Identity()
    _expect(has_no_hooks(module))
    module.register_forward_hook(lambda *_: None)
    _expect(not has_no_hooks(module))
    return has_no_hooks


grouped_mm = _choose(
    "torch._grouped_mm",
    "products in bfloat16",
    torch.nn.functional.grouped_mm,
    "torch.nn.functional.grouped_mm",
)(lambda: torch._grouped_mm)
grouped_mm_ops = _choose(
    "torch.ops.aten._grouped_mm",
    "products in bfloat16 in the list of save_ops",
    [],
    "save_ops omits them, so a checkpoint computes them again",
)(lambda: [torch.ops.aten._grouped_mm.default])


# ---- autograd and distributed ----------------------------------------------------------------------------------------


@_choose(
    "torch._C._current_graph_task_id",
    "whether backward is running, in which a checkpoint may compute forward again",
    lambda: False,
    "never assumed: gather_in_fp8_ may gather the wrong direction first, and a static exchange may check more often",
)
def in_backward() -> Callable[[], bool]:
    task = torch._C._current_graph_task_id
    _expect(isinstance(task(), int))
    return lambda: task() != -1


@_choose(
    "torch.ops.aten._unsafe_view",
    "outputs in the shape of the tokens that are no views",
    lambda x, shape: x.view(shape).clone(),
    "outputs of MoE are copied",
)
def unsafe_view() -> Callable[[Tensor, Sequence[int]], Tensor]:
    unsafe_view = torch.ops.aten._unsafe_view.default
    _expect(unsafe_view(torch.ones(2), (2, 1)).shape == (2, 1))
    return unsafe_view


@_choose(
    "Module._apply",
    "buffers that stay float32 where a module is cast",
    torch.nn.Module,
    "casts change the bias of a Router, and bfloat16 loses small steps of it",
)
def ModuleWithFloat32() -> type[torch.nn.Module]:
    class ModuleWithFloat32(torch.nn.Module):
        """A module with a buffer, or None, that `to`, `bfloat16` and other casts move, but leave in float32."""

        in_float32: str  # the name of the buffer

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ModuleWithFloat32:
            before = getattr(self, self.in_float32)
            super()._apply(fn, recurse)
            buffer = getattr(self, self.in_float32)
            if buffer is not None and buffer.dtype != torch.float32:  # not of the values that were cast
                setattr(self, self.in_float32, before.to(buffer.device, torch.float32))
            return self

    _expect(callable(torch.nn.Module._apply))
    return ModuleWithFloat32


@_choose(
    "Module._state_dict_pre_hooks",
    "whether FSDP2 has run a module's first forward, before which it looks for hooks of weights",
    lambda module: False,
    "never assumed: if gather_in_fp8_ is called too late, the next forward raises torch's AttributeError",
)
def has_run_under_fsdp() -> Callable[[torch.nn.Module], bool]:
    """FSDP2 gives the owners of its parameters a hook in the first forward."""

    def has_run_under_fsdp(module: torch.nn.Module) -> bool:
        of = [getattr(hook, "__module__", None) or "" for hook in module._state_dict_pre_hooks.values()]
        return any(name.startswith("torch.distributed.fsdp.") for name in of)

    module = torch.nn.Identity()
    module.register_state_dict_pre_hook(lambda *_: None)
    _expect(not has_run_under_fsdp(module) and len(module._state_dict_pre_hooks) == 1)
    return has_run_under_fsdp


@_choose(
    "DistributedDataParallel._active_ddp_module",
    "an error where DDP keeps experts equal that differ between ranks",
    lambda: None,
    "DDP overwrites such experts, and nothing raises",
)
def running_ddp() -> Callable[[], torch.nn.Module | None]:
    """The DistributedDataParallel whose forward calls, or None."""
    ddp = torch.nn.parallel.DistributedDataParallel
    _expect(ddp._active_ddp_module is None)
    return lambda: ddp._active_ddp_module


class SymmetricMemory(NamedTuple):
    """Memory that all ranks of a group can read and write, and the all-to-all that moves rows of it."""

    backend: str | None
    make: Callable[..., Tensor]  # of size, dtype, device and group; every rank calls it
    dispatch: Callable[..., None]  # torch.ops.symm_mem.all_to_all_vdev_2d
    combine: Callable[..., None]  # torch.ops.symm_mem.all_to_all_vdev_2d_offset


@_choose(
    "torch.distributed._symmetric_memory",
    "experts behind the all-to-all of torch's symmetric memory",
    None,
    "integrations.symm_mem raises an error",
)
def symmetric_memory() -> Callable[[torch.device | str], SymmetricMemory]:
    """The import is slow, and names are looked up in the call: torch may lack some of them."""
    _expect(importlib.util.find_spec("torch.distributed._symmetric_memory") is not None)

    def symmetric_memory(device: torch.device | str) -> SymmetricMemory:
        import torch.distributed._symmetric_memory as memory

        def make(size: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, group: object) -> Tensor:
            made = memory.empty(size, dtype=dtype, device=device)
            memory.rendezvous(made, group)
            return made

        names = "is_nvshmem_available", "get_backend", "empty", "rendezvous"
        if not all(hasattr(memory, name) for name in names) or not memory.is_nvshmem_available():
            return SymmetricMemory(None, make, None, None)
        dispatch, combine = torch.ops.symm_mem.all_to_all_vdev_2d, torch.ops.symm_mem.all_to_all_vdev_2d_offset
        return SymmetricMemory(memory.get_backend(torch.device(device)), make, dispatch, combine)

    return symmetric_memory


@_choose(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "whether a checkpoint may leave out the last product of a layer when it computes forward again",
    lambda: False,
    "it computes that product again",
)
def hooks_saved_tensors() -> Callable[[], bool]:
    top = torch._C._autograd._top_saved_tensors_default_hooks
    _expect(top(False) is None or len(top(False)) == 2)
    return lambda: top(False) is not None


@_choose(
    "torch._C._len_torch_dispatch_stack",
    "whether something sees all ops, such as a counter of FLOPs",
    lambda: False,
    "it sees no op of a layer that a CUDA graph replays",
)
def has_dispatch_mode() -> Callable[[], bool]:
    number = torch._C._len_torch_dispatch_stack
    _expect(number() == 0)
    return lambda: number() > 0


class WrapperSubclass(NamedTuple):
    """The tensor subclass of a weight that FSDP2 gathers in FP8."""

    make: Callable[..., Tensor]
    no_torch_function: object
    local_tensor: Callable[[Tensor], Tensor]


@_choose(
    "Tensor._make_wrapper_subclass, torch._C._disabled_torch_function_impl, DTensor._local_tensor",
    "weights that FSDP2 gathers in FP8",
    None,
    "gather_in_fp8_ raises an error",
)
def wrapper_subclass() -> WrapperSubclass:
    no_torch_function = torch._C._disabled_torch_function_impl
    return WrapperSubclass(Tensor._make_wrapper_subclass, no_torch_function, lambda weight: weight._local_tensor)


def _offsets_from_values(parameter: Tensor) -> tuple[int, ...]:
    """Distributes the elements' numbers as the parameter is distributed, and reads the first that is local."""
    from torch.distributed.tensor import distribute_tensor

    numbers = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
    local = distribute_tensor(numbers, parameter.device_mesh, parameter.placements).to_local()
    first = int(local.flatten()[0]) if local.numel() else 0
    offsets = []
    for size in reversed(parameter.shape):
        offsets.append(first % size)
        first //= size
    return tuple(reversed(offsets))


@_choose(
    "DTensor.__create_chunk_list__",
    "the first element of a parameter that a rank has",
    _offsets_from_values,
    "numbers of as many elements are distributed to find it",
)
def offsets_of() -> Callable[[Tensor], tuple[int, ...]]:
    """The import of DTensor is slow, so the name is looked up in the call."""

    def offsets_of(parameter: Tensor) -> tuple[int, ...]:
        if not hasattr(parameter, "__create_chunk_list__"):
            return _offsets_from_values(parameter)
        return tuple(parameter.__create_chunk_list__()[0].offsets)

    return offsets_of
