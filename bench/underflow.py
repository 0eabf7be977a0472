"""The picture of docs/stats.md: how much of the gradients underflows while a small MoE learns, by recipe.

    python bench/underflow.py --out docs/stats.png

The model predicts the label of a noisy token. One kind of tokens in sixteen has random labels, as some words of a text
cannot be predicted. Once the model is sure of the others, their gradients are far below gradients of this kind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import moe_fp8_ext
from moe_fp8_ext import Recipe

KINDS, DIM, HIDDEN, EXPERTS, TOP_K = 16, 64, 64, 4, 2
TOKENS, STEPS, EVERY, NOISE = 512, 240, 8, 0.1
OPERAND = "experts.down_proj", "gradients", "wgrad_underflow"
RECIPES = {
    'Recipe("rowwise")': Recipe("rowwise"),
    'Recipe("rowwise", grad_dtype=torch.float8_e5m2)': Recipe("rowwise", grad_dtype=torch.float8_e5m2),
    'Recipe("blockwise")': Recipe("blockwise"),
    'Recipe("mxfp8")': Recipe("mxfp8"),
}


class Classifier(nn.Module):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.router = moe_fp8_ext.Router(EXPERTS, DIM, TOP_K)
        self.experts = moe_fp8_ext.Experts(EXPERTS, DIM, HIDDEN, recipe=recipe)
        self.head = nn.Linear(DIM, KINDS)

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        return self.head(x + self.experts(x, routing.topk_ids, routing.topk_scores))


def train(recipe: Recipe) -> tuple[list[float], float]:
    """Returns the underflow of each sample, and the last loss of tokens whose labels can be predicted."""
    torch.manual_seed(0)
    model, means = Classifier(recipe), torch.randn(KINDS, DIM)
    optimizer, shares = torch.optim.Adam(model.parameters(), 2e-3), []
    with moe_fp8_ext.stats(model, every=EVERY) as stats:
        for step in range(STEPS):
            kinds = torch.randint(KINDS, (TOKENS,))
            labels = torch.where(kinds == 0, torch.randint(KINDS, (TOKENS,)), kinds)
            losses = cross_entropy(model(means[kinds] + NOISE * torch.randn(TOKENS, DIM)), labels, reduction="none")
            optimizer.zero_grad()
            losses.mean().backward()
            optimizer.step()
            stats.step()
            if step % EVERY == 0:
                layer, operand, statistic = OPERAND
                shares.append(stats.to_dict()["layers"][layer][operand][statistic])
    print(stats)
    return shares, losses[kinds > 0].mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the picture, .png or .svg")
    out = parser.parse_args().out
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    for name, recipe in RECIPES.items():
        shares, loss = train(recipe)
        print(f"{name}: {100 * shares[-1]:.1f}% underflow in the last sample, loss {loss:.2e}\n")
        axes.plot(range(0, STEPS, EVERY), [100 * share for share in shares], label=name)
    axes.set(xlabel="step", ylabel="% of nonzero elements", ylim=(0, None))
    axes.set_title("Gradients of experts.down_proj that underflow to zero in wgrad")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
