"""The kernels of a router's choice without a GPU, see test_simt.py."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import misaligned, pairs
from routing_problem import logits_of
from simt_checks import ON_LINUX
from simt_kernels import Waves
from torch import Tensor

from moe_fp8_ext import reference

pytestmark = ON_LINUX


def check(kernels: Waves, logits: Tensor, top_k: int, bias: Tensor | None = None, *how: object) -> None:
    """`how` holds scoring, normalize, scaling_factor, num_groups, top_groups and group_score."""
    kernels.check("choose_experts", logits, top_k, bias, *how)
    ids, scores, topk_logits = reference.choose_experts(logits, top_k, bias, *how)
    grad = torch.randn(scores.shape)
    kernels.check("choose_experts_backward", grad, logits, ids, None, *how[:3])
    wider = torch.cat([grad, grad], 1)[:, :top_k]
    kernels.check("choose_experts_backward", wider, logits, ids.int(), None, *how[:3], parts=2)
    if len(how) < 2 or how[1]:
        for parts in (1, 2):
            args = grad, topk_logits, ids, logits.shape[1], *how[:3]
            kernels.check("choose_experts_backward", *args, parts=parts)


@pytest.mark.parametrize(
    *pairs(
        sizes=[
            (1, 1),
            (3, 3),
            (8, 2),
            (64, 6),
            (128, 8),
            (130, 7),
            (256, 8),
            (260, 40),
            (512, 9),
            (777, 10),
            (1024, 8),
        ],
        scoring=["softmax", "sigmoid", "sqrtsoftplus"],
        normalize=[True, False],
        bias=[True, False],
        offset=[0, 1],
        t=[0, 1, 21],
    )
)
def test_choice(kernels, sizes, scoring, normalize, bias, offset, t):
    """Covers every kernel instance, aligned and unaligned logits, and more tokens than a block has waves."""
    e, top_k = sizes
    logits = misaligned(logits_of(t, e), offset)
    check(kernels, logits, top_k, torch.randn(e) if bias else None, scoring, normalize, 2.5)


@pytest.mark.parametrize(
    ("e", "top_k", "groups", "top_groups"),
    [(8, 3, 4, 2), (6, 2, 3, 2), (5, 3, 5, 3), (256, 8, 8, 4), (130, 7, 13, 2), (1024, 9, 1024, 700), (1000, 9, 8, 3)],
)
def test_groups(kernels, e, top_k, groups, top_groups):
    bias = torch.randn(e)
    calls = ("softmax", None, "top2_sum"), ("sigmoid", bias, "top2_sum"), ("softmax", bias, "max")
    for scoring, given, rule in calls:
        check(kernels, logits_of(11, e), top_k, given, scoring, True, 1.0, groups, top_groups, rule)


@pytest.mark.parametrize(("e", "top_k"), [(9, 3), (300, 80)])
def test_given_ids(kernels, e, top_k):
    """More slots than a wave has lanes, dropped slots, and an expert at two slots."""
    ids = torch.rand(20, e).argsort(1)[:, :top_k]
    ids[3:9, 0], ids[9:15, top_k - 1], ids[15], ids[16, 1], ids[17, 2] = -1, e, -1, ids[16, 0], 2**40
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        for normalize in (True, False):
            how = logits_of(20, e), top_k, None, scoring, normalize, -2.5
            kernels.check("choose_experts", *how, given_ids=torch.cat([ids, ids], 1)[:, :top_k])
            kernels.check("choose_experts", *how, given_ids=ids.int())


def test_as_many_choices_as_experts(kernels):
    for e in (32, 65, 200, 1024):
        check(kernels, logits_of(3, e), e)


def test_what_is_not_finite(kernels):
    logits = logits_of(9, 140)
    logits[0] = -math.inf
    logits[1, 77] = logits[2, 3] = logits[2, 139] = math.nan
    logits[3, 100] = math.inf
    logits[4, 5:] = -math.inf
    bias = torch.randn(140)
    bias[9], bias[20], bias[90] = math.inf, -math.inf, math.nan
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        for normalize in (True, False):
            for given in (None, bias):
                check(kernels, logits, 12, given, scoring, normalize, 1.0, 7, 3)


def test_ids_of_any_numbers(kernels):
    """Ids of no expert count for nothing. If an id stands at several slots, the last slot counts. With
    logits of the chosen alone ids are distinct, because any of the slots could count."""
    ids = torch.tensor([[5, 5, 2], [-1, 9, 3], [2**40, -(2**63), 2**32], [0, 0, 0]])
    once = torch.tensor([[5, 4, 2], [-1, 9, 3], [2**40, -(2**63), 2**32], [0, 1, 8]])
    for logits in (logits_of(4, 9), logits_of(4, 300)):
        for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
            kernels.check("choose_experts_backward", torch.randn(4, 3), logits, ids, None, scoring)
            kernels.check("choose_experts_backward", torch.randn(4, 3), logits[:, :3], once, 9, scoring)
