"""What torch's dispatcher finds beside the implementations of an op: its gradient, or an error where it has none.

Kernels for the Autograd keys, so that both spellings of an op have them, `moe_fp8_ext.ops.f` and `torch.ops.moe_fp8.f`.
A kernel in Python costs a call microseconds. Wrappers go past it where nothing asks for a derivative, see `bind`. A
Function goes past it once for all of its ops: `with below_autograd(): ...`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_fp8_ext.ops.checks import is_int, is_of_integers

_LIBRARY = torch.library.Library("moe_fp8", "IMPL")
_Below = torch._C._AutoDispatchBelowAutograd
_below_keys = torch._C._after_autograd_keyset
_below_writes_keys = torch._C._after_ADInplaceOrView_keyset
_is_compiling = torch.compiler.is_compiling
_any_requires_grad = torch._C._any_requires_grad
_in_functorch = torch._C._are_functorch_transforms_active
_NOTHING = nullcontext()
_KINDS = {
    "Tensor": "a tensor",
    "ScalarType": "a torch.dtype",
    "str": "a str",
    "bool": "a bool",
    "float": "a number",
    "int": "an int of 64 bits",
    "SymInt": "an int of 64 bits",
}
# Where torch takes more, as True for an int, an int for a dtype, for a bool all that is true or false, and tensors for
# numbers, which wait for the device: the class of nearly all that is right, and what else is.
_STRICT = {
    "ScalarType": (torch.dtype, lambda x: False),
    "bool": (bool, lambda x: isinstance(x, torch.SymBool)),
    "float": (float, lambda x: isinstance(x, (Real, torch.SymFloat, torch.SymInt))),
    "int": (int, is_int),
    "SymInt": (int, is_int),
}
_WRONG_KIND = re.compile(r"([\w:]+)\(\) Expected a value of type '.*' for argument '(\w+)' but instead")
_NO_SECOND = "moe_fp8_ext has no second derivatives, and create_graph=True asked for one"


def below_autograd() -> AbstractContextManager:
    """In which ops go straight to their implementations: for a Function, where gradients are off. Not where a graph is
    traced, nor where another derivative may be asked for."""
    return _NOTHING if _is_compiling() or is_transformed() else _Below()


def is_transformed() -> bool:
    """Whether another derivative than that of backward may be asked for: of forward mode, or of torch.func."""
    return forward_ad._current_level >= 0 or _in_functorch()


def asks_for_gradient(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def refuse_derivatives_of(op: str, arg: str, *tensors: Tensor) -> None:
    """For tensors that count as constants: a derivative that one asks for would be lost without a word."""
    for x in tensors:
        if asks_for_gradient(x):
            text = f"{op}: {arg} must not ask for a gradient where it is quantized (detach q and scale)"
            raise RuntimeError(f"{text}, got requires_grad=True")
        dual = not _is_compiling() and forward_ad._current_level >= 0
        if dual and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(f"{op}: {arg} must have no tangent where it is quantized, got one")


def differentiable_once(backward: Callable) -> Callable:
    """A backward that refuses to be recorded.

    Results that refuse when they are differentiated, as those of torch's once_differentiable, are not enough: they do
    not depend on the tensors of forward as autograd sees it, so that torch.autograd.grad of those goes past them, and
    what they would add is zero without a word.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        if torch.is_grad_enabled() and not _is_compiling():
            raise RuntimeError(_NO_SECOND)
        return backward(ctx, *grads)

    return wrapper


def unit_stride(grad: Tensor) -> Tensor:
    """grad itself if its rows lie in one piece each; a copy of expanded and transposed ones."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _tensors(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> list[tuple[str, Tensor]]:
    names = (argument.name for argument in op._schema.arguments)
    named = [*zip(names, args, strict=False), *kwargs.items()]
    return [(name, x) for name, x in named if isinstance(x, Tensor)]


def _refuse_tangents(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
    for arg, x in _tensors(op, args, kwargs):
        if forward_ad.unpack_dual(x).tangent is not None:
            text = f"{op._opname}: {arg} must have no tangent, as this op has no forward-mode derivative, got one"
            raise RuntimeError(text)


def _refuse_gradients(op: torch._ops.OpOverload, args: tuple, kwargs: dict, among: Sequence[str] | None = None) -> None:
    for arg, x in _tensors(op, args, kwargs):
        if asks_for_gradient(x) and (among is None or arg in among):
            raise RuntimeError(
                f"{op._opname}: {arg} must not ask for a gradient, which this op has none of (detach it, or call "
                "grouped_mm), got requires_grad=True"
            )


def refuse_derivatives(op: torch._ops.OpOverload) -> None:
    """Registers that op has none: an argument that asks for one is an error, where it would be lost without a word."""

    def kernel(keyset, *args, **kwargs):
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args, kwargs)
        if torch.is_grad_enabled() and _any_requires_grad(*args, **kwargs):
            _refuse_gradients(op, args, kwargs)
        with _Below():
            return op.redispatch(keyset & _below_keys, *args, **kwargs)

    _LIBRARY.impl(op._opname, kernel, "Autograd", with_keyset=True)


def count_writes(op: torch._ops.OpOverload) -> None:
    """Registers that op writes to its first argument: the version counter of that moves, which autograd looks at."""

    def kernel(keyset, written, *args):
        if written is not None:  # the op has the sentence for that
            torch.autograd.graph.increment_version(written)
        return op.redispatch(keyset & _below_writes_keys, written, *args)

    _LIBRARY.impl(op._opname, kernel, "ADInplaceOrView", with_keyset=True)


def register_gradient(
    op: torch._ops.OpOverload, save: Callable, backward: Callable, *, without: Sequence[str] = ()
) -> None:
    """Registers the gradient of op, all of whose arguments are positional.

    save(ctx, inputs, output) keeps what backward(ctx, *grads) needs, which returns the gradients of the first inputs.
    inputs: the arguments as they were given, without those at the end that have their defaults.
    without: arguments of floats that have none; one that asks for it is an error.
    """

    def redispatch(keyset, *args):
        with _Below():
            return op.redispatch(keyset & _below_keys, *args)

    def forward(ctx, keyset, *args):
        output = redispatch(keyset, *args)
        ctx.num_inputs = len(args)
        save(ctx, args, output)
        return output

    arguments = {argument.name for argument in op._schema.arguments}

    def gradients(ctx, *grads):
        try:
            of_inputs = backward(ctx, *grads)
        except RuntimeError as error:
            found = re.match(r"\w+: (\w+) (must .*)", str(error), re.DOTALL)
            if found is None or found[1] not in arguments:
                raise
            # Nobody called the op that makes the gradient: it is an argument of the call that was made.
            raise RuntimeError(f"{op._opname}: {found[1]} {found[2]}") from None
        return None, *of_inputs, *[None] * (ctx.num_inputs - len(of_inputs))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    function = type(f"{op._opname}_gradient", (torch.autograd.Function,), methods)

    def kernel(keyset, *args):
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args, {})
        wanted = torch.is_grad_enabled() and _any_requires_grad(*args)
        if wanted and without:
            _refuse_gradients(op, args, {}, without)
        return (function.apply if wanted else redispatch)(keyset, *args)

    _LIBRARY.impl(op._opname, kernel, "Autograd", with_keyset=True)


def refuse_sparse(op: torch._ops.OpOverload) -> None:
    """Registers that op takes none, with the sentence that other errors get."""

    def kernel(*args, **kwargs):
        for arg, x in _tensors(op, args, kwargs):
            if x.layout != torch.strided:
                raise RuntimeError(f"{op._opname}: {arg} must be a dense tensor, got {x.layout}")

    for layout in ("Sparse", "SparseCsr"):
        for backend in ("CPU", "CUDA"):
            _LIBRARY.impl(op._opname, kernel, f"{layout}{backend}")


def refuse_none(op: torch._ops.OpOverload) -> None:
    """Registers what op says where it gets no tensor at all: then no device has a word in it."""

    def kernel(*args, **kwargs):
        given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
        for argument in op._schema.arguments:
            if str(argument.type) == "Tensor" and given.get(argument.name) is None:
                raise RuntimeError(f"{op._opname}: {argument.name} must be a tensor, got None")
        for arg, x in _tensors(op, args, kwargs):
            if x.layout != torch.strided or x.is_quantized:
                kind = "one of torch's quantization" if x.is_quantized else x.layout
                raise RuntimeError(f"{op._opname}: {arg} must be a dense tensor, got {kind}")
        devices = ", ".join(sorted({str(x.device) for _, x in _tensors(op, args, kwargs)}))
        raise RuntimeError(f"{op._opname}: tensors must be of a CPU or a GPU, got {devices}")

    _LIBRARY.impl(op._opname, kernel, "CompositeExplicitAutograd")


def bind(wrapper: Callable, op: torch._ops.OpOverload) -> None:
    """Puts a function in the place of op among the globals of the wrapper's module, which the wrapper calls with all
    arguments. It goes past autograd's kernel where no derivative may be asked for, and says of an argument of a wrong
    kind what other errors say.

    Kinds that torch would take for others are looked for, its error of the rest is caught: to look for all would cost
    every good call more. So would a frame around the wrapper, or op's own: `run` is what that calls, C++.
    """
    arguments, run = op._schema.arguments, op._op
    strict, asking = [], 0  # how many arguments to look at for one that asks for a gradient
    for i, (argument, (kind, optional)) in enumerate(zip(arguments, map(_kind_of, arguments), strict=True)):
        if kind == "Tensor" and not is_of_integers(op._opname, argument.name):
            asking = i + 1
        if kind in _STRICT:
            usual, is_right = _STRICT[kind]
            strict.append((i, (usual, type(None)) if optional else (usual,), is_right))

    def bound(*args):
        for i, usual, is_right in strict:
            if args[i].__class__ not in usual and not is_right(args[i]):
                raise RuntimeError(_text_of_kind(op, arguments[i], args[i]))
        try:
            if (_any_requires_grad(*args[:asking]) and torch.is_grad_enabled()) or is_transformed():
                return run(*args)
            with _Below():
                return run(*args)
        except RuntimeError as error:
            found = _WRONG_KIND.match(str(error))
            if found is None or found[1] != op._schema.name:
                raise
        at = [argument.name for argument in arguments].index(found[2])
        raise RuntimeError(_text_of_kind(op, arguments[at], args[at]))

    bound._torchdynamo_inline = op  # what a graph traces instead: an error there is the fake implementation's
    (name,) = (name for name in wrapper.__code__.co_names if wrapper.__globals__.get(name) is op)
    wrapper.__globals__[name] = bound


def _kind_of(argument: torch.Argument) -> tuple[str, bool]:
    """And whether it may be None."""
    kind, optional = re.fullmatch(r"(?:Optional\[)?(\w+)(\]?)", str(argument.real_type)).groups()
    return kind, bool(optional)


def _text_of_kind(op: torch._ops.OpOverload, argument: torch.Argument, x: object) -> str:
    kind, optional = _kind_of(argument)
    # Of that type: an int beyond 64 bits or all floats, half a character.
    itself = x is None or type(x).__name__ in ({"float": "int"}.get(kind, kind), kind)
    wanted = f"{_KINDS[kind]}{' or None' if optional else ''}"
    return f"{op._opname}: {argument.name} must be {wanted}, got {repr(x) if itself else type(x).__name__}"
