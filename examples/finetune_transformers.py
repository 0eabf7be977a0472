"""Fine-tune a causal language model of Hugging Face Transformers with its experts in FP8.

The model is a folder as save_pretrained writes it, tokenizer included. The text is any number of files. Nothing is
downloaded. Weights are float32 under autocast to BF16, because steps of a fine-tuning are too small to be added in
BF16. With --lora, weights are BF16 or, in an FP8 checkpoint, FP8; they are frozen, and adapters of PEFT on attention
and experts are trained and saved. Transformers' Trainer trains if accelerate is installed; --loop uses the plain loop
below instead.
"""

import argparse
import math
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import moe_fp8_ext
from moe_fp8_ext.integrations.transformers import register

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]


def with_adapters(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    """The model with adapters of PEFT, whose experts take the adapters as factors."""
    from peft import LoraConfig, get_peft_model

    names = [name for name, _ in model.named_parameters()]
    experts = [weight for weight in EXPERTS if any(name.endswith(weight) for name in names)]
    options = dict(target_modules=ATTENTION, target_parameters=experts, task_type="CAUSAL_LM")
    model = get_peft_model(model, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, **options))
    if args.implementation.startswith("moe_fp8"):
        recipe = args.implementation.removeprefix("moe_fp8").removeprefix("_")
        moe_fp8_ext.convert_(model, recipe or "rowwise")
    model.print_trainable_parameters()
    return model


def windows(tokenizer: object, files: list[Path], context: int) -> list[dict[str, Tensor]]:
    """The tokens of all files, cut into examples of one length. Tokens that remain at the end are dropped."""
    text = "\n".join(file.read_text() for file in files)
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    return [{"input_ids": part, "labels": part} for part in tokens.split(context) if len(part) == context]


def by_trainer(model: nn.Module, examples: list[dict[str, Tensor]], args: argparse.Namespace) -> list[float]:
    options = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        bf16=True,
        use_cpu=args.device == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(model, options, train_dataset=examples)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def by_loop(model: nn.Module, examples: list[dict[str, Tensor]], args: argparse.Namespace) -> list[float]:
    torch.manual_seed(0)  # for the order of examples
    model.to(args.device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.lr, weight_decay=0.0, fused=True)
    losses = []
    while True:
        for batch in DataLoader(examples, args.batch, shuffle=True):
            if len(losses) == args.steps:
                return losses
            with torch.autocast(args.device, torch.bfloat16):
                loss = model(**{name: value.to(args.device) for name, value in batch.items()}).loss
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(f"step {len(losses)}: loss {losses[-1]:.4f}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="folder of the model and its tokenizer")
    add("text", type=Path, nargs="+", help="text files to train on")
    add("--out", type=Path, required=True, metavar="DIR", help="folder for the trained model")
    text = "what multiplies the experts: moe_fp8, moe_fp8_<recipe>, or grouped_mm for Transformers' own BF16"
    add("--implementation", default="moe_fp8", metavar="NAME", help=text)
    add("--steps", type=int, default=100, metavar="N")
    add("--batch", type=int, default=4, metavar="N", help="sequences in a step")
    add("--context", type=int, default=1024, metavar="N", help="tokens in a sequence")
    add("--lr", type=float, default=1e-5, help="learning rate of AdamW; adapters usually need 1e-4 and more")
    add("--lora", action="store_true", help="train adapters of PEFT on attention and experts, and nothing else")
    add("--rank", type=int, default=16, metavar="N", help="rank of the adapters")
    add("--fp8-checkpoint", type=Path, metavar="DIR", help="also write the trained model as an FP8 checkpoint")
    add("--loop", action="store_true", help="train in a plain loop, without Transformers' Trainer")
    args = parser.parse_args()
    for name in ("steps", "batch", "context", "lr", "rank"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} must be positive, got {getattr(args, name)}")
    for file in (args.model / "config.json", *args.text):
        if not file.is_file():
            parser.error(f"{file} is no file; model must be a folder as save_pretrained writes it, text a text file")
    folder = args.fp8_checkpoint
    if folder and (folder.resolve() == args.out.resolve() or folder.exists() and any(folder.iterdir())):
        parser.error(f"--fp8-checkpoint must be a new or empty folder, and not --out, got {folder}")
    if args.lora and find_spec("peft") is None:
        parser.error("--lora needs PEFT: pip install peft")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    args = parse_args()
    register()
    dtype = torch.bfloat16 if args.lora else torch.float32
    options = dict(dtype=dtype, experts_implementation=args.implementation, local_files_only=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(args.model, **options)
        examples = windows(tokenizer, args.text, args.context)
    # An incomplete folder, an unknown implementation, bytes that are not text, or weights that cannot be multiplied.
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(str(error))
    if len(examples) < args.batch:
        sys.exit(f"the text must fill a batch of {args.batch} x {args.context} tokens, got {len(examples)} sequences")
    if not any(hasattr(module, "is_transposed") for module in model.modules()):
        sys.exit(f"{args.model} must have experts that Transformers lets others multiply, got {type(model).__name__}")
    if args.lora:
        try:
            model = with_adapters(model, args)
        except ValueError as error:  # experts that the recipe cannot multiply, or a model that PEFT cannot adapt
            sys.exit(str(error))
    if args.fp8_checkpoint:
        try:
            moe_fp8_ext.fp8_state(model, merge_adapters=args.lora)  # says before training what cannot be written
        except RuntimeError as error:
            sys.exit(str(error))
    train = by_trainer if find_spec("accelerate") and not args.loop else by_loop
    losses = train(model, examples, args)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    if args.fp8_checkpoint:
        moe_fp8_ext.export_fp8(model, args.fp8_checkpoint, merge_adapters=args.lora)
        tokenizer.save_pretrained(args.fp8_checkpoint)
    print(f"loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last; saved to {args.out}")


if __name__ == "__main__":
    main()
