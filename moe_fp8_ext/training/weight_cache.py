"""Quantized weights that calls of `grouped_mm` and `experts` share for as long as nobody writes to the parameter.

torch says that a tensor is as it was, its version counter and its storage do, but for writes that the counter does not
see. So entries outlive neither the context that asks for them nor a step of an optimizer: fused ones do not count.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moe_fp8_ext import _torch

Copies = tuple[Tensor, ...]

_is_compiling = torch.compiler.is_compiling
_PLAIN = (Tensor, Parameter)  # a subclass may hold its values elsewhere


@contextmanager
def reuse_weights() -> Iterator[None]:
    """In which `grouped_mm` and `experts` quantize a weight once and not in every call, as long as it stays the same.

        with moe_fp8_ext.reuse_weights():
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    Put it around the micro-batches of a step, or, with activation checkpointing, around forward and backward. Outputs,
    gradients and errors are the same with and without. Contexts may be nested, and hold for all threads of the process,
    because backward runs in threads of torch's own.

    What is reused are both fp8 copies of a weight, which take 2 bytes an element and scales: of a B_t that is a leaf or
    a view of one, where the leaf requires a gradient or is an `nn.Parameter`. Under `torch.autocast` the leaf is the
    weight before the cast. Weights that the caller casts or computes are quantized in every call.

    A weight is quantized again after

    - any write that its version counter sees, in place or by `load_state_dict`, under `torch.no_grad` too,
    - any step of a `torch.optim.Optimizer`, however that writes: fused ones do not count as a write,
    - any change of its memory: `.data` is assigned, its storage is replaced or moves,

    and for every recipe whose format, dtype or rounding differ, for every dtype of autocast, and for every CUDA stream.
    Entries go when their weight changes and is used again or dies, and all of them with a step of an optimizer and when
    the outermost context is left.

    What is not seen is any other write that the version counter does not see and that leaves the memory where it is:
    through `.data` (`w.data.copy_(x)`), through numpy or DLPack, by a kernel of another library, by a replayed CUDA
    graph, or by a sharded module that gathers its parameters to the same address. Leave the context before such a write
    changes a weight.

    Nothing is reused or kept while torch.compile or another tracer is at work, while a CUDA graph is captured, in
    inference mode, and of tensor subclasses. For a graph, quantize outside of it and pass what `quantize_weight`
    returns to `grouped_mm` or `experts`: a constant, whose gradient they add to main_grad. A CUDA graph reads it where
    it was at the capture: copy new values and scales there. Weights with a gradient of autograd's are quantized in the
    graph.
    `torch.utils.swap_tensors` refuses a parameter while it has an entry.

    Source: DESIGN.md section 6.
    """
    if _is_compiling():
        yield
        return
    _scope.enter()
    try:
        yield
    finally:
        _scope.leave()


def reused(quantize: Callable[..., Copies], x: Tensor, *options: Hashable) -> Copies | None:
    """quantize(x, *options), or what that has returned for this x before; None where nothing may be reused."""
    if _is_compiling():
        return None
    weights = _scope.weights
    if weights is None or _torch.state_of is None:
        return None
    leaf = _leaf(x)
    if leaf is None or _is_recorded(x):
        return None
    state, key = _torch.state_of(x), id(leaf)  # before the values are read
    weight = weights.get(key)
    if weight is None or weight.state != state:
        weight = weights[key] = _Weight(leaf, x, state)
    stream = torch.cuda.current_stream(x.get_device()).cuda_stream if x.is_cuda else None
    what = x.storage_offset(), x.shape, x.stride(), x.dtype, stream, options
    copies = weight.copies.get(what)
    if copies is None:
        copies = weight.copies[what] = quantize(x, *options)
    return copies


class _Weight:
    """The copies of one parameter in one state."""

    def __init__(self, leaf: Tensor, x: Tensor, state: tuple[int, ...]) -> None:
        self.leaf = weakref.ref(leaf, functools.partial(_forget, id(leaf)))
        self.storage = StorageWeakRef(x.untyped_storage())  # so that no other one gets its address, which is in state
        self.state = state
        self.copies: dict[Hashable, Copies] = {}


class _Scope:
    """What there is while a context is open in any thread: weights by the id of their leaf."""

    def __init__(self) -> None:
        self.weights: dict[int, _Weight] | None = None
        self.depth = 0
        self.lock = threading.Lock()

    def enter(self) -> None:
        with self.lock:
            self.depth += 1
            if self.depth == 1:
                self.weights = {}
                hooks = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
                self.hooks = [register(self.forget_all) for register in hooks]

    def leave(self) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                self.weights = None
                for hook in self.hooks:
                    hook.remove()

    def forget_all(self, *_: object) -> None:
        with self.lock:
            if self.depth:
                self.weights = {}  # a new one: a call under way in another thread may still fill the old


_scope = _Scope()


def _forget(key: int, _: weakref.ref) -> None:
    weights = _scope.weights
    if weights is not None:
        weights.pop(key, None)


def _leaf(x: Tensor) -> Tensor | None:
    """The parameter that x is, or is a view of."""
    if type(x) not in _PLAIN or x.is_inference() or x.is_neg():
        return None
    for leaf in (_torch.base_of(x), x):
        if type(leaf) in _PLAIN and leaf.is_leaf and (leaf.requires_grad or type(leaf) is Parameter):
            return leaf
    return None


def _is_recorded(x: Tensor) -> bool:
    """Whether what is computed now may only be used where it is: in a graph, or in inference mode."""
    if torch.is_inference_mode_enabled():
        return True
    if _torch.is_traced():
        return True
    if not x.is_cuda:
        return False
    with torch.cuda.device(x.get_device()):
        return torch.cuda.is_current_stream_capturing()
