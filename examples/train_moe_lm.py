"""Train one small Mixture-of-Experts language model under several recipes, side by side.

The model is a byte-level transformer: causal attention, and top-k routing to SwiGLU experts by
moe_fp8_ext.MoE. The text is the source of Python's own standard library, so nothing is downloaded. Every recipe
starts from the same weights and reads the same bytes in the same order: only the arithmetic of the experts differs.
The run ends with a table and a picture of the loss curves; --losses keeps their numbers too.

With `torchrun --nproc-per-node 2 examples/train_moe_lm.py --ep` experts are spread over two processes, each of which
has all other weights and reads its share of every batch. Losses equal the losses of one
process, except for roundings and for the loss of the experts' balance, which is a mean over the processes' shares.
"""

import argparse
import atexit
import datetime
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws without a display
from matplotlib.figure import Figure
from tabulate import tabulate
from torch import Tensor, nn
from tqdm import tqdm

import moe_fp8_ext

RECIPES = ("bf16", "rowwise", "blockwise", "mxfp8")
BASELINE = "bf16"
TOLERANCE = 0.01  # --check: largest relative difference from the baseline's held-out loss
BALANCE_WEIGHT = 0.01
EVAL_BATCHES = 32
STDLIB = Path(sysconfig.get_path("stdlib"))

# option: (default on a CPU, default on a GPU, help)
SIZES = {
    "steps": (350, 400, "training steps for each recipe"),
    "batch": (16, 32, "sequences in a step"),
    "context": (128, 1024, "bytes in a sequence"),
    "layers": (3, 8, "transformer blocks"),
    "dim": (128, 1024, "width of the model"),
    "heads": (4, 16, "attention heads in a block"),
    "experts": (8, 32, "experts in a block"),
    "top-k": (2, 4, "experts that a token is routed to"),
    "hidden": (128, 512, "width of an expert"),
}


def read_stdlib() -> tuple[bytearray, bytearray]:
    """The standard library's source as bytes: every tenth file is held out, the others are for training."""
    skip = {"site-packages", "dist-packages", "test", "tests"}  # installed later, or not shipped by every distribution
    files = sorted(f for f in STDLIB.rglob("*.py") if skip.isdisjoint(f.relative_to(STDLIB).parts))
    train, held_out = bytearray(), bytearray()
    for i, file in enumerate(files):
        (held_out if i % 10 == 9 else train).extend(file.read_bytes())
    return train, held_out


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, both [batch, context], read at `starts`."""
    rows = text[starts[:, None] + torch.arange(context + 1, device=text.device)].long()
    return rows[:, :-1], rows[:, 1:]


def ranks() -> tuple[int, int]:
    """The rank of this process, and the number of processes that --ep has joined."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def share(whole: Tensor) -> Tensor:
    rank, count = ranks()
    return whole.chunk(count)[rank]


def sum_of_ranks(x: Tensor) -> Tensor:
    if ranks()[1] > 1:
        dist.all_reduce(x)
    return x


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Adds up the memory that autograd keeps for backward while entered. A storage kept twice counts once."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def experts_of(args: argparse.Namespace, recipe: moe_fp8_ext.Recipe) -> moe_fp8_ext.Experts:
    """SwiGLU experts with normal weights, the same on any number of processes."""
    ep = None
    if args.ep:
        from moe_fp8_ext.distributed import ExpertParallel

        ep = ExpertParallel(dist.group.WORLD, args.experts, args.top_k, recipe=recipe)
    sizes = args.experts, args.dim, args.hidden
    experts = nn.utils.skip_init(moe_fp8_ext.Experts, *sizes, recipe=recipe, ep=ep)
    for weight in experts.parameters():
        of_all_ranks = torch.empty(args.experts, *weight.shape[1:])
        weight.data = share(nn.init.normal_(of_all_ranks, std=weight.shape[2] ** -0.5)).clone()
    return experts


class Block(nn.Module):
    def __init__(self, args: argparse.Namespace, recipe: moe_fp8_ext.Recipe, saved: AbstractContextManager) -> None:
        super().__init__()
        self.heads = args.heads
        self.norm1, self.norm2 = nn.RMSNorm(args.dim), nn.RMSNorm(args.dim)
        self.qkv, self.out = nn.Linear(args.dim, 3 * args.dim, bias=False), nn.Linear(args.dim, args.dim, bias=False)
        router = moe_fp8_ext.Router(args.experts, args.dim, args.top_k, normalize=False, balance_loss=1.0)
        self.moe, self.saved = moe_fp8_ext.MoE(router, experts_of(args, recipe)), saved

    def attend(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """The dense half: x after attention, and the tokens of the experts."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = (rotate(F.rms_norm(t, t.shape[-1:]), rotation) for t in (q, k))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x, self.norm2(x).bfloat16()

    def forward(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        x, tokens = self.attend(x, rotation)
        # The layer casts by itself. Without autocast, router and experts are one node of autograd.
        with self.saved, torch.autocast(x.device.type, enabled=False):
            y, balance = self.moe(tokens)
        return x + y, balance


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding: pairs of features, taken as complex numbers, turn as the position grows."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


class LanguageModel(nn.Module):
    def __init__(self, args: argparse.Namespace, recipe: moe_fp8_ext.Recipe, saved: AbstractContextManager) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, args.dim)
        self.blocks = nn.ModuleList(Block(args, recipe, saved) for _ in range(args.layers))
        self.norm, self.head = nn.RMSNorm(args.dim), nn.Linear(args.dim, 256, bias=False)
        half = args.dim // args.heads // 2
        angle = torch.outer(torch.arange(args.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angle), angle))

    def forward(self, text: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy in nats a byte, and the load-balance loss averaged over the blocks."""
        # The dense layers run in bfloat16 on a GPU only: not every CPU multiplies it faster than float32.
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            x, balance = self.embedding(text), torch.zeros((), device=text.device)
            for block in self.blocks:
                x, unevenness = block(x, self.rotation)
                balance = balance + unevenness / len(self.blocks)
            logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten()), balance


@dataclass
class Run:
    recipe: str
    losses: list[float]
    held_out: float
    tokens_per_second: float
    saved_bytes: int


def recipe_of(name: str, args: argparse.Namespace) -> moe_fp8_ext.Recipe:
    if name == BASELINE:
        return moe_fp8_ext.Recipe(name)
    rounding = {"rounding": args.rounding} if args.rounding else {}
    return moe_fp8_ext.Recipe(name, wgrad_high_precision=args.wgrad_high_precision, **rounding)


def clip_gradients(model: LanguageModel) -> None:
    """Turns gradients into gradients of the whole batch, whose loss is the mean of the ranks', and clips their norm to
    1."""
    count = ranks()[1]
    if count == 1:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return
    experts = {p for block in model.blocks for p in block.moe.experts.parameters()}
    others = [p for p in model.parameters() if p not in experts]
    for p in others:  # experts have already seen the tokens of all ranks
        sum_of_ranks(p.grad)
    torch._foreach_div_([p.grad for p in model.parameters()], count)
    of_experts, of_others = (nn.utils.get_total_norm([p.grad for p in ps]).square() for ps in (experts, others))
    nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, (sum_of_ranks(of_experts) + of_others).sqrt())


def rate(step: int, steps: int) -> float:
    """The learning rate as a share of its peak: a twentieth of the steps warms up, then a cosine decays to a tenth."""
    return min((step + 1) / max(1, steps // 20), 0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(recipe: str, args: argparse.Namespace, text: Tensor, held_out_text: Tensor) -> Run:
    torch.manual_seed(args.seed)
    starts = torch.randint(len(text) - args.context, (args.steps, args.batch)).to(args.device)
    saved = SavedBytes()
    model = LanguageModel(args, recipe_of(recipe, args), saved).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
    losses = torch.empty(args.steps, device=args.device)
    rank, count = ranks()
    with tqdm(range(args.steps), desc=f"{recipe:>9}", unit="step", mininterval=0.5, disable=rank > 0) as bar:
        for step in bar:
            saved.storages.clear()
            loss, balance = model(*windows(text, share(starts[step]), args.context))
            (loss + BALANCE_WEIGHT * balance).backward()
            clip_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses[step] = loss.detach()
            if step % 20 == 0:  # seldom, because reading a loss waits for the GPU
                bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            if step == 0:  # untimed: it also loads libraries and fills memory pools
                began = time.perf_counter()
        history = (sum_of_ranks(losses) / count).tolist()
        speed = (args.steps - 1) * args.batch * args.context / (time.perf_counter() - began)
    return Run(recipe, history, evaluate(model, held_out_text, args), speed, sum(saved.storages.values()))


@torch.no_grad()
def evaluate(model: LanguageModel, text: Tensor, args: argparse.Namespace) -> float:
    """Mean loss over windows spread evenly over the held-out text."""
    last = len(text) - args.context - 1
    starts = torch.linspace(0, last, EVAL_BATCHES * args.batch, dtype=torch.float64).long().to(text.device)
    losses = [model(*windows(text, share(batch), args.context))[0] for batch in starts.split(args.batch)]
    return sum_of_ranks(torch.stack(losses).mean()).item() / ranks()[1]


def print_table(runs: list[Run], differences: dict[str, float]) -> None:
    head = ["recipe", "first loss", "last loss", "held-out loss", f"vs {BASELINE}", "tokens/s", "saved for backward"]
    rows = []
    for run in runs:
        difference = f"{differences[run.recipe]:+.2%}" if run.recipe in differences else "-"
        row = [run.recipe, f"{run.losses[0]:.4f}", f"{fmean(run.losses[-10:]):.4f}", f"{run.held_out:.4f}", difference]
        rows.append(row + [f"{run.tokens_per_second:,.0f}", f"{run.saved_bytes / 2**20:,.2f} MiB"])
    print("\n" + tabulate(rows, head, disable_numparse=True, colalign=["left"] + ["right"] * 6))
    print("\nLosses are in nats a byte, the last one a mean of 10 steps. Saved for backward is what the MoE")
    print("layers keep from the forward to the backward pass of one step, with the tokens as they came.")
    if ranks()[1] > 1:
        print(f"Experts are spread over {ranks()[1]} ranks; the saved bytes are the first rank's.")


def plot(runs: list[Run], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="training loss (nats a byte)")
    for run, style in zip(runs, cycle(("-", "--", "-.", ":"))):
        smooth = [fmean(run.losses[max(0, i - 5) : i + 6]) for i in range(len(run.losses))]
        (line,) = axes.plot(smooth, style, label=f"{run.recipe} (held-out {run.held_out:.4f})")
        axes.plot(run.losses, color=line.get_color(), alpha=0.2, linewidth=0.8)
    axes.set_title("MoE language model on the source of Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    FigureCanvasAgg(figure).print_png(path)


def write_losses(runs: list[Run], args: argparse.Namespace) -> None:
    """Writes the numbers of the picture, as bench/report.py reads them, and the machine of each run, so that files can
    be joined."""
    where = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "a CPU",
        "commit": os.environ.get("MOE_FP8_COMMIT") or commit_here(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    curves = [
        {"recipe": run.recipe, **where, "losses": [round(x, 4) for x in run.losses], "held_out": round(run.held_out, 5)}
        for run in runs
    ]
    args.losses.write_text(json.dumps({"steps": args.steps, "runs": curves}) + "\n")


def commit_here() -> str | None:
    ask = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a copy without its history
        return None


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    known = ", ".join(RECIPES)
    text = f"what to train with, in this order, out of {known} (default: bf16,rowwise, with --check all of them)"
    add("--recipes", type=lambda names: names.split(","), default=argparse.SUPPRESS, metavar="A,B", help=text)
    text = "how scales are rounded (default: as the recipe does)"
    add("--rounding", choices=("exact", "pow2", "rceil", "floor"), default=argparse.SUPPRESS, help=text)
    text = "compute weight gradients in BF16 from BF16 activations, which are kept for it"
    add("--wgrad-high-precision", action="store_true", help=text)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes a GPU where there is one")
    for name, (cpu, gpu, text) in SIZES.items():
        text += f" (default: {cpu} on a CPU, {gpu} on a GPU)"
        add(f"--{name}", type=int, default=argparse.SUPPRESS, metavar="N", help=text)
    text = "peak learning rate of AdamW (default: 0.004 at width 128, and in inverse proportion to the width)"
    add("--lr", type=float, default=argparse.SUPPRESS, help=text)
    add("--seed", type=int, default=0, metavar="N", help="seed of the weights and of the order of the data")
    add("--plot", type=Path, default="train_moe_lm.png", metavar="FILE", help="PNG file for the loss curves")
    add("--losses", type=Path, default=argparse.SUPPRESS, metavar="FILE", help="JSON file for the losses")
    add("--check", action="store_true", help=f"fail if a held-out loss is over {TOLERANCE:.0%}% off {BASELINE}'s")
    text = "spread the experts and every batch over the processes of torchrun, --nproc-per-node of them"
    add("--ep", action="store_true", help=text)
    args = parser.parse_args()

    def expect(ok: bool, option: str, what: str, got: object) -> None:
        if not ok:
            parser.error(f"argument --{option}: expected {what}, got {got}")

    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    expect(args.device == "cpu" or torch.cuda.is_available(), "device", "cpu, for want of a GPU", args.device)
    for name, (cpu, gpu, _) in SIZES.items():
        size = vars(args).setdefault(name.replace("-", "_"), gpu if args.device == "cuda" else cpu)
        expect(0 < size <= 2**20, name, f"a number from 1 to {2**20}", size)
    if args.ep:
        expect("WORLD_SIZE" in os.environ, "ep", "processes that torchrun starts", "another")
        processes = int(os.environ["WORLD_SIZE"])
        for name in ("experts", "batch"):
            size = vars(args)[name]
            expect(size % processes == 0, name, f"a multiple of the {processes} processes of --ep", size)
    vars(args).setdefault("rounding", None)
    vars(args).setdefault("recipes", RECIPES if args.check else (BASELINE, "rowwise"))
    for recipe in args.recipes:
        expect(recipe in RECIPES, "recipes", f"names from {known}", repr(recipe))
        try:
            recipe_of(recipe, args)
        except ValueError as error:
            parser.error(f"argument --rounding: {error}")
    comparable = BASELINE in args.recipes and len(args.recipes) > 1
    expect(comparable or not args.check, "recipes", f"{BASELINE} and another for --check", ",".join(args.recipes))
    limit = 1023 if args.device == "cuda" else 1024  # experts
    expect(args.experts <= limit, "experts", f"at most {limit}", args.experts)
    expect(args.top_k <= args.experts, "top-k", f"at most --experts = {args.experts}", args.top_k)
    expect(args.dim % (2 * args.heads) == 0, "dim", f"a multiple of 2 x --heads = {2 * args.heads}", args.dim)
    vars(args).setdefault("lr", 4e-3 * 128 / args.dim)
    expect(0 < args.lr < math.inf, "lr", "a positive number", args.lr)
    expect(0 <= args.seed < 2**63, "seed", "a number from 0 to 2^63 - 1", args.seed)
    for name in ("plot", "losses"):
        if file := vars(args).setdefault(name, None):
            writable = os.access(file if file.exists() else file.parent, os.W_OK) and not file.is_dir()
            expect(writable, name, "a file that can be written", file)
    texts = read_stdlib()
    shortest = min(map(len, texts))
    expect(args.context < shortest, "context", f"less than the {shortest} bytes of text in {STDLIB}", args.context)
    args.corpus = [torch.frombuffer(text, dtype=torch.uint8) for text in texts]
    return args


def main() -> int:
    args = parse_args()
    if args.ep:
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    try:
        corpus = [text.to(args.device) for text in args.corpus]
        runs = [train(recipe, args, *corpus) for recipe in args.recipes]
    except (MemoryError, RuntimeError) as error:  # torch has a class of its own only for a GPU's memory
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        sys.exit("train_moe_lm.py: out of memory; try a smaller --batch, --context, --dim or --hidden")
    return report(runs, args) if ranks()[0] == 0 else 0


def report(runs: list[Run], args: argparse.Namespace) -> int:
    """Prints, draws and writes. Returns the exit status."""
    base = [run.held_out for run in runs if run.recipe == BASELINE]
    differences = {run.recipe: run.held_out / base[0] - 1 for run in runs if base and run.recipe != BASELINE}
    print_table(runs, differences)
    plot(runs, args.plot)
    print(f"Loss curves: {args.plot}")
    if args.losses:
        write_losses(runs, args)
    if args.device == "cpu":
        print("A CPU emulates FP8: it shows the losses of FP8, not its speed. FP8 is faster than BF16 on a GPU only.")
    far = [recipe for recipe, d in differences.items() if not abs(d) <= TOLERANCE]  # NaN counts as far
    if args.check and far:
        print(f"The held-out loss of {', '.join(far)} is not within {TOLERANCE:.0%} of {BASELINE}'s.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)
