"""Callbacks of the Trainer of Hugging Face Transformers: statistics of FP8, and the speed of training."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from moe_fp8_ext.integrations.convert import fp8_report
from moe_fp8_ext.integrations.transformers import implementation_of
from moe_fp8_ext.ops.checks import check_int, check_number, require
from moe_fp8_ext.training.flops import count_torch_products
from moe_fp8_ext.training.stats import stats


class _StepCallback(TrainerCallback):
    """A callback that runs `training_step` of a Trainer inside a context: forward and backward of a micro-batch."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._replaced_step = ExitStack()  # closing it gives the Trainer its training_step back

    def _context(self) -> AbstractContextManager:
        raise NotImplementedError

    def on_train_begin(self, *_: object, **__: object) -> None:
        _warn_without_experts(self.trainer.model)
        self._replaced_step.close()

    def on_train_end(self, *_: object, **__: object) -> None:
        self._replaced_step.close()

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Replaces `training_step` of the Trainer for its next call.

        Trainer tells callbacks nothing of a training that raises. So the call itself takes back what was replaced.
        """
        self._replaced_step.close()
        training_step = self.trainer.training_step

        @functools.wraps(training_step)
        def within(*args: object, **kwargs: object) -> Tensor:
            self._replaced_step.close()
            with self._context():
                return training_step(*args, **kwargs)

        self._replaced_step.enter_context(_replaced(self.trainer, "training_step", within))

    on_substep_end = on_step_begin


class StatsCallback(_StepCallback):
    """Measures a Trainer's model with `moe_fp8_ext.stats`, and logs the worst value of all layers after each sample.

        trainer.add_callback(StatsCallback(trainer, every=100))

    `trainer.log` gets the values as "fp8/<operand>/<statistic>", "fp8/product_sqnr" and "fp8/load": the smallest
    `sqnr`, `product_sqnr` and `limit`, and the largest value of all other statistics. `trainer.state.log_history` and
    every report then have them too. `callback.stats` has the values of single layers. With a writer, TensorBoard has
    them as well. A step is an optimizer step. With gradient accumulation, its last micro-batch is measured. Each rank
    measures its own tokens, and Trainer reports the values of rank 0. Statistics are on within `training_step` alone,
    so they are off after a training that raised.

    Args:
        trainer: the Trainer whose model is measured.
        every: as in `moe_fp8_ext.stats`.
        writer: an object with add_scalar(name, number, step). It gets the values of every layer.

    Raises:
        TypeError: trainer is no Trainer, or writer has no add_scalar.
        RuntimeError: every is no int of at least 1.
    """

    def __init__(self, trainer: Trainer, every: int = 100, writer: object | None = None) -> None:
        _check_arguments("StatsCallback", trainer, every)
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            text = "an object with add_scalar(name, number, step), such as TensorBoard's SummaryWriter"
            raise TypeError(f"StatsCallback: writer must be {text}, got {type(writer).__name__}")
        super().__init__(trainer)
        self.writer, self.stats = writer, stats(trainer.model, every)

    def _context(self) -> AbstractContextManager:
        return self.stats

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **__: object) -> None:
        was_sampled = self.stats.sampled == self.stats.steps
        self.stats.step()
        if not was_sampled:
            return
        _log(self.trainer, control, {f"fp8/{name}": number for name, number in self.stats.worst().items()})
        if self.writer is not None:
            self.stats.write(self.writer, state.global_step)


class SpeedCallback(_StepCallback):
    """Logs the speed and the peak memory of a Trainer's training.

        trainer.add_callback(SpeedCallback(trainer, every=10))

    Once in `every` optimizer steps, `trainer.log` gets these numbers of this rank:

    - "speed/tokens_per_second": elements of `input_ids`, padding included. If a batch has no `input_ids`, tokens of
      `inputs_embeds` are counted, and if it has neither, elements of `labels`.
    - "speed/flops_per_second": operations of forward and backward, including a forward that checkpointing repeats.
      `FlopCounterMode` counts the operations of the first optimizer step. Later steps count the same number per token.
      The counter may miss graphs of torch.compile. If it counts nothing, the number is left out.
    - "speed/mfu": flops_per_second / peak_flops, if peak_flops is given.
    - "speed/peak_memory": the peak of bytes that tensors had on the GPU since the last log; not on a CPU.

    The first step is not timed, because warming up and counting make it slower. Times include the time between steps,
    such as an evaluation. The callback does not wait for the GPU, so choose an `every` of several steps. Before each
    micro-batch, the callback replaces `training_step` of the Trainer for one call. That call first puts the original
    back, and then runs it inside contexts that count tokens and operations. Nothing stays counted or replaced after a
    call that raises.

    Args:
        trainer: the Trainer whose model is measured.
        every: optimizer steps between logs, at least 1.
        peak_flops: operations per second of the GPU, such as 989e12 for products in BF16 on an H100.

    Raises:
        TypeError: trainer is no Trainer.
        RuntimeError: every is no int of at least 1, or peak_flops is no finite number over 0.
        ValueError: in training, a batch has nothing whose tokens can be counted.
    """

    def __init__(self, trainer: Trainer, every: int = 10, peak_flops: float | None = None) -> None:
        _check_arguments("SpeedCallback", trainer, every)
        if peak_flops is not None:
            check_number("SpeedCallback", "peak_flops", peak_flops)
            text = f"SpeedCallback: peak_flops must be over 0, got {peak_flops}; without it, no speed/mfu is logged"
            require(peak_flops > 0, text)
        super().__init__(trainer)
        self.every, self.peak_flops = every, peak_flops
        self.flops_per_token: float | None = None
        self._tokens, self._flops, self._steps, self._since = 0, 0, 0, 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        super().on_train_begin()
        self._tokens, self._flops, self._steps, self.flops_per_token = 0, 0, 0, None

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **__: object) -> None:
        if self.flops_per_token is None:
            self.flops_per_token = self._flops / max(self._tokens, 1)
            self._restart()
            return
        self._steps += 1
        if self._steps == self.every:
            _log(self.trainer, control, {f"speed/{name}": number for name, number in self._speeds().items()})
            self._restart()

    @contextmanager
    def _context(self) -> Iterator[None]:
        with self._counting_tokens(), self._counting_flops():
            yield

    @contextmanager
    def _counting_tokens(self) -> Iterator[None]:
        """A context that counts tokens where `compute_loss` is called. Context parallelism has split them by then."""
        compute_loss = self.trainer.compute_loss

        @functools.wraps(compute_loss)
        def counting(model: torch.nn.Module, inputs: Mapping[str, object], *args: object, **kwargs: object) -> object:
            self._tokens += _count_tokens(inputs)
            return compute_loss(model, inputs, *args, **kwargs)

        with _replaced(self.trainer, "compute_loss", counting):
            yield

    @contextmanager
    def _counting_flops(self) -> Iterator[None]:
        """A context that counts operations, until the first step has ended."""
        if self.flops_per_token is not None:
            yield
            return
        from torch.utils.flop_counter import FlopCounterMode  # loads Triton

        with FlopCounterMode(display=False, custom_mapping=count_torch_products()) as counter:
            yield
        self._flops += counter.get_total_flops()

    def _restart(self) -> None:
        self._tokens, self._steps, self._since = 0, 0, time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _speeds(self) -> dict[str, float]:
        speeds = {"tokens_per_second": self._tokens / (time.perf_counter() - self._since)}
        if self.flops_per_token:
            speeds["flops_per_second"] = self.flops_per_token * speeds["tokens_per_second"]
            if self.peak_flops is not None:
                speeds["mfu"] = speeds["flops_per_second"] / self.peak_flops
        if torch.cuda.is_available():
            speeds["peak_memory"] = torch.cuda.max_memory_allocated()
        return speeds


def _check_arguments(op: str, trainer: object, every: object) -> None:
    if not isinstance(trainer, Trainer):
        cause = "; the trainer has the model" if isinstance(trainer, torch.nn.Module) else ""
        raise TypeError(f"{op}: trainer must be a Trainer of Transformers, got {type(trainer).__name__}{cause}")
    check_int(op, "every", every)
    require(every >= 1, f"{op}: every must be at least 1, got {every}; it counts optimizer steps")


@contextmanager
def _replaced(owner: object, name: str, value: Callable[..., object]) -> Iterator[None]:
    """A context in which the object `owner` has `value` as its attribute `name`."""
    had, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _count_tokens(inputs: object) -> int:
    """Counts the tokens of a batch, padding included."""
    given = inputs if isinstance(inputs, Mapping) else {}
    for name in ("input_ids", "inputs_embeds", "labels"):
        found = given.get(name)
        if isinstance(found, Tensor):
            return found.shape[:2].numel() if name == "inputs_embeds" else found.numel()
    got = f"one with {', '.join(map(str, given)) or 'nothing'}" if inputs is given else type(inputs).__name__
    text = "a batch must have a tensor input_ids, inputs_embeds or labels to count tokens of"
    raise ValueError(f"SpeedCallback: {text}, got {got}; batches without tokens have no speed in tokens")


def _log(trainer: Trainer, control: TrainerControl, numbers: dict[str, float]) -> None:
    """Logs numbers at the end of a step. `trainer.log` marks the step as logged; Trainer must still log its loss."""
    should_log = control.should_log
    trainer.log(numbers)
    control.should_log = should_log


def _warn_without_experts(model: torch.nn.Module) -> None:
    """Warns if a model was asked for this package's experts and has none that compute by a recipe."""
    name = implementation_of(model) or ""
    if name.startswith("moe_fp8") and not fp8_report(model).running:
        text = f"experts_implementation={name!r} has no effect on {type(model).__name__}"
        warnings.warn(f"moe_fp8_ext: {text}: {fp8_report(model)}", stacklevel=3)
