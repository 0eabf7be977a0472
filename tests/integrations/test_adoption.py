"""docs/adoption.md: tests run each of its blocks. Here are the blocks that belong to no other test file."""

from __future__ import annotations

import ast
import re

import torch
from helpers import ROOT, assert_same_tensor, blocks
from torch import nn

import moe_fp8_ext
from moe_fp8_ext import Experts, Router

E, D, F, TOKENS, TOP_K = 8, 32, 48, 20, 2
OFFS = torch.tensor([5, 5, 9, 11, 12, 16, 18, TOKENS], dtype=torch.int32)


def run(code: str, **given: object) -> dict[str, object]:
    """Runs a block with small sizes and with the names that the page assumes. Returns the names that it defines."""
    names = dict(moe_fp8_ext=moe_fp8_ext, x=torch.randn(TOKENS, D).bfloat16(), offs=OFFS, **given)
    names |= dict(topk_ids=torch.rand(TOKENS, E).topk(TOP_K).indices, topk_scores=torch.rand(TOKENS, TOP_K))
    for large, small in (("256, 7168, 8,", f"{E}, {D}, {TOP_K},"), ("256, 7168, 2048", f"{E}, {D}, {F}")):
        code = code.replace(large, small)
    exec(code, names)
    return names


def test_every_block_has_a_test():
    """A test that asks for the blocks of a section in a language runs all of them."""
    sections = (ROOT / "docs" / "adoption.md").read_text().split("\n## ")[1:]
    documented = {
        (s.split("\n")[0], name) for s in sections for name in re.findall(r"^```(\w*)\n.*?^```", s, re.M | re.S)
    }
    tested = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "blocks":
                page, *place = [ast.literal_eval(argument) for argument in node.args]
                tested |= {tuple([*place, "python"][:2])} if page == "docs/adoption.md" else set()
    assert documented == tested


def test_a_layer_of_your_own():
    call, modules = blocks("docs/adoption.md", "A layer of your own")
    experts = Experts(E, D, F)
    names = run(call, **dict(experts.named_parameters()))
    assert_same_tensor(names["out"], experts(names["x"], names["topk_ids"], names["topk_scores"]), "out")
    optimizer = torch.optim.SGD(experts.parameters())
    names = run(modules, optimizer=optimizer, shared_experts=nn.Linear(D, D, bias=False, dtype=torch.bfloat16))
    assert names["out"].shape == names["x"].shape and names["router"].e_score_correction_bias.any()
    assert list(names["layer"].state_dict()) == [
        *("gate.weight", "gate.e_score_correction_bias", "experts.gate_up_proj", "experts.down_proj"),
        "shared_experts.weight",
    ]


def test_main_gradients():
    (block,) = blocks("docs/adoption.md", "Main gradients")
    sizes = dict(w=(F, D), w_gate_up=(2 * F, D), w_down=(D, F))
    weights = {name: nn.Parameter(torch.randn(E, *size).bfloat16()) for name, size in sizes.items()}
    for w in weights.values():
        w.main_grad = torch.zeros(w.shape)
    product, layers = re.split(r"^(?=main_grads)", block, flags=re.M)
    for code, used in ((product, ["w"]), (layers, ["w_gate_up", "w_down"])):
        names = run(code, **weights, router=Router(E, D, TOP_K))
        names["out"].sum().backward()
        assert all(weights[name].grad is None and weights[name].main_grad.any() for name in used)
    assert names["layer"].experts.adds_to_main_grad
