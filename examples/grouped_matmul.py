"""Replace torch._grouped_mm by moe_fp8_ext.grouped_mm, and see how much FP8 changes the output and both gradients.

Runs on a CPU in seconds. A CPU emulates FP8: it shows the numbers of a GPU, not its speed.
"""

import torch
from torch import Tensor

import moe_fp8_ext

EXPERTS, TOKENS, INPUTS, OUTPUTS = 4, 1000, 256, 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def in_bf16(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """The call to replace, where this torch has it for the device; else the same by a loop."""
    if DEVICE == "cuda":
        return torch._grouped_mm(x, w.transpose(-2, -1), offs=offs)
    ends = offs.tolist()
    return torch.cat([x[a:b] @ expert.T for a, b, expert in zip([0, *ends], ends, w, strict=False)])


def in_fp8(x: Tensor, w: Tensor, offs: Tensor, recipe: str) -> Tensor:
    return moe_fp8_ext.grouped_mm(x, w.transpose(-2, -1), offs=offs, recipe=recipe)


def results(out: Tensor, x: Tensor, w: Tensor, grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, (x, w), grad)]


def main() -> None:
    torch.manual_seed(0)
    options = dict(dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(TOKENS, INPUTS, **options).requires_grad_()  # tokens, sorted by expert
    w = torch.randn(EXPERTS, OUTPUTS, INPUTS, **options).requires_grad_()
    grad = torch.randn(TOKENS, OUTPUTS, **options)
    tokens = torch.tensor([313, 0, 406, 281], device=DEVICE)  # of each expert: any sizes, none is fine
    offs = tokens.cumsum(0, dtype=torch.int32)  # the row where each expert's tokens end

    want = results(in_bf16(x, w, offs), x, w, grad)
    print(f"relative error to BF16 on {DEVICE}:\n{'recipe':>9}  {'output':>7}  {'grad of x':>9}  {'grad of w':>9}")
    for recipe in ("bf16", "rowwise", "blockwise", "mxfp8"):
        got = results(in_fp8(x, w, offs, recipe), x, w, grad)
        errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(got, want, strict=True)]
        print(f"{recipe:>9}  {errors[0]:>7.2%}  {errors[1]:>9.2%}  {errors[2]:>9.2%}")


if __name__ == "__main__":
    main()
