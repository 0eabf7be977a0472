"""CUDA graphs of a layer's forward and backward: the host launches two graphs instead of some twenty ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import itemgetter

import torch
from torch import Tensor, nn

from moe_fp8_ext._C import validates
from moe_fp8_ext.distributed.dtensor import is_dtensor
from moe_fp8_ext.layer.frozen import FrozenWeight
from moe_fp8_ext.layer.modules import Experts
from moe_fp8_ext.ops.checks import check_module, fail, require
from moe_fp8_ext.ops.dispatch import differentiable_once
from moe_fp8_ext.quantization.casting import autocast_dtype
from moe_fp8_ext.training.main_grad import parameter_of_ddp
from moe_fp8_ext.training.stats import sampling

_OP = "graphed"
_WARM_UPS = 3  # runs before the capture, so that libraries initialize; torch's make_graphed_callables does the same


def graphed(layer: nn.Module, *sample_args: Tensor) -> Graphed:
    """Captures forward and backward of a layer as CUDA graphs. Returns a function that replays them.

        layer.forward = moe_fp8_ext.graphed(layer, x, topk_ids, topk_scores)
        del layer.forward  # to undo it

    A call copies its arguments to the graph, launches forward as one graph, and copies the outputs out. Backward is
    the second graph. Outputs and gradients have the bytes of the layer itself. Nothing waits for the device.

    - Arguments must have the sizes of the samples. Any routing, mask and given ids are allowed.
    - Every call reads parameters and buffers, and quantizes weights. So optimizers may write them in place.
    - Backward adds to the main_grad that a weight had at the capture. A router counts tokens as without a graph.
    - `.grad` of a parameter may share the graph's memory until the next backward of the layer. That backward first
      copies `.grad` out, so gradients accumulate as usual. If you keep a gradient elsewhere, clone it.
    - Activations for backward and gradients of weights stay allocated between calls.

    A call runs the layer's own forward, without a graph, in these cases:

    - An argument has other sizes than its sample.
    - Training mode, grad mode or torch.autocast differ from the capture.
    - The call is traced, captured by another graph, inside `validate()`, or measured by `stats`.

    Backward must run once for each call, before the next call. So a pipeline with several micro-batches in flight
    needs one `graphed` for each micro-batch. Under `torch.utils.checkpoint` backward raises, because the second forward
    is another call. `reuse_weights()` has no effect on a replayed call. Delete outputs of earlier calls before the
    capture, because their autograd graphs belong to another stream. The capture runs the layer three times with zeros,
    and then restores the layer's buffers.

    Args:
        layer: `MoE`, `Experts`, or any module whose forward takes tensors and returns a tensor or a tuple of tensors.
            All work of its forward must be on the GPU, and must not wait for the host.
        sample_args: example arguments. The capture reads their sizes, dtypes and requires_grad, but not their values.

    Returns:
        a function of the same arguments.

    Raises:
        TypeError: layer is no module.
        RuntimeError: `graphed` raises if samples or the layer's tensors are not on one GPU; if an `Experts` has an ep,
            delay_wgrad, or adapters with dropout; if a parameter is a DTensor, or has gradients in the buffers of
            Megatron's DDP; or if `stats` or `validate()` are on. A call raises if an argument has another dtype, device
            or number of dimensions than its sample; if an argument needs a gradient and its sample did not; or if a
            parameter, buffer or main_grad has other memory than at the capture. Backward raises if it does not belong
            to the last call, or runs twice for one call.

    Source: the documentation of `torch.cuda.make_graphed_callables`. Unlike it, `graphed` supports calls that add to
        main_grad, count tokens or accumulate gradients.
    """
    check_module(_OP, "layer", layer)
    _check_samples(sample_args)
    _check_layer(layer, sample_args[0].device)
    require(not sampling(), f"{_OP}: stats must be off, or not sample this step, while a layer is captured")
    require(not validates(), f"{_OP}: validate() must be off while a layer is captured, because it waits for the GPU")
    return Graphed(layer, sample_args)


class Graphed:
    """The function that `graphed` returns.

    Attributes:
        layer: the module that was captured.
    """

    def __init__(self, layer: nn.Module, sample_args: Sequence[Tensor]) -> None:
        eager = layer.forward
        self.layer, self._eager = layer, eager._eager if isinstance(eager, Graphed) else eager
        self._mode = _mode(layer, sample_args[0])
        self._tensors = _named_tensors(layer)
        self._memory = [_memory(owner, name) for owner, name in self._tensors]
        needs = [x.requires_grad and torch.is_grad_enabled() for x in sample_args]
        self._args = [torch.zeros_like(x).requires_grad_(n) for x, n in zip(sample_args, needs, strict=True)]
        self._parameters = [p for p in layer.parameters() if p.requires_grad and torch.is_grad_enabled()]
        self._last: object | None = None  # the call whose backward may come
        self._capture(Capture(sample_args[0].device))

    def __call__(self, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
        if not self._stands_for(args):
            return self._eager(*args)
        return self._pack(_Replay.apply(self, *args, *self._parameters))

    # ---- the capture ----

    def _capture(self, capture: Capture) -> None:
        changed = [b for m in self.layer.modules() if not isinstance(m, FrozenWeight) for b in m.buffers(recurse=False)]
        before = [buffer.clone() for buffer in changed]
        with capture.warm_up():
            for _ in range(_WARM_UPS):
                self._start()
                self._sent = [torch.zeros_like(part) for part in self._recorded]  # so a main_grad gets zeros
                self._finish()
        self._replay, outputs = capture(self._start)
        self._outputs = [out.detach() for out in outputs]
        if self._recorded:
            self._replay_backward, self._gradients = capture(self._finish)
        with torch.no_grad():
            for buffer, value in zip(changed, before, strict=True):
                buffer.copy_(value)

    def _start(self) -> list[Tensor]:
        """Runs the layer's forward on the graph's own arguments. Returns its outputs."""
        dtype, device = self._mode[-1], self._args[0].device.type
        # The cache of autocast is off, because it would keep casts of parameters outside the graph.
        with nullcontext() if dtype is None else torch.autocast(device, dtype=dtype, cache_enabled=False):
            out = self._eager(*self._args)
        is_tuple = isinstance(out, tuple) and all(isinstance(part, Tensor) for part in out)
        if not is_tuple and not isinstance(out, Tensor):
            fail(_OP, f"layer must return a tensor or a tuple of tensors, got {type(out).__name__}")
        self._pack = getattr(type(out), "_make", tuple) if is_tuple else itemgetter(0)
        outputs = [*out] if is_tuple else [out]
        self._recorded = [part for part in outputs if part.requires_grad]
        self._is_recorded = [part.requires_grad for part in outputs]
        return outputs

    def _finish(self) -> list[Tensor | None]:
        """Runs the backward of the last `_start`, if it has one. Returns the gradients of arguments and parameters."""
        recorded, self._recorded = self._recorded, []
        inputs = [*self._args, *self._parameters]
        if not recorded:
            return [None] * len(inputs)
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(recorded, wanted, self._sent, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in inputs]

    # ---- a call ----

    def _stands_for(self, args: Sequence[Tensor]) -> bool:
        """Whether a replay computes what the layer would. Raises for a call that looks like a mistake."""
        if torch.compiler.is_compiling() or _mode(self.layer, self._args[0]) != self._mode:
            return False
        if Capture.is_active() or validates() or sampling():
            return False
        if len(args) != len(self._args):
            fail(_OP, f"a call must have {len(self._args)} arguments, as the sample, got {len(args)}")
        has_sizes = True
        for i, (x, sample) in enumerate(zip(args, self._args, strict=True)):
            _check_argument(i, x, sample)
            has_sizes = has_sizes and x.shape == sample.shape
        for (owner, name), memory in zip(self._tensors, self._memory, strict=True):
            if _memory(owner, name) != memory:
                fail(_OP, f"{name} must have the memory and requires_grad of the capture, got others; capture again")
        return has_sizes

    def forward(self, args: Sequence[Tensor]) -> tuple[object, tuple[Tensor, ...]]:
        """Replays forward. Returns the call, for `backward`, and the outputs."""
        self._last = call = object()
        for x, to in zip(args, self._args, strict=False):
            to.copy_(x)
        self._replay()
        return call, tuple(out.clone() for out in self._outputs)

    def backward(self, call: object, sent: Sequence[Tensor]) -> list[Tensor | None]:
        """Replays the backward of a call. Returns the gradients of arguments and parameters."""
        if call is not self._last:
            text = "backward must come once for a call, and before the next call of the layer, got another one"
            fail(_OP, f"{text}; for several calls in flight use one `graphed` each, and no checkpoint around it")
        self._last = None
        recorded = [grad for grad, is_recorded in zip(sent, self._is_recorded, strict=True) if is_recorded]
        for grad, to in zip(recorded, self._sent, strict=True):
            to.copy_(grad)
        count = len(self._args)
        of_args, of_parameters = self._gradients[:count], self._gradients[count:]
        for parameter, gradient in zip(self._parameters, of_parameters, strict=True):
            grad = parameter.grad
            if grad is not None and gradient is not None and grad.data_ptr() == gradient.data_ptr():
                parameter.grad = grad.clone()  # .grad is the graph's own tensor of an earlier backward
        self._replay_backward()
        of_args = [None if gradient is None else gradient.clone() for gradient in of_args]
        return [*of_args, *(None if gradient is None else gradient.detach() for gradient in of_parameters)]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, *inputs):
        ctx.graph = graph
        ctx.call, outputs = graph.forward(inputs)
        ctx.mark_non_differentiable(*(o for o, needs in zip(outputs, graph._is_recorded, strict=True) if not needs))
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, *sent):
        return None, *ctx.graph.backward(ctx.call, sent)


class Capture:
    """Captures functions as CUDA graphs, on one stream.

    Each graph has its own memory pool. With a common pool, a replay of forward would overwrite the gradients of the
    last backward with temporaries, although autograd still adds to these gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

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
        with torch.cuda.device(self.device), torch.cuda.graph(graph, stream=self.stream):
            results = run()
        return graph.replay, results


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


def _memory(owner: object, name: str) -> tuple[int, bool] | None:
    tensor = getattr(owner, name, None)
    return None if tensor is None else (tensor.data_ptr(), tensor.requires_grad)


def _check_samples(sample_args: Sequence[Tensor]) -> None:
    require(len(sample_args) > 0, f"{_OP}: sample_args must be the arguments of a call, got none")
    for i, x in enumerate(sample_args):
        if not isinstance(x, Tensor) or is_dtensor(x):
            fail(_OP, f"sample_args must be plain tensors, got {type(x).__name__} as number {i}")
        require(x.is_cuda, f"{_OP}: sample_args must be on a GPU, because a CPU has no CUDA graphs, got {x.device}")
        first = sample_args[0].device
        require(x.device == first, f"{_OP}: sample_args must be on one device, {first}, got {x.device}")


def _check_argument(i: int, x: Tensor, sample: Tensor) -> None:
    if not isinstance(x, Tensor):
        fail(_OP, f"argument {i} must be a tensor, got {type(x).__name__}")
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
