"""Train one MoE layer, router included, to imitate another network: in BF16 and in FP8, from the same weights.

Runs on a CPU in seconds. A CPU emulates FP8: it shows the losses of a GPU, not its speed.
"""

import torch
from torch import nn

import moe_fp8_ext

EXPERTS, TOP_K, DIM, HIDDEN, TOKENS, STEPS = 8, 2, 64, 64, 512, 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def layer_with(recipe: str) -> moe_fp8_ext.MoE:
    torch.manual_seed(0)  # the same weights for every recipe
    router = moe_fp8_ext.Router(EXPERTS, DIM, TOP_K, balance_loss=0.01)
    return moe_fp8_ext.MoE(router, moe_fp8_ext.Experts(EXPERTS, DIM, HIDDEN, recipe=recipe)).to(DEVICE)


def train(recipe: str, teacher: nn.Module) -> tuple[float, float]:
    """The first loss, and the mean of the last ten."""
    layer = layer_with(recipe)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    torch.manual_seed(1)  # the same tokens for every recipe
    losses = []
    for _ in range(STEPS):
        x = torch.randn(TOKENS, DIM, device=DEVICE)
        out, balance = layer(x.bfloat16())
        loss = nn.functional.mse_loss(out.float(), teacher(x).detach())
        (loss + balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses[0].item(), torch.stack(losses[-10:]).mean().item()


def main() -> None:
    torch.manual_seed(2)
    teacher = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM)).to(DEVICE)
    print(f"loss on {DEVICE}:\n{'recipe':>9}  {'first':>8}  {'last':>8}")
    for recipe in ("bf16", "rowwise", "blockwise", "mxfp8"):
        first, last = train(recipe, teacher)
        print(f"{recipe:>9}  {first:>8.6f}  {last:>8.6f}")


if __name__ == "__main__":
    main()
