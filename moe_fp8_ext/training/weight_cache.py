"""A cache of quantized weights, which calls of `grouped_mm` and `experts` share until the parameter changes.

The version counter and the storage of a parameter tell whether the parameter changed. Some writes do not move the
counter, such as writes of fused optimizers. So every optimizer step drops all weights except frozen weights whose
memory the optimizer does not own. Leaving the outermost context empties the cache.
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
    """Within this context, `grouped_mm` and `experts` quantize a weight once, and again only after the weight changed.

        with moe_fp8_ext.reuse_weights():
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    Put the context around the micro-batches of a step. If you use activation checkpointing, put it around forward and
    backward. Outputs, gradients and errors are the same with and without the context. Contexts may be nested. They
    apply to all threads of the process, because torch runs backward in its own threads.

    The cache keeps both fp8 copies of a weight: 2 bytes per element, plus scales. The weight must be a leaf or a view
    of a leaf. The leaf must require a gradient or be an `nn.Parameter`. Under `torch.autocast` the leaf is the weight
    before the cast. A weight that the caller casts or computes is quantized in every call.

    A weight is quantized again after

    - any write that its version counter sees: in place or by `load_state_dict`, also under `torch.no_grad`,
    - any step of a `torch.optim.Optimizer`, including fused optimizers, whose writes the version counter does not see.
      One exception: a weight that needs no gradient, and whose memory no parameter of the optimizer shares, is
      quantized once for all steps,
    - any change of its memory: `.data` is assigned, or its storage is replaced or moves.

    The cache has separate copies for each format, dtype and rounding of a recipe, each dtype of autocast and each CUDA
    stream. Copies are freed in these cases: the weight is used again after a change; the weight is freed; an optimizer
    steps, as above; or the outermost context ends.

    The cache misses a write that neither moves the version counter nor changes the address of the memory. Leave the
    context before such a write changes a weight:

    - a write through `.data` (`w.data.copy_(x)`), numpy or DLPack,
    - a write by a kernel of another library, or by a replayed CUDA graph,
    - a sharded module that gathers its parameters to the same address.

    The cache has no effect under torch.compile or another tracer, while a CUDA graph is captured, in inference mode,
    and for tensor subclasses. To reuse a weight in a graph, call `quantize_weight` outside the graph and pass its
    result to `grouped_mm` or `experts`, with main_grad if the weight is trained. A CUDA graph reads the operand at the
    address of the capture, so copy new values and scales to that address by `Quantized.copy_`.

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
    """Returns quantize(x, *options), or the result of an earlier call for the same x; None if x must not be cached."""
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
        # The address of the storage is part of the state. This reference keeps other storages from getting the address.
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
        """Drops all weights except frozen weights whose memory the optimizer does not own.

        A frozen parameter may share the memory of a trained parameter. Each of the two has its own version counter.
        """
        owned = {
            StorageWeakRef(parameter.untyped_storage())
            for group in optimizer.param_groups
            for parameter in group["params"]
            if type(parameter) in _PLAIN and parameter.layout == torch.strided
        }
        with self.lock:
            if self.depth:  # a new dict, because a call in another thread may still fill the old one
                self.weights = {k: w for k, w in [*self.weights.items()] if w.is_frozen() and w.storage not in owned}


_scope = _Scope()


def _forget(key: int, _: weakref.ref) -> None:
    weights = _scope.weights
    if weights is not None:
        weights.pop(key, None)


def _leaf(x: Tensor) -> Tensor | None:
    """Returns x if x is a parameter, or the parameter that x is a view of."""
    if type(x) not in _PLAIN or x.is_inference() or x.is_neg():
        return None
    for leaf in (_torch.base_of(x), x):
        if type(leaf) in _PLAIN and leaf.is_leaf and (leaf.requires_grad or type(leaf) is Parameter):
            return leaf
    return None


def _forbids_reuse(x: Tensor) -> bool:
    """Whether a result must not outlive this call, because it belongs to a graph or is an inference tensor."""
    if torch.is_inference_mode_enabled() or _torch.is_traced():
        return True
    if not x.is_cuda:
        return False
    with torch.cuda.device(x.get_device()):
        return torch.cuda.is_current_stream_capturing()
