"""A cache of quantized weights, which calls of `grouped_mm` and `experts` share until the parameter changes.

The version counter of a parameter and its storage tell whether it changed. Some writes do not move the counter, such as
writes of fused optimizers. So every optimizer step drops all weights except frozen ones of no group of the optimizer,
and leaving the context that asked for the cache empties it.
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
_PLAIN = (Tensor, Parameter)  # other subclasses may hold their values in other tensors


@contextmanager
def reuse_weights() -> Iterator[None]:
    """Lets `grouped_mm` and `experts` quantize a weight once, and again only after the weight has changed.

        with moe_fp8_ext.reuse_weights():
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    Put it around the micro-batches of a step. If you use activation checkpointing, put it around forward and backward.
    Outputs, gradients and errors do not change. Contexts may be nested, and affect all threads of the process, because
    torch runs backward in its own threads.

    Both fp8 copies of a weight are reused. They take 2 bytes an element, and scales. A weight is reused if it is a leaf
    or a view of one, and the leaf requires a gradient or is an `nn.Parameter`. Under `torch.autocast` the leaf is the
    weight before the cast. A weight that the caller casts or computes is quantized in every call.

    A weight is quantized again after

    - any write that its version counter sees: in place or by `load_state_dict`, also under `torch.no_grad`,
    - any step of a `torch.optim.Optimizer`, including fused optimizers, whose writes the version counter does not see.
      A weight that needs no gradient and that the optimizer does not own stays: it is quantized once for all steps,
    - any change of its memory: `.data` is assigned, or its storage is replaced or moves.

    It is quantized once for each format, dtype and rounding of a recipe, each dtype of autocast and each CUDA stream.
    The copies are freed when the weight is used again after a change, when the weight is freed, at an optimizer step as
    above, and when the outermost context is left.

    The cache misses a write that neither moves the version counter nor changes the address of the memory. Leave the
    context before such a write changes a weight:

    - a write through `.data` (`w.data.copy_(x)`), numpy or DLPack,
    - a write by a kernel of another library, or by a replayed CUDA graph,
    - a sharded module that gathers its parameters to the same address.

    Nothing is reused or kept under torch.compile or another tracer, while a CUDA graph is captured, in inference mode,
    and for tensor subclasses. To reuse a weight in a graph, pass the result of `quantize_weight` to `grouped_mm` or
    `experts`, with main_grad if the weight is trained. A CUDA graph reads it at the address of the capture: copy new
    values and scales there by `Quantized.copy_`.

    `torch.utils.swap_tensors` refuses a parameter while the cache has copies of it.

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
    """Returns quantize(x, *options), or its result of an earlier call for the same x. None if x must not be reused."""
    if _is_compiling():
        return None
    weights = _scope.weights
    if weights is None or _torch.state_of is None:
        return None
    leaf = _leaf(x)
    if leaf is None or _forbids_reuse(x):
        return None
    state, key = _torch.state_of(x), id(leaf)  # the state is taken before the values are read
    weight = weights.get(key)
    if weight is None or weight.state != state:
        weight = weights[key] = _Weight(leaf, x, state)
    stream = torch.cuda.current_stream(x.get_device()).cuda_stream if x.is_cuda else None
    view = x.storage_offset(), x.shape, x.stride(), x.dtype, stream, options
    copies = weight.copies.get(view)
    if copies is None:
        copies = weight.copies[view] = quantize(x, *options)
    return copies


class _Weight:
    """The copies of one parameter in one state, by view and options."""

    def __init__(self, leaf: Tensor, x: Tensor, state: tuple[int, ...]) -> None:
        self.leaf = weakref.ref(leaf, functools.partial(_forget, id(leaf)))
        # Holds the storage's address, which is part of the state, so that no other storage gets it.
        self.storage = StorageWeakRef(x.untyped_storage())
        self.state = state
        self.copies: dict[Hashable, Copies] = {}

    def is_frozen(self) -> bool:
        leaf = self.leaf()
        return leaf is not None and not leaf.requires_grad


class _Scope:
    """The open contexts of all threads, and the weights that they share, by the id of their leaf."""

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
                self.hooks = [register(self.forget_trained) for register in hooks]

    def leave(self) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                self.weights = None
                for hook in self.hooks:
                    hook.remove()

    def forget_trained(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Drops the weights that the optimizer may write, which are all except frozen weights of no group of it."""
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        with self.lock:
            if self.depth:  # a new dict, because a call in another thread may still fill the old one
                self.weights = {k: w for k, w in [*self.weights.items()] if k not in owned and w.is_frozen()}


_scope = _Scope()


def _forget(key: int, _: weakref.ref) -> None:
    weights = _scope.weights
    if weights is not None:
        weights.pop(key, None)


def _leaf(x: Tensor) -> Tensor | None:
    """Returns the parameter that x is, or is a view of."""
    if type(x) not in _PLAIN or x.is_inference() or x.is_neg():
        return None
    for leaf in (_torch.base_of(x), x):
        if type(leaf) in _PLAIN and leaf.is_leaf and (leaf.requires_grad or type(leaf) is Parameter):
            return leaf
    return None


def _forbids_reuse(x: Tensor) -> bool:
    """Whether results computed now must not be used outside: they belong to a graph, or are inference tensors."""
    if torch.is_inference_mode_enabled():
        return True
    if _torch.is_traced():
        return True
    if not x.is_cuda:
        return False
    with torch.cuda.device(x.get_device()):
        return torch.cuda.is_current_stream_capturing()
