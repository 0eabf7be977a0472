"""Fine-tunes a small MoE with LoRA over its own FP8 checkpoint, and over BF16. Prints losses of both, for three seeds.

The model is trained on Python first, in BF16. `export_fp8` writes its weights, and Transformers loads them again. LoRA
then trains on the pages of this repository: over the FP8 weights by "moe_fp8_blockwise", and over the BF16 weights by
Transformers' own "grouped_mm". A seed gives both the same adapters and the same batches. The two agree if their mean
losses differ by no more than losses of BF16 do among seeds. Batches differ among seeds too, so the loss of training has
a wide spread. The held-out loss is the stricter of the two, and differences of one seed are stricter still.

It needs transformers, peft and accelerate. Without a GPU, Transformers dequantizes the checkpoint, and the experts
quantize the weights again.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import mean

import peft
import tables
import torch
import transformers
from run import environment
from torch import Tensor, nn

import moe_fp8_ext
from moe_fp8_ext.integrations.transformers import register

ROOT = Path(__file__).resolve().parent.parent
SIZES = dict(
    **dict(num_hidden_layers=3, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_experts=16),
    **dict(num_experts_per_tok=4, num_attention_heads=8, num_key_value_heads=8, head_dim=64, vocab_size=256),
)
TINY = dict(num_hidden_layers=1, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_experts=4)
IMPLEMENTATIONS = {"bf16": "grouped_mm", "fp8": "moe_fp8_blockwise"}
SEEDS = 0, 1, 2
RANK = 16
HELD_OUT = 16  # sequences of the pages that no step sees
LAST = 50  # steps whose mean is the loss of training


class Text:
    """Bytes as tokens. The last sequences are held out."""

    def __init__(self, files: list[Path], context: int, device: torch.device) -> None:
        source = b"".join(file.read_bytes() for file in sorted(files))
        text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
        cut = len(text) - HELD_OUT * context
        self.context, self.device = context, device
        self.text, self.held_out = text[:cut], text[cut:].view(HELD_OUT, context).long().to(device)

    def batches(self, steps: int, sequences: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.text) - self.context, (steps, sequences, 1), generator=generator)
        return self.text[starts + torch.arange(self.context)].long().to(self.device)


def train(model: nn.Module, batches: Tensor, lr: float) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0, fused=batches.is_cuda)
    losses = []
    for i, tokens in enumerate(batches):
        for group in optimizer.param_groups:  # ten steps up, then down along a line
            group["lr"] = lr * min((i + 1) / 10, 1 - i / len(batches))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Text) -> float:
    model.eval()
    losses = [model(input_ids=part, labels=part, use_cache=False).loss for part in text.held_out.split(4)]
    return torch.stack(losses).mean().item()


def pretrained(sizes: dict, text: Text, steps: int, sequences: int, folder: Path) -> None:
    """Trains a model in BF16, and writes it in BF16 and in FP8."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes)
    options = dict(dtype=torch.float32, experts_implementation=IMPLEMENTATIONS["bf16"])
    model = transformers.AutoModelForCausalLM.from_config(config, **options).to(text.device).train()
    with torch.autocast(text.device.type, torch.bfloat16):
        losses = train(model, text.batches(steps, sequences, seed=0), lr=1e-3)
    print(f"pretrained: loss {losses[0]:.3f} to {mean(losses[-LAST:]):.3f}", file=sys.stderr)
    model.to(torch.bfloat16)
    model.save_pretrained(folder / "bf16")
    moe_fp8_ext.export_fp8(model, folder / "fp8")


def finetuned(folder: Path, arm: str, text: Text, steps: int, sequences: int, seed: int) -> dict:
    options = dict(dtype=torch.bfloat16, experts_implementation=IMPLEMENTATIONS[arm])
    options |= dict(device_map={"": str(text.device)})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / arm, **options)
    experts = type(model.model.layers[0].mlp.experts).__name__
    before = held_out_loss(model, text)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )
    model = peft.get_peft_model(model, config)
    draw_adapters(model, seed)
    if arm == "fp8":
        moe_fp8_ext.convert_(model, "blockwise")
    model.train()
    losses = train(model, text.batches(steps, sequences, seed=1 + seed), lr=1e-3)
    return dict(
        **dict(arm=arm, seed=seed, experts=experts, losses=losses, before=before),
        **dict(training=mean(losses[-LAST:]), held_out=held_out_loss(model, text)),
    )


@torch.no_grad()
def draw_adapters(model: nn.Module, seed: int) -> None:
    """Draws A, the same for both arms: PEFT rounds it to the dtype of the weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_A" in name:
            bound = p.shape[1] ** -0.5
            p.copy_(torch.rand(p.shape, generator=generator).mul_(2 * bound).sub_(bound))


def compared(runs: list[dict]) -> dict:
    """Means of both arms, their differences seed by seed, and whether means differ by no more than BF16 among seeds."""
    result = {}
    for loss in ("training", "held_out"):
        bf16, fp8 = ([run[loss] for run in runs if run["arm"] == arm] for arm in IMPLEMENTATIONS)
        spread, difference = max(bf16) - min(bf16), mean(fp8) - mean(bf16)
        result[loss] = dict(bf16=mean(bf16), fp8=mean(fp8), difference=difference, spread_of_bf16=spread)
        result[loss]["within"] = abs(difference) <= spread
        result[loss]["difference_of_seeds"] = [a - b for a, b in zip(fp8, bf16, strict=True)]
    return result


def table(runs: list[dict], steps: int) -> str:
    parts = [*range(0, steps, max(1, steps // 6)), steps]
    columns = [f"{a + 1}-{b}" for a, b in pairwise(parts)] + ["held out before", "held out"]
    lines = ["arm   seed " + "".join(f"{column:>16}" for column in columns)]
    for run in runs:
        values = [mean(run["losses"][a:b]) for a, b in pairwise(parts)] + [run["before"], run["held_out"]]
        lines.append(f"{run['arm']:5} {run['seed']:4} " + "".join(f"{value:16.4f}" for value in values))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of LoRA")
    parser.add_argument("--pretraining", type=int, default=300, metavar="N", help="steps before")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tiny", action="store_true", help="a smaller model, for a CPU")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"JSON file, such as bench/results/{tables.FINETUNE_LOSSES}"
    )
    args = parser.parse_args()
    register()
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {**SIZES, **(TINY if args.tiny else {}), "max_position_embeddings": args.context}
    python = Text(list(Path(sysconfig.get_path("stdlib")).glob("*.py")), args.context, device)
    pages = Text([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")], args.context, device)
    with tempfile.TemporaryDirectory() as folder:
        pretrained(sizes, python, args.pretraining, args.sequences, Path(folder))
        runs = []
        for seed in SEEDS:
            for arm in IMPLEMENTATIONS:
                runs.append(finetuned(Path(folder), arm, pages, args.steps, args.sequences, seed))
                print(f"{arm}, seed {seed}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    result = environment(device) | dict(sizes=sizes, steps=args.steps, step=[args.sequences, args.context], rank=RANK)
    result |= {name: version(name) for name in ("transformers", "peft")} | compared(runs)
    print(table(runs, args.steps))
    print(json.dumps(result | dict(seconds=round(time.perf_counter() - began, 1))))
    if args.out:
        args.out.write_text(json.dumps(result | dict(runs=runs)) + "\n")


if __name__ == "__main__":
    main()
