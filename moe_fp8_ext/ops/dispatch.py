"""Python registrations of an op: its fake implementation, and its gradient, or an error if it has no gradient.

A gradient or its error is a kernel for the Autograd dispatch keys, so both spellings of an op have it,
`moe_fp8_ext.ops.f` and `torch.ops.moe_fp8.f`. A kernel in Python costs microseconds per call. A wrapper therefore
bypasses it if no argument needs a derivative (see `bind`), and an autograd Function bypasses it once for all of its ops
(see `below_autograd`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from numbers import Real
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_fp8_ext import _torch
from moe_fp8_ext._torch import OpOverload, any_requires_grad, in_forward_ad, in_functorch, keysets, name_of, schema_of
from moe_fp8_ext.ops.checks import check_tensors, fail, is_int, takes_integers

_LIBRARY = torch.library.Library("moe_fp8", "IMPL")
_Below = _torch.below_autograd
_is_compiling = torch.compiler.is_compiling
_NOTHING = nullcontext()
_differentiated: set[OpOverload] = set()  # ops whose derivative is registered
# How errors name the kinds of a schema.
_KINDS = {
    "Tensor": "a tensor",
    "ScalarType": "a torch.dtype",
    "str": "a str",
    "bool": "a bool",
    "float": "a number",
    "int": "an int of 64 bits",
    "SymInt": "an int of 64 bits",
}
# Kinds for which torch accepts too much: True for an int, an int for a dtype, any object for a bool, and tensors for
# numbers, which waits for the device. Each has the class of nearly all valid values, and a test for other valid ones.
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
    """A context in which ops run their implementations directly, without the Autograd kernels of this module.

    It is for the forward and backward of an autograd Function, where gradients are off. It has no effect while a graph
    is traced, or while a derivative of forward mode or of torch.func may be needed.
    """
    return _NOTHING if _is_compiling() or is_transformed() else _Below()


def is_transformed() -> bool:
    """Whether a derivative of forward mode or of torch.func may be needed."""
    return in_forward_ad() or in_functorch()


def needs_gradient(x: object) -> bool:
    """Whether x is a tensor that requires a gradient while gradients are enabled."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def refuse_derivatives_of(op: str, arg: str, *tensors: Tensor) -> None:
    """Raises if a tensor that is a constant of the op needs a derivative, which would be lost silently."""
    for x in tensors:
        if x.requires_grad and torch.is_grad_enabled():
            text = f"{arg} must not ask for a gradient where it is quantized (detach q and scale)"
            fail(op, f"{text}, got requires_grad=True")
    refuse_tangents_of(op, f"{arg} must have no tangent where it is quantized", *tensors)


def refuse_tangents_of(op: str, text: str, *tensors: Tensor) -> None:
    """Raises if one of the tensors, which autograd does not see, has a tangent of forward-mode AD."""
    if _is_compiling() or not in_forward_ad():
        return
    for x in tensors:
        if forward_ad.unpack_dual(x).tangent is not None:
            fail(op, f"{text}, got one")


def differentiable_once(backward: Callable) -> Callable:
    """Wraps a backward so that it raises under create_graph=True.

    torch's once_differentiable is not enough. It returns results that raise when they are differentiated. For autograd
    these results do not depend on the tensors of forward, so torch.autograd.grad with respect to those tensors bypasses
    the error and silently takes zero for what they would add.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        if torch.is_grad_enabled() and not _is_compiling():
            raise RuntimeError(_NO_SECOND)
        return backward(ctx, *grads)

    return wrapper


def unit_stride(grad: Tensor) -> Tensor:
    """Returns grad if its rows have stride 1, else a contiguous copy. Expanded and transposed gradients need one."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def reshaped(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a contiguous x in another shape. For autograd the result is a new tensor, and never a view.

    Hooks of modules, such as FSDP2's, belong to the node of the output. If a caller writes to an output that is a view,
    as in `out += x`, autograd gives the output another node. FSDP2 then returns no gradients.
    """
    return _torch.unsafe_view(x, shape)


def _by_name(op: OpOverload, args: tuple, kwargs: dict) -> dict[str, object]:
    return dict(zip((argument.name for argument in schema_of(op).arguments), args, strict=False)) | kwargs


def _tensors(op: OpOverload, args: tuple, kwargs: dict) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in _by_name(op, args, kwargs).items() if isinstance(x, Tensor)]


def _refuse_tangents(op: OpOverload, args: tuple, kwargs: dict) -> None:
    for arg, x in _tensors(op, args, kwargs):
        if forward_ad.unpack_dual(x).tangent is not None:
            fail(name_of(op), f"{arg} must have no tangent, as this op has no forward-mode derivative, got one")


def _refuse_gradients(op: OpOverload, args: tuple, kwargs: dict, among: Sequence[str] | None = None) -> None:
    for arg, x in _tensors(op, args, kwargs):
        if needs_gradient(x) and (among is None or arg in among):
            text = f"{arg} must not ask for a gradient, which this op has none of (detach it, or call grouped_mm"
            fail(name_of(op), f"{text}; run exported programs under torch.no_grad()), got requires_grad=True")


def refuse_derivatives(op: OpOverload) -> None:
    """Registers that op has no derivative, unless `register_gradient` was called for it.

    An argument that needs a derivative then raises, instead of losing it silently.
    """
    if op in _differentiated:
        return

    def kernel(keyset, *args, **kwargs):
        if in_forward_ad():
            _refuse_tangents(op, args, kwargs)
        if torch.is_grad_enabled() and any_requires_grad(*args, **kwargs):
            _refuse_gradients(op, args, kwargs)
        with _Below():
            return op.redispatch(keyset & keysets.after_autograd, *args, **kwargs)

    if keysets:
        _LIBRARY.impl(name_of(op), kernel, "Autograd", with_keyset=True)
    elif not schema_of(op).is_mutable:  # torch registers no gradient of others, nor an error in its place
        torch.library.register_autograd(schema_of(op).name, _no_gradient, setup_context=_refusal_of(op))


def _no_gradient(ctx, *grads):
    raise RuntimeError(_NO_SECOND)


def _refusal_of(op: OpOverload, among: Sequence[str] | None = None) -> Callable:
    """What torch calls, in forward, where an argument requires a gradient."""

    def setup_context(ctx, inputs: tuple, output: object, keyword_only_inputs: dict | None = None) -> None:
        with torch.enable_grad():
            _refuse_gradients(op, inputs, keyword_only_inputs or {}, among)

    return setup_context


def count_writes(op: OpOverload) -> None:
    """Registers that op writes to its first argument, so that its version counter, which autograd checks, advances."""

    def kernel(keyset, written, *args):
        if written is not None:  # the op itself raises for None
            torch.autograd.graph.increment_version(written)
        return op.redispatch(keyset & keysets.after_writes, written, *args)

    if keysets:
        _LIBRARY.impl(name_of(op), kernel, "ADInplaceOrView", with_keyset=True)


def register_gradient(op: OpOverload, save: Callable, backward: Callable, *, without: Sequence[str] = ()) -> None:
    """Registers the gradient of op, all of whose arguments are positional.

    Args:
        save: save(ctx, inputs, output) keeps what backward needs. inputs are the arguments of the call, without those
            at the end that have their defaults.
        backward: backward(ctx, *grads) returns the gradients of the first inputs.
        without: names of floating-point arguments that have no gradient; one that requires it raises.
    """

    def redispatch(keyset, *args):
        with _Below():
            return op.redispatch(keyset & keysets.after_autograd, *args)

    def forward(ctx, keyset, *args):
        output = redispatch(keyset, *args)
        ctx.num_inputs = len(args)
        save(ctx, args, output)
        return output

    arguments = {argument.name for argument in schema_of(op).arguments}

    def gradients(ctx, *grads):
        try:
            grad_inputs = backward(ctx, *grads)
        except RuntimeError as error:
            match = re.match(r"\w+: (\w+) (must .*)", str(error), re.DOTALL)
            if match is None or match[1] not in arguments:
                raise
            # The user called op, not the op of its gradient: the error names the call that the user wrote.
            raise RuntimeError(f"{name_of(op)}: {match[1]} {match[2]}") from None
        return None, *grad_inputs, *[None] * (ctx.num_inputs - len(grad_inputs))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    function = type(f"{name_of(op)}_gradient", (torch.autograd.Function,), methods)

    def kernel(keyset, *args):
        if in_forward_ad():
            _refuse_tangents(op, args, {})
        is_recorded = torch.is_grad_enabled() and any_requires_grad(*args)
        if is_recorded and without:
            _refuse_gradients(op, args, {}, without)
        return (function.apply if is_recorded else redispatch)(keyset, *args)

    def setup_context(ctx, inputs, output):
        _refusal_of(op, without)(ctx, inputs, output)
        ctx.num_inputs = len(inputs)
        save(ctx, inputs, output)

    _differentiated.add(op)
    if keysets:
        _LIBRARY.impl(name_of(op), kernel, "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(
            schema_of(op).name, lambda ctx, *grads: gradients(ctx, *grads)[1:], setup_context=setup_context
        )


def fake(op: OpOverload) -> Callable[[Callable], None]:
    """Registers the implementation of op for tensors without values.

    It is called with the name of the op, then all arguments by name; the schema has their defaults. Every tensor has
    then been checked against the table of arguments. The implementation checks all else.
    """
    defaults = {a.name: a.default_value for a in schema_of(op).arguments if a.has_default_value()}
    required = [a.name for a in schema_of(op).arguments if str(a.type) == "Tensor"]

    def register(implementation: Callable) -> None:
        def run(*args, **kwargs):
            given = defaults | _by_name(op, args, kwargs)
            check_tensors(name_of(op), given, required)
            return implementation(name_of(op), **given)

        torch.library.register_fake(schema_of(op).name)(run)

    return register


def python_op(name: str, fake: Callable) -> Callable[[Callable], OpOverload]:
    """Registers a function of Python as the op `name`, which has no derivative. Returns the overload.

    `torch.library.custom_op` does the same and watches the results of every call, which takes longer than many ops do.
    So the function must return new tensors, and must write to none of its arguments.

    Args:
        fake: the implementation for tensors without values.
    """

    def register(function: Callable) -> OpOverload:
        schema = torch.library.infer_schema(function, mutates_args=())
        torch.library.define(name, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(name, "default", function)
        torch.library.register_fake(name, fake)
        namespace, _, own_name = name.partition("::")
        return getattr(getattr(torch.ops, namespace), own_name).default

    return register


def refuse_none(op: OpOverload) -> None:
    """Registers the errors of calls that no device's kernel takes: sparse tensors, or no tensor at all."""

    def kernel(*args, **kwargs):
        given = _by_name(op, args, kwargs)
        for argument in schema_of(op).arguments:
            if str(argument.type) == "Tensor" and given.get(argument.name) is None:
                fail(name_of(op), f"{argument.name} must be a tensor, got None")
        for arg, x in _tensors(op, args, kwargs):
            if x.layout != torch.strided or x.is_quantized:
                kind = "one of torch's quantization" if x.is_quantized else x.layout
                fail(name_of(op), f"{arg} must be a dense tensor, got {kind}")
        devices = ", ".join(sorted({str(x.device) for _, x in _tensors(op, args, kwargs)}))
        fail(name_of(op), f"tensors must be of a CPU or a GPU, got {devices}")

    _LIBRARY.impl(name_of(op), kernel, "CompositeExplicitAutograd")


def bind(wrapper: Callable, op: OpOverload) -> None:
    """Replaces op, among the globals of the wrapper's module, by a function that is faster and has better errors.

    The wrapper calls op with all of its arguments. The replacement bypasses the Autograd kernel if no derivative can be
    needed. If an argument is of a wrong kind, it raises an error worded as the others.

    Kinds that torch would convert silently are tested before the call. For other kinds torch's own error is caught and
    reworded: testing them too would slow down every valid call. For the same reason nothing wraps the wrapper, and the
    replacement calls the C++ function of op, and not op.
    """
    if _torch.direct_calls is None:
        return
    arguments, run = schema_of(op).arguments, _torch.direct_calls.function_of(op)
    strict, num_candidates = [], 0  # arguments that may require a gradient are among the first num_candidates
    for i, (argument, (kind, optional)) in enumerate(zip(arguments, map(_kind_of, arguments), strict=True)):
        if kind == "Tensor" and not takes_integers(name_of(op), argument.name):
            num_candidates = i + 1
        if kind in _STRICT:
            usual_class, is_valid = _STRICT[kind]
            strict.append((i, (usual_class, type(None)) if optional else (usual_class,), is_valid))

    def bound(*args):
        for i, usual_classes, is_valid in strict:
            if args[i].__class__ not in usual_classes and not is_valid(args[i]):
                _refuse_kind(op, arguments[i], args[i])
        try:
            if (any_requires_grad(*args[:num_candidates]) and torch.is_grad_enabled()) or is_transformed():
                return run(*args)
            with _Below():
                return run(*args)
        except RuntimeError as error:
            match = _WRONG_KIND.match(str(error))
            if match is None or match[1] != schema_of(op).name:
                raise
        i = [argument.name for argument in arguments].index(match[2])
        _refuse_kind(op, arguments[i], args[i])

    # A graph traces op instead, and errors there come from the fake implementation.
    _torch.direct_calls.set_traced_op(bound, op)
    (name,) = (name for name in wrapper.__code__.co_names if wrapper.__globals__.get(name) is op)
    wrapper.__globals__[name] = bound


def _kind_of(argument: torch.Argument) -> tuple[str, bool]:
    """The kind of an argument, and whether it may be None."""
    kind, optional = re.fullmatch(r"(?:Optional\[)?(\w+)(\]?)", str(argument.real_type)).groups()
    return kind, bool(optional)


def _refuse_kind(op: OpOverload, argument: torch.Argument, x: object) -> NoReturn:
    """Raises the error for x as an argument of a wrong kind."""
    kind, optional = _kind_of(argument)
    # A value of the right type may still be wrong: an int beyond 64 bits or beyond all floats, half a surrogate pair.
    show_value = x is None or type(x).__name__ in ({"float": "int"}.get(kind, kind), kind)
    expected = f"{_KINDS[kind]}{' or None' if optional else ''}"
    fail(name_of(op), f"{argument.name} must be {expected}, got {repr(x) if show_value else type(x).__name__}")
