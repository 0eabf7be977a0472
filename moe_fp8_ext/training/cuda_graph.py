"""CUDA graphs of a layer's forward and backward: the host launches two graphs instead of some twenty ops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter
from typing import NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from moe_fp8_ext import _torch
from moe_fp8_ext._C import validates
from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.layer.frozen import FrozenWeight
from moe_fp8_ext.layer.modules import Experts
from moe_fp8_ext.layer.node import unread_outputs
from moe_fp8_ext.ops.checks import check_bool, check_module, fail, require
from moe_fp8_ext.ops.dispatch import differentiable_once
from moe_fp8_ext.quantization.casting import autocast_dtype
from moe_fp8_ext.training.main_grad import parameter_of_ddp
from moe_fp8_ext.training.stats import sampling

_OP = "graphed"
_BY_VALUE = {bool, int, float, complex, str, bytes, type(None), slice, torch.dtype, torch.device}  # types of constants
_WARM_UPS = 3  # runs before the capture, so that libraries initialize; torch's make_graphed_callables does the same


def graphed(layer: nn.Module, *sample_args: object, checkpoint: bool = False, **sample_kwargs: object) -> Graphed:
    """Captures forward and backward of a layer as CUDA graphs. Returns a function that replays them.

        layer.forward = moe_fp8_ext.graphed(layer, x, topk_ids, topk_scores)
        del layer.forward  # to undo it

    A call copies its arguments to the graph, launches forward as one graph, and copies the outputs out. Backward is
    the second graph. Outputs and gradients have the bytes of the layer itself. Nothing waits for the device.

    - Tensors must have the sizes of the samples. Any routing, mask and given ids are allowed.
    - Every call reads parameters and buffers, and quantizes weights. So optimizers may write them in place.
    - Backward adds to the main_grad that a weight had at the capture. A router counts tokens as without a graph.
    - `.grad` of a parameter may share the graph's memory until the next backward of the layer. That backward first
      copies `.grad` out, so gradients accumulate as usual. If you keep a gradient elsewhere, clone it.
    - Activations for backward and gradients of weights stay allocated between calls.

    With `checkpoint`, a call keeps only its arguments, as under `torch.utils.checkpoint`, and the graph of backward
    computes forward again. All layers of a device then share their graphs' memory. Any number of calls may be in
    flight, and gradients are copies. Buffers of the layer change in forward alone, so a router counts tokens once.
    The graph of forward runs under `torch.no_grad()`. If forward writes a buffer and then reads it, backward reads what
    forward has written.

    An output that the loss does not use gets a gradient of zeros.

    A call runs the layer's own forward, without a graph, in these cases:

    - A tensor among the arguments has other sizes than its sample, or another argument has another value. With
      `checkpoint`, also if a tensor has another dtype, or needs a gradient that its sample did not need.
    - Training mode, grad mode or torch.autocast differ from the capture.
    - The call is traced, captured by another graph, inside `validate()`, measured by `stats`, or seen by a
      `TorchDispatchMode`, such as a counter of FLOPs.

    Without `checkpoint`, backward must run once for each call, before the next call. So a pipeline with several
    micro-batches in flight needs one `graphed` for each micro-batch. Under `torch.utils.checkpoint` backward raises,
    because the second forward is another call. `reuse_weights()` has no effect on a replayed call. Delete outputs of
    earlier calls before the capture, because their autograd graphs belong to another stream. The capture runs the layer
    several times, with zeros and with random numbers. It then restores buffers and main_grads, but no other state.

    Args:
        layer: `MoE`, `Experts`, or any module whose forward returns a tensor or a tuple of tensors, such as a layer of
            a transformer. All work of its forward must be on the GPU, and must not wait for the host.
        sample_args, sample_kwargs: example arguments: tensors, and tuples, lists and dicts of them. The capture reads
            sizes, dtypes and requires_grad of tensors, but no values except of a bool mask. Other arguments are
            constants. A call must have the same numbers and strings, and the same objects of all other types.
        checkpoint: compute forward again in backward. Then the layer must not draw random numbers, as dropout does.
            Where a call runs the layer's own forward, `torch.utils.checkpoint` does the same. A warning says so if a
            call of training differs in more than sizes, such as in a constant.

    Returns:
        a function of the same arguments.

    Raises:
        TypeError: layer is no module.
        RuntimeError: `graphed` raises if samples or the layer's tensors are not on one GPU; if an `Experts` has an ep,
            delay_wgrad, or adapters with dropout; if a parameter is a DTensor, or has gradients in the buffers of
            Megatron's DDP; if `stats` or `validate()` are on; or if the layer writes to an argument, or uses a tensor
            that needs a gradient and is neither argument nor parameter; with `checkpoint`, if the layer draws random
            numbers, or in inference mode. A call raises if a parameter, buffer or main_grad has other memory than at
            the capture; without `checkpoint`, if a tensor has another dtype, device or number of dimensions than its
            sample, or needs a gradient and its sample did not. Without `checkpoint`, backward raises if it does not
            belong to the last call, or runs twice for one call.

    Source: the documentation of `torch.cuda.make_graphed_callables`. Unlike it, `graphed` supports calls that add to
        main_grad, count tokens or accumulate gradients.
    """
    check_module(_OP, "layer", layer)
    check_bool(_OP, "checkpoint", checkpoint)
    sample = Arguments.of(sample_args, sample_kwargs)
    _check_samples(sample.tensors)
    _check_layer(layer, sample.tensors[0].device)
    require(not sampling(), f"{_OP}: stats must be off, or not sample this step, while a layer is captured")
    require(not validates(), f"{_OP}: validate() must be off while a layer is captured, because it waits for the GPU")
    torch.clear_autocast_cache()  # its casts of parameters keep nodes of autograd, which ran on another stream
    return (Recomputed if checkpoint else Graphed)(layer, sample)


class Arguments(NamedTuple):
    """The arguments of a call: its tensors, and everything else, with a hole for each tensor."""

    tensors: list[Tensor]
    rest: tuple

    @classmethod
    def of(cls, args: Sequence[object], kwargs: dict[str, object]) -> Arguments:
        tensors: list[Tensor] = []
        return cls(tensors, _without_tensors((args, dict(sorted(kwargs.items()))), tensors))

    def call(self, function: Callable[..., object]) -> object:
        args, kwargs = _with_tensors(self.rest, iter(self.tensors))
        return function(*args, **kwargs)

    def is_as_in(self, captured: Graphed) -> bool:
        """Whether constants and torch.autocast are as at the capture; sizes of tensors may differ."""
        return self.rest == captured._rest and autocast_dtype(captured._args[0]) == captured._mode[-1]


class Graphed:
    """The function that `graphed` returns.

    Attributes:
        layer: the module that was captured.
        ignored: names of keywords that layers get and do not read.
    """

    ignored: frozenset[str] = frozenset()

    def __init__(self, layer: nn.Module, sample: Arguments) -> None:
        eager = layer.forward
        self.layer, self._eager = layer, eager._eager if isinstance(eager, Graphed) else eager
        self._mode, self._rest = _mode(layer, sample.tensors[0]), sample.rest
        self._tensors = _named_tensors(layer)
        self._memory = [_memory(owner, name) for owner, name in self._tensors]
        self._captured = [getattr(owner, name) for owner, name in self._tensors]  # so that no id is used again
        self._parameters = [p for p in layer.parameters() if p.requires_grad and torch.is_grad_enabled()]
        self._capture(sample.tensors)

    def __call__(self, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return self._run(args, kwargs)
        given = self._given(args, kwargs)
        return self._replayed(given) if self._stands_for(given) else self._run(args, kwargs)

    def _given(self, args: Sequence[object], kwargs: dict[str, object]) -> Arguments:
        return Arguments.of(args, {name: kwargs[name] for name in kwargs.keys() - self.ignored})

    def _replayed(self, given: Arguments) -> Tensor | tuple[Tensor, ...]:
        return self._pack(_Replay.apply(self, *given.tensors, *self._parameters))

    def __reduce__(self) -> NoReturn:
        text = "a captured layer cannot be copied or pickled; undo the capture first: del layer.forward"
        raise TypeError(f"{_OP}: {text}")

    def _run(self, args: Sequence[object], kwargs: dict[str, object]) -> object:
        """Computes a call without a graph."""
        return self._eager(*args, **kwargs)

    # ---- the capture ----

    def _capture(self, samples: Sequence[Tensor]) -> None:
        capture = Capture(samples[0].device)
        self._args = _leaves([torch.empty_like(x) for x in samples], samples)
        self._last: object | None = None  # the call whose backward may come
        with unchanged(buffers_of(self.layer)):
            with capture.warm_up():
                for _ in range(_WARM_UPS):
                    self._start()
                    self._sent = [torch.zeros_like(part) for part in self._recorded]  # so a main_grad gets zeros
                    self._finish()
            self._replay, outputs = capture(self._start)
            self._outputs = [out.detach() for out in outputs]
            self._is_recorded = [out.requires_grad for out in outputs]
            if self._recorded:
                self._replay_backward, self._gradients = capture(self._finish)

    def _start(self) -> list[Tensor]:
        """Runs the layer's forward on the graph's own arguments. Returns its outputs."""
        dtype, device = self._mode[-1], self._args[0].device.type
        # The cache of autocast is off, because it would keep casts of parameters outside the graph.
        states = _states(self._args)
        with nullcontext() if dtype is None else torch.autocast(device, dtype=dtype, cache_enabled=False):
            out = Arguments(self._args, self._rest).call(self._eager)
        text = "layer must not write to its arguments, because a replay has copies of them, got a write"
        require(states == _states(self._args), f"{_OP}: {text}")
        is_tuple = isinstance(out, tuple) and all(isinstance(part, Tensor) for part in out)
        if not is_tuple and not isinstance(out, Tensor):
            fail(_OP, f"layer must return a tensor or a tuple of tensors, got {type(out).__name__}")
        self._pack = getattr(type(out), "_make", tuple) if is_tuple else itemgetter(0)
        outputs = [*out] if is_tuple else [out]
        self._recorded = [part for part in outputs if part.requires_grad]
        _check_inputs(self._recorded, [*self._args, *self._parameters])
        return outputs

    def _finish(self) -> list[Tensor | None]:
        """Runs the backward of the last `_start`, if it has one. Returns the gradients of arguments and parameters."""
        recorded, self._recorded = self._recorded, []
        inputs = [*self._args, *self._parameters]
        if not recorded:
            return [None] * len(inputs)
        wanted = [x for x in inputs if x.requires_grad]
        with torch.autocast(inputs[0].device.type, enabled=False):  # backward of training runs outside of it
            found = iter(torch.autograd.grad(recorded, wanted, self._sent, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in inputs]

    # ---- a call ----

    def _stands_for(self, given: Arguments) -> bool:
        """Whether a replay computes what the layer would. Raises for a call that looks like a mistake."""
        if _mode(self.layer, self._args[0]) != self._mode or given.rest != self._rest:
            return False
        if Capture.is_active() or validates() or sampling() or _torch.has_dispatch_mode():
            return False
        if not self._has_sizes(given.tensors):
            return False
        for (owner, name), memory in zip(self._tensors, self._memory, strict=True):
            if _memory(owner, name) != memory:
                fail(_OP, f"{name} must be as at the capture, with its memory and requires_grad; capture again")
        return True

    def _has_sizes(self, args: Sequence[Tensor]) -> bool:
        found = True
        for i, (x, sample) in enumerate(zip(args, self._args, strict=True)):
            _check_argument(i, x, sample)
            found = found and x.shape == sample.shape
        return found

    def kept(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the tensors that backward takes again."""
        return ()

    def forward(self, args: Sequence[Tensor]) -> tuple[object, tuple[Tensor, ...]]:
        """Replays forward. Returns the call, for `backward`, and the outputs."""
        self._last = call = object()
        _copy(args, self._args)
        self._replay()
        return call, tuple(out.clone() for out in self._outputs)

    def backward(self, call: object, kept: Sequence[Tensor], sent: Sequence[Tensor]) -> list[Tensor | None]:
        """Replays the backward of a call. Returns the gradients of arguments and parameters."""
        if call is not self._last:
            text = "backward must come once for a call, and before the next call of the layer, got another one"
            fail(_OP, f"{text}; for several calls in flight use one `graphed` each, or checkpoint=True")
        self._last = None
        _copy(self._of_recorded(sent), self._sent)
        count = len(self._args)
        of_args, of_parameters = self._gradients[:count], self._gradients[count:]
        for parameter, gradient in zip(self._parameters, of_parameters, strict=True):
            grad = parameter.grad
            if grad is not None and gradient is not None and grad.data_ptr() == gradient.data_ptr():
                parameter.grad = grad.clone()  # .grad is the graph's own tensor of an earlier backward
        self._replay_backward()
        return [*map(_clone, of_args), *(None if gradient is None else gradient.detach() for gradient in of_parameters)]

    def _of_recorded(self, sent: Sequence[Tensor]) -> list[Tensor]:
        return [grad for grad, is_recorded in zip(sent, self._is_recorded, strict=True) if is_recorded]


class Recomputed(Graphed):
    """The function of a layer that is computed again in backward. Between calls its graphs hold no values.

    Attributes:
        others: functions of the same layer for calls that this one has no graph for.
    """

    others: Sequence[Recomputed] = ()

    def _run(self, args: Sequence[object], kwargs: dict[str, object]) -> object:
        if not torch.compiler.is_compiling():
            given = self._given(args, kwargs)
            for other in self.others:
                if other._stands_for(given):
                    return other._replayed(given)
            captures = self, *self.others
            if torch.is_grad_enabled() and self.layer.training and not any(map(given.is_as_in, captures)):
                text = "a call has other arguments or another torch.autocast than the capture"
                warnings.warn(f"{_OP}: {text}, so it runs without a graph; capture as you train", stacklevel=3)
        if not torch.is_grad_enabled():
            return self._eager(*args, **kwargs)
        how = dict(use_reentrant=False, preserve_rng_state=not Capture.is_active())
        return checkpointed(self._eager, *args, **how, **kwargs)

    def _has_sizes(self, args: Sequence[Tensor]) -> bool:
        return all(
            (x.shape, x.dtype, x.device) == (sample.shape, sample.dtype, sample.device)
            and (sample.requires_grad or not x.requires_grad or not torch.is_grad_enabled())
            for x, sample in zip(args, self._args, strict=True)
        )

    def _capture(self, samples: Sequence[Tensor]) -> None:
        require(not torch.is_inference_mode_enabled(), f"{_OP}: checkpoint must be False in torch.inference_mode()")
        self._shared = shared = SharedMemory.of(samples[0].device)
        self._args = _leaves([shared.like("argument", i, x) for i, x in enumerate(samples)], samples)
        self._gradients: list[Tensor | None] = [None] * (len(samples) + len(self._parameters))
        self._saves: float = math.inf  # tensors that autograd saves before the output of experts may stay uncomputed
        main_grads = [getattr(owner, name) for owner, name in self._tensors if name == "main_grad"]
        random = shared.capture.random_state()
        with unchanged([*buffers_of(self.layer), *main_grads]):
            with shared.capture.warm_up():
                for _ in range(_WARM_UPS):
                    self._forward()
                    self._backward()
                self._choose_end(main_grads)
            text = "layer must draw no random numbers with checkpoint, because backward would draw others, got a draw"
            require(torch.equal(random, shared.capture.random_state()), f"{_OP}: {text}; set dropout to 0")
            self._replay, _ = shared.capture(self._forward)
            if self._sent:
                self._replay_backward, _ = shared.capture(self._backward)

    def _forward(self) -> list[Tensor]:
        with torch.no_grad():
            outputs = self._start()
            self._outputs = [self._shared.like("output", i, out) for i, out in enumerate(outputs)]
            _copy(outputs, self._outputs)
        return []

    def _backward(self, unread: Callable[[Tensor], Tensor] = torch.empty_like) -> list[Tensor]:
        saves: list[None] = []

        def unread_output(x: Tensor) -> Tensor | None:
            return unread(x) if len(saves) >= self._saves else None

        def pack(x: Tensor) -> Tensor:
            saves.append(None)
            return x

        with unchanged(buffers_of(self.layer)):  # forward has changed them
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), unread_outputs(unread_output):
                outputs = self._start()
            self._number_of_saves = len(saves)
            self._is_recorded = [out.requires_grad for out in outputs]
            del outputs
            self._sent = [self._shared.like("sent", i, part) for i, part in enumerate(self._recorded)]
            gradients = self._finish()
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self._gradients[i] = self._shared.like("gradient", i, gradient).copy_(gradient)
        return []

    def _choose_end(self, main_grads: Sequence[Tensor]) -> None:
        """Lets backward leave the output of experts uncomputed behind the last tensor that autograd saves, as a
        checkpoint does. But if other values in its place change a gradient, something else reads it."""
        numbers = torch.Generator(self._args[0].device).manual_seed(0)

        def draw(x: Tensor) -> Tensor:
            return x.normal_(std=1000, generator=numbers)

        with torch.no_grad():
            for x in (*self._args, *self._sent):
                if x.is_floating_point():
                    x.normal_(generator=numbers)
        made, number = [], self._number_of_saves
        for self._saves in (math.inf, number):
            for total in main_grads:
                total.zero_()
            self._backward(unread=lambda x: draw(torch.empty_like(x)))
            made.append([x.clone() for x in (*self._gradients, *main_grads) if x is not None])
        if not all(map(_is_close, *made)):
            self._saves = math.inf

    def kept(self, args: Sequence[Tensor]) -> Sequence[Tensor]:
        return args[: len(self._args)]

    def forward(self, args: Sequence[Tensor]) -> tuple[object, tuple[Tensor, ...]]:
        self._shared.capture.wait_for_other_streams()
        _copy(args, self._args)
        self._replay()
        return None, tuple(map(_clone, self._outputs))

    def backward(self, call: object, kept: Sequence[Tensor], sent: Sequence[Tensor]) -> list[Tensor | None]:
        self._shared.capture.wait_for_other_streams()
        _copy(kept, self._args)
        _copy(self._of_recorded(sent), self._sent)
        self._replay_backward()
        return [*map(_clone, self._gradients)]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, *inputs):
        ctx.graph = graph
        ctx.call, outputs = graph.forward(inputs)
        ctx.save_for_backward(*graph.kept(inputs))
        ctx.mark_non_differentiable(*(o for o, needs in zip(outputs, graph._is_recorded, strict=True) if not needs))
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, *sent):
        return None, *ctx.graph.backward(ctx.call, ctx.saved_tensors, sent)


class Capture:
    """Captures functions as CUDA graphs, on one stream.

    shares: whether the graphs have one memory pool. Then a replay overwrites all that the graphs captured before it
    have left in the pool. Otherwise each graph has its own pool. For example, autograd still adds to the gradients of
    the last backward when a replay of forward writes its temporaries.
    """

    def __init__(self, device: torch.device, shares: bool = False) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle() if shares else None
        self._used_on: torch.cuda.Stream | None = None

    @staticmethod
    def is_active() -> bool:
        return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """A context in which functions run, uncaptured, on the stream of the captures."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def __call__(self, run: Callable[[], list[Tensor | None]]) -> tuple[Callable[[], None], list[Tensor | None]]:
        """Returns a function that replays what `run` launches, and the results, which a replay overwrites."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            results = run()
        return graph.replay, results

    def wait_for_other_streams(self) -> None:
        """Makes the current stream wait for the last replay, if that was on another stream."""
        current = torch.cuda.current_stream(self.device)
        if self._used_on is not None and self._used_on != current:
            current.wait_stream(self._used_on)
        self._used_on = current

    def random_state(self) -> Tensor:
        """Returns the state of the device's random numbers. A draw changes it."""
        return torch.cuda.get_rng_state(self.device)


class SharedMemory:
    """What all `Recomputed` layers of a device write in turn: the pool of their graphs, and arguments and results."""

    _of_device: WeakValueDictionary[torch.device, SharedMemory] = WeakValueDictionary()

    def __init__(self, device: torch.device) -> None:
        self.capture = Capture(device, shares=True)
        self._tensors: dict[tuple, Tensor] = {}

    @classmethod
    def of(cls, device: torch.device) -> SharedMemory:
        shared = cls._of_device.get(device)
        if shared is None:
            shared = cls._of_device[device] = cls(device)
        return shared

    def like(self, role: str, i: int, x: Tensor) -> Tensor:
        """Returns the tensor for argument or result number i of a layer, with the shape and dtype of x."""
        key = role, i, x.shape, x.stride(), x.dtype
        if key not in self._tensors:
            self._tensors[key] = torch.empty_like(x, requires_grad=False)
        return self._tensors[key]


def _without_tensors(value: object, tensors: list[Tensor]) -> tuple[type, object]:
    """Appends the tensors of a value to a list. Returns a pair: the value's type, and the value without tensors."""
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor, None
    if _is_sequence(kind):
        return kind, [_without_tensors(part, tensors) for part in value]
    if kind is dict:
        return kind, [(name, _without_tensors(part, tensors)) for name, part in value.items()]
    return kind, value if kind in _BY_VALUE else _ById(value)


def _with_tensors(pair: tuple[type, object], tensors: Iterator[Tensor]) -> object:
    """Undoes `_without_tensors`."""
    kind, rest = pair
    if kind is Tensor:
        return next(tensors)
    if kind is dict:
        return {name: _with_tensors(part, tensors) for name, part in rest}
    if _is_sequence(kind):
        return getattr(kind, "_make", kind)(_with_tensors(part, tensors) for part in rest)
    return rest.value if isinstance(rest, _ById) else rest


class _ById:
    """A constant of any other type, whose == may mean anything."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value


def _is_sequence(kind: type) -> bool:
    """Whether it is a tuple, a list or a NamedTuple."""
    return kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_make"))


def _leaves(tensors: Sequence[Tensor], samples: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors as leaves that need gradients where samples do. They are zero, except for masks of bool,
    which have the values of the samples: attention where all is masked gives NaN."""
    found = []
    for to, x in zip(tensors, samples, strict=True):
        to = to.detach()
        to.copy_(x) if x.dtype == torch.bool else to.zero_()
        found.append(to.requires_grad_(x.requires_grad and torch.is_grad_enabled()))
    return found


@torch.no_grad()
def _copy(values: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    for source, target in zip(values, to, strict=False):  # autograd's inputs are arguments, then parameters
        target.copy_(source)


def buffers_of(module: nn.Module) -> list[Tensor]:
    """Returns the buffers that a forward may write to: no weights in FP8, and no expanded tensors."""
    modules = [m for m in module.modules() if not isinstance(m, FrozenWeight)]
    buffers = [buffer for m in modules for buffer in m.buffers(recurse=False)]
    return [b for b in buffers if all(stride or size <= 1 for stride, size in zip(b.stride(), b.shape, strict=True))]


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context after which the tensors have their values from before. A graph may capture it."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        _copy(before, tensors)


def _check_inputs(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Checks that backward reaches no leaves besides the inputs, whose gradients alone a graph returns."""
    known = {id(x) for x in inputs}
    seen: set[object] = set()
    leaves, nodes = [out for out in outputs if out.grad_fn is None], [out.grad_fn for out in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)
    text = "layer must have gradients for its arguments and parameters alone"
    for leaf in leaves:
        if id(leaf) not in known:
            fail(_OP, f"{text}, got another tensor that needs one, of shape {[*leaf.shape]}; pass it as an argument")


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Whether gradients differ by no more than sums in another order do, which torch's attention may have: less than
    the last bit of bfloat16. What reads other values changes them by their own size."""
    a, b = a.float(), b.float()
    return bool((a - b).norm() <= 2**-8 * a.norm())  # False for NaN


def _states(tensors: Sequence[Tensor]) -> list[tuple]:
    return [] if _torch.state_of is None else [_torch.state_of(x) for x in tensors]


def _clone(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()


def _mode(layer: nn.Module, x: Tensor) -> tuple[bool, bool, torch.dtype | None]:
    """Returns the modes that a capture fixes: training mode, grad mode and the dtype of autocast."""
    return layer.training, torch.is_grad_enabled(), autocast_dtype(x)


def _named_tensors(layer: nn.Module) -> list[tuple[object, str]]:
    """Returns the owner and the name of every tensor of the layer whose address a graph may have."""
    found: list[tuple[object, str]] = []
    for module in layer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            found.append((module, name))
            if getattr(parameter, "main_grad", None) is not None:
                found.append((parameter, "main_grad"))
        found += [(module, name) for name, _ in module.named_buffers(recurse=False)]
    return found


def _memory(owner: object, name: str) -> tuple | None:
    tensor = getattr(owner, name, None)
    if tensor is None:
        return None
    parameter = id(tensor) if isinstance(tensor, nn.Parameter) else None  # autograd gives gradients to the object
    return parameter, tensor.data_ptr(), tensor.requires_grad, tensor.dtype, tensor.stride()


def _check_samples(sample_args: Sequence[Tensor]) -> None:
    require(len(sample_args) > 0, f"{_OP}: sample_args must have tensors, got none")
    for i, x in enumerate(sample_args):
        require(not is_dtensor(x), f"{_OP}: sample_args must have plain tensors, got a DTensor as number {i}")
        require(x.is_cuda, f"{_OP}: sample_args must be on a GPU, because a CPU has no CUDA graphs, got {x.device}")
        first = sample_args[0].device
        require(x.device == first, f"{_OP}: sample_args must be on one device, {first}, got {x.device}")


def _check_argument(i: int, x: Tensor, sample: Tensor) -> None:
    if (x.dtype, x.device, x.dim()) != (sample.dtype, sample.device, sample.dim()):
        wanted, got = (f"{t.dtype} of {t.dim()} dimensions on {t.device}" for t in (sample, x))
        fail(_OP, f"argument {i} must be as its sample, {wanted}, got {got}")
    if x.requires_grad and not sample.requires_grad and torch.is_grad_enabled():
        fail(_OP, f"argument {i} must not ask for a gradient, because its sample did not, got requires_grad=True")


def _check_layer(layer: nn.Module, device: torch.device) -> None:
    for path, module in layer.named_modules():
        if not isinstance(module, Experts):
            continue
        where = f"of {path or 'layer'}"
        require(module.ep is None, f"{_OP}: ep {where} must be None, because ranks may wait for each other, got one")
        text = "because a replay queues no gradient for later"
        require(module.delayed is None, f"{_OP}: delay_wgrad {where} must be False, {text}, got True")
        drops = module.training and module.lora_rank is not None and module.lora_dropout > 0
        text = "because a replay would drop other elements than the layer"
        require(not drops, f"{_OP}: lora_dropout {where} must be 0 in training, {text}, got {module.lora_dropout}")
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        require(
            not is_dtensor(tensor), f"{_OP}: {name} must be a plain tensor, because memory must stay, got a DTensor"
        )
        on = f"{_OP}: {name} must be on the device of the samples, {device}, got {tensor.device}"
        require(tensor.device == device, on)
        text = "must have no buffer of Megatron's DDP, which a replay cannot tell that it added to it, got one"
        require(parameter_of_ddp(tensor) is None, f"{_OP}: {name} {text}")
