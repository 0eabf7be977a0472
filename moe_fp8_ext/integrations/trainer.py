"""Callbacks of the Trainer of Hugging Face Transformers: statistics of FP8, and the speed of training."""

from __future__ import annotations

import functools
import time
import warnings

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState

from moe_fp8_ext.integrations.convert import fp8_report
from moe_fp8_ext.integrations.transformers import implementation_of
from moe_fp8_ext.training.flops import count_torch_products
from moe_fp8_ext.training.stats import stats


class StatsCallback(TrainerCallback):
    """Measures a Trainer's model with `moe_fp8_ext.stats`, and logs the worst value of all layers after each sample.

        trainer.add_callback(StatsCallback(trainer, every=100))

    `trainer.log` gets the values as "fp8/<operand>/<statistic>", "fp8/product_sqnr" and "fp8/load": the smallest
    `sqnr`, `product_sqnr` and `limit`, and the largest value of all other statistics. `trainer.state.log_history` and
    every report then have them too. `callback.stats` has the values of single layers. With a writer, TensorBoard has
    them as well. A step is an optimizer step. With gradient accumulation, its last micro-batch is measured. Each rank
    measures its own tokens, and Trainer reports the values of rank 0.

    Args:
        trainer: the Trainer whose model is measured.
        every: as in `moe_fp8_ext.stats`.
        writer: an object with add_scalar(name, number, step). It gets the values of every layer.
    """

    def __init__(self, trainer: Trainer, every: int = 100, writer: object | None = None) -> None:
        self.trainer, self.writer = trainer, writer
        self.stats = stats(trainer.model, every)

    def on_train_begin(self, *_: object, **__: object) -> None:
        _warn_without_experts(self.trainer.model)
        self.stats.start()

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **__: object) -> None:
        was_sampled = self.stats.sampled == self.stats.steps
        self.stats.step()
        if not was_sampled:
            return
        _log(self.trainer, control, {f"fp8/{name}": number for name, number in self.stats.worst().items()})
        if self.writer is not None:
            self.stats.write(self.writer, state.global_step)

    def on_train_end(self, *_: object, **__: object) -> None:
        self.stats.stop()


class SpeedCallback(TrainerCallback):
    """Logs the speed and the peak memory of a Trainer's training.

        trainer.add_callback(SpeedCallback(trainer, every=10))

    Once in `every` optimizer steps, `trainer.log` gets these numbers of this rank:

    - "speed/tokens_per_second": elements of `input_ids`, padding included.
    - "speed/flops_per_second": operations of forward and backward, including a forward that checkpointing repeats.
      `FlopCounterMode` counts the operations of the first optimizer step. Later steps count the same number per token.
      The counter may miss graphs of torch.compile. If it counts nothing, the number is left out.
    - "speed/mfu": flops_per_second / peak_flops, if peak_flops is given.
    - "speed/peak_memory": the peak of bytes that tensors had on the GPU since the last log; not on a CPU.

    The first step is not timed, because warming up and counting make it slower. Times include the time between steps,
    such as an evaluation. The callback does not wait for the GPU, so choose an `every` of several steps. While training
    runs, the callback replaces `compute_loss` of the Trainer by a function that counts tokens and calls the original.

    Args:
        trainer: the Trainer whose model is measured.
        every: optimizer steps between logs, at least 1.
        peak_flops: operations per second of the GPU, such as 989e12 for products in BF16 on an H100.
    """

    def __init__(self, trainer: Trainer, every: int = 10, peak_flops: float | None = None) -> None:
        if every < 1:
            raise ValueError(f"SpeedCallback: every must be at least 1, got {every}")
        self.trainer, self.every, self.peak_flops = trainer, every, peak_flops
        self.flops_per_token: float | None = None
        self._counter: object | None = None
        self._before: object | None = None  # what the Trainer itself had as compute_loss
        self._is_counting = False
        self._tokens, self._steps, self._since = 0, 0, 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        _warn_without_experts(self.trainer.model)
        self._stop()  # of a training that raised
        self._tokens, self._steps, self.flops_per_token = 0, 0, None
        compute_loss = self.trainer.compute_loss

        @functools.wraps(compute_loss)
        def counting(model: torch.nn.Module, inputs: dict[str, object], *args: object, **kwargs: object) -> object:
            if model.training:
                self._tokens += inputs["input_ids"].numel()
            return compute_loss(model, inputs, *args, **kwargs)

        self._before, self.trainer.compute_loss = vars(self.trainer).get("compute_loss"), counting
        self._is_counting = True

    def on_step_begin(self, *_: object, **__: object) -> None:
        if self.flops_per_token is None and self._counter is None:
            from torch.utils.flop_counter import FlopCounterMode  # loads Triton

            self._counter = FlopCounterMode(display=False, custom_mapping=count_torch_products())
            self._counter.__enter__()

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **__: object) -> None:
        if self._counter is not None:
            self._stop_counting()
            self._restart()
            return
        self._steps += 1
        if self._steps == self.every:
            _log(self.trainer, control, {f"speed/{name}": number for name, number in self._speeds().items()})
            self._restart()

    def on_train_end(self, *_: object, **__: object) -> None:
        self._stop()

    def _stop(self) -> None:
        """Gives the Trainer its compute_loss back, and ends the count of a first step that did not end."""
        if self._counter is not None:
            self._stop_counting()
        if not self._is_counting:
            return
        self._is_counting = False
        if self._before is None:
            del self.trainer.compute_loss
        else:
            self.trainer.compute_loss = self._before

    def _stop_counting(self) -> None:
        self._counter.__exit__(None, None, None)
        self.flops_per_token = self._counter.get_total_flops() / max(self._tokens, 1)
        self._counter = None

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
