"""Train a tiny Mixtral of Hugging Face Transformers, with its experts in BF16 and in FP8, from the same weights.

Nothing is downloaded: the model is random, and the text is the source of this script. Runs on a CPU in seconds. A CPU
emulates FP8: it shows the losses of a GPU, not its speed.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from moe_fp8_ext.integrations.transformers import register

STEPS, CONTEXT, BATCH = 30, 64, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model_with(implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)  # the same weights for every implementation
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=256,  # bytes
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation=implementation)
    return model.to(DEVICE)


def train(implementation: str, text: torch.Tensor) -> tuple[float, float]:
    """The first loss and the last."""
    model = model_with(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(1)  # the same batches for every implementation
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
        batch = text[starts + torch.arange(CONTEXT)].to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses[0].item(), losses[-1].item()


def main() -> None:
    register()
    text = torch.tensor(list(Path(__file__).read_bytes()))
    print(f"loss on {DEVICE}:\n{'experts':>17}  {'first':>6}  {'last':>6}")
    for implementation in ("grouped_mm", "moe_fp8", "moe_fp8_blockwise"):
        first, last = train(implementation, text)
        print(f"{implementation:>17}  {first:>6.4f}  {last:>6.4f}")


if __name__ == "__main__":
    main()
