"""Logs the statistics of `moe_fp8_ext.stats` from the Trainer of Hugging Face Transformers."""

from __future__ import annotations

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from moe_fp8_ext.training.stats import stats


class StatsCallback(TrainerCallback):
    """Measures a Trainer's model with `moe_fp8_ext.stats`, and logs the worst value of all layers after each sample.

        trainer.add_callback(StatsCallback(trainer, every=100))

    `trainer.log` gets them as "fp8/<operand>/<statistic>", "fp8/product_sqnr" and "fp8/load": the smallest `sqnr`,
    `product_sqnr` and `limit`, and the largest of everything else. So they are in `trainer.state.log_history` and in
    every report. Values of single layers are in `callback.stats` and, with a writer, in TensorBoard. A step is one of
    the optimizer; with gradient accumulation its last micro-batch is measured. Each rank measures its own tokens, and
    Trainer reports the values of rank 0.

    Args:
        trainer: the Trainer whose model is measured.
        every: as in `moe_fp8_ext.stats`.
        writer: an object with add_scalar(name, number, step), which gets the values of every layer.
    """

    def __init__(self, trainer: Trainer, every: int = 100, writer: object | None = None) -> None:
        self.trainer, self.writer = trainer, writer
        self.stats = stats(trainer.model, every)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self.stats.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        was_sampled = self.stats.sampled == self.stats.steps
        self.stats.step()
        if not was_sampled:
            return
        worst: dict[str, float] = {}
        for name, number in self.stats.scalars().items():
            key = f"fp8/{name.partition('/')[2]}"
            choose = min if key.endswith(("sqnr", "limit")) else max
            worst[key] = choose(number, worst.get(key, number))
        self.trainer.log(worst)
        if self.writer is not None:
            self.stats.write(self.writer, state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.stats.stop()
