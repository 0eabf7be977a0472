"""Pretrains a MoE language model under one recipe and one seed, and records its losses.

    python bench/corpus.py --out corpus.pt
    python bench/pretrain.py --corpus corpus.pt --recipe rowwise --out bench/results/losses/rowwise.json

The model comes from examples/train_moe_lm.py: 0.44 B parameters, 32 experts, 4 of them for each token. A token is a
byte. No byte of the corpus is read twice unless the corpus is too short. A seed decides the first weights and the order
of the data. So two recipes with one seed differ in the arithmetic of the experts alone.

A run records what it has after each evaluation, and stops when --seconds are over. With --checkpoint it then keeps its
state, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean

import torch
from provenance import environment
from torch import Tensor, nn

import moe_fp8_ext
from moe_fp8_ext import Recipe

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from train_moe_lm import BALANCE_WEIGHT, LanguageModel, evaluate, rate, windows  # noqa: E402

# option: (default, help)
SIZES = {
    "tokens": (1600 * 65536, "tokens to train with: whole steps, and the length of the learning rate's schedule"),
    "batch": (64, "sequences in a step"),
    "context": (1024, "bytes in a sequence"),
    "layers": (8, "transformer blocks"),
    "dim": (1024, "width of the model"),
    "heads": (16, "attention heads in a block"),
    "experts": (32, "experts in a block"),
    "top-k": (4, "experts that a token is routed to"),
    "hidden": (512, "width of an expert"),
    "every": (100, "steps from one evaluation, and one sample of the statistics, to the next"),
    "seed": (0, "seed of the first weights and of the order of the data"),
}
WINDOW = 20  # steps whose mean is a point of the curves of training
clock = time.perf_counter


def recipe_of(text: str) -> Recipe:
    return Recipe.from_json(text) if text.startswith("{") else Recipe(text)


def starts_of(text: Tensor, context: int, count: int, seed: int) -> Tensor:
    """Starts of sequences [count] in a random order. None comes twice before all have come."""
    generator, sequences = torch.Generator().manual_seed(seed), (len(text) - 1) // context
    epochs = [torch.randperm(sequences, generator=generator) for _ in range(-(-count // sequences))]
    return torch.cat(epochs)[:count] * context


class Training:
    """One run. It can stop after any step, and a later one goes on from `state` with the same bytes."""

    def __init__(self, args: argparse.Namespace, corpus: dict) -> None:
        self.args, device = args, torch.device(args.device)
        self.text, self.held_out_text = (corpus[name].to(device) for name in ("train", "held_out"))
        self.tokens_of_step = args.batch * args.context
        self.steps = args.tokens // self.tokens_of_step
        starts = starts_of(self.text, args.context, self.steps * args.batch, args.seed)
        self.starts = starts.view(self.steps, args.batch).to(device)
        torch.manual_seed(args.seed)
        self.model = LanguageModel(args, args.recipe, nullcontext()).to(device)
        if args.compile:
            for block in self.model.blocks:
                block.attend = torch.compile(block.attend)
        parameters = [*self.model.parameters()]
        decayed, others = ([p for p in parameters if (p.dim() > 1) == is_matrix] for is_matrix in (True, False))
        groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.stats = moe_fp8_ext.stats(self.model, every=args.every)
        # What a step appends to stays on the device, so that no step waits for it.
        self.losses, self.norms = (torch.full((self.steps,), float("nan"), device=device) for _ in range(2))
        self.step, self.held_out, self.samples = 0, [], []
        self.timed_seconds, self.timed_steps, self.began = 0.0, 0, None
        routed = sum(p.numel() for name, p in self.model.named_parameters() if ".experts." in name)
        total = sum(p.numel() for p in parameters)
        self.described = {
            **environment(device),
            **dict(recipe=json.loads(args.recipe.to_json()), compiled=args.compile, lr=args.lr),
            **{name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in SIZES},
            **dict(parameters=total, active=total - routed + routed * args.top_k // args.experts),
            "corpus": {name: corpus[name] for name in ("files", "hash")}
            | {name: corpus[name].numel() for name in ("train", "held_out")},
        }

    def run(self, deadline: float, record: callable) -> bool:
        """Trains until the deadline of the clock, and returns whether all steps are done."""
        self.began = (clock(), self.step)
        while True:
            tokens = self.step * self.tokens_of_step
            is_due = self.step % self.args.every == 0 or self.step == self.steps
            if is_due and tokens not in dict(self.held_out):
                self._stop_watch()
                self.held_out.append((tokens, evaluate(self.model, self.held_out_text, self.args)))
                record(self)
            if self.step == self.steps or clock() >= deadline:
                self._stop_watch()
                return self.step == self.steps
            self._train()

    def _train(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * rate(self.step, self.steps)
        with self.stats:
            loss, balance = self.model(*windows(self.text, self.starts[self.step], self.args.context))
            (loss + BALANCE_WEIGHT * balance).backward()
        self.norms[self.step] = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses[self.step] = loss.detach()
        is_sampled = self.step % self.args.every == 0
        self.stats.step()
        self.step += 1
        if is_sampled:  # its time is not counted: measuring takes longer, and the first step loads libraries
            self.samples.append(dict(step=self.step - 1) | self.stats.worst())
            self.began = (clock(), self.step)

    def _stop_watch(self) -> None:
        if self.began:
            if self.text.is_cuda:
                torch.cuda.synchronize()
            began, step = self.began
            self.timed_seconds += clock() - began
            self.timed_steps += self.step - step
        self.began = None

    def result(self) -> dict:
        tokens = lambda steps: steps * self.tokens_of_step  # noqa: E731
        curves = {name: values[: self.step].tolist() for name, values in (("l", self.losses), ("n", self.norms))}
        parts = range(WINDOW, self.step + 1, WINDOW)
        rounded = lambda values: [round(x, 5) for x in values]  # noqa: E731
        return self.described | {
            "seen": tokens(self.step),
            "tokens_per_second": round(tokens(self.timed_steps) / self.timed_seconds) if self.timed_steps else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if self.text.is_cuda else None,
            "held_out_losses": [[at, round(loss, 6)] for at, loss in self.held_out],
            "train_losses": [[tokens(at), *rounded([fmean(curves["l"][at - WINDOW : at])])] for at in parts],
            # mean and maximum
            "gradient_norms": [
                [tokens(at), *rounded([fmean(part), max(part)])]
                for at in parts
                for part in [curves["n"][at - WINDOW : at]]
            ],
            "stats": [{name: float(f"{number:.4g}") for name, number in sample.items()} for sample in self.samples],
        }

    def state(self) -> dict:
        """Everything that `resume` needs. No random numbers are drawn after the first weights."""
        names = "step", "losses", "norms", "held_out", "samples", "timed_seconds", "timed_steps"
        found = dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict(), run=self._identity())
        return found | {name: getattr(self, name) for name in names}

    def resume(self, state: dict) -> None:
        if state["run"] != self._identity():
            raise ValueError(f"the checkpoint is of another run: {state['run']}, this one is {self._identity()}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name in ("losses", "norms"):
            getattr(self, name).copy_(state[name])
        for name in ("step", "held_out", "samples", "timed_seconds", "timed_steps"):
            setattr(self, name, state[name])
        self.stats.steps = self.step

    def _identity(self) -> dict:
        names = "recipe", "lr", "corpus", *(name.replace("-", "_") for name in SIZES)
        return {name: self.described[name] for name in names}


def write(path: Path, save: callable) -> None:
    """Writes a file as a whole, or leaves the old one."""
    unfinished = path.with_name(f"{path.name}.part")
    save(unfinished)
    os.replace(unfinished, path)


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, metavar="FILE", help="from bench/corpus.py")
    add("--recipe", type=recipe_of, default="bf16", help="a name, or what Recipe.to_json writes")
    add("--out", type=Path, required=True, metavar="FILE", help="JSON file, such as bench/results/losses/bf16-0.json")
    for name, (default, text) in SIZES.items():
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: {default:,})")
    add("--lr", type=float, default=6e-4, help="peak learning rate of AdamW")
    add("--seconds", type=float, default=float("inf"), help="stop after this time, wherever the run is")
    add("--checkpoint", type=Path, metavar="FILE", help="go on from this state if it is there, and keep it there")
    add("--compile", action="store_true", help="compile attention and norms by torch.compile")
    args = parser.parse_args(words)
    args.device, args.ep = "cuda" if torch.cuda.is_available() else "cpu", False
    if args.tokens < args.batch * args.context:
        parser.error(f"--tokens must be a step of {args.batch * args.context:,} or more, got {args.tokens:,}")
    return args


def main(words: list[str] | None = None) -> None:
    began, args = clock(), parse(words)
    training = Training(args, torch.load(args.corpus, mmap=True))
    if args.checkpoint and args.checkpoint.exists():
        training.resume(torch.load(args.checkpoint, map_location=args.device))

    def record(training: Training) -> None:
        write(args.out, lambda path: path.write_text(json.dumps(training.result()) + "\n"))
        (tokens, loss), speed = training.held_out[-1], training.result()["tokens_per_second"]
        text = f"{args.out.stem}: {tokens:,} tokens, held-out loss {loss:.4f}, {speed or 0:,} tokens/s"
        print(f"{text}, {clock() - began:.0f} s", file=sys.stderr, flush=True)

    if not training.run(began + args.seconds, record):
        record(training)
        if args.checkpoint:
            write(args.checkpoint, lambda path: torch.save(training.state(), path))


if __name__ == "__main__":
    main()
