"""grouped_mm: the differentiable grouped matmul, against a float64 reference."""

from __future__ import annotations

import pytest
import torch
from derivatives import check_no_second_derivative, check_no_tangent
from grouped_problem import CAST_DB, MIN_SINGLE_DB, MIN_SQNR_DB, exact, gradients, problem, run
from helpers import (
    LAYOUTS,
    assert_same,
    check_compiled_error,
    check_cuda_graph,
    corrupt_offs,
    counted_backend,
    group_offs,
    on,
    sqnr_db,
)
from torch.utils.checkpoint import checkpoint

from moe_fp8_ext import Recipe, grouped_mm, reference
from moe_fp8_ext.reference.numerics import group_bounds

NAMES = ("bf16", "rowwise", "blockwise", "mxfp8")


def check_gradients(a, b_t, offs, g, recipe: str, min_db: float | None = None) -> None:
    got = run(a, b_t, offs, g, recipe)
    want = exact(a, b_t, offs, g)
    for name, ours, ideal, like in zip(("out", "dA", "dB_t"), got, want, (g, a, b_t), strict=True):
        assert (ours.shape, ours.dtype) == (ideal.shape, like.dtype), name
        db = sqnr_db(ours, ideal)
        assert db >= (min_db or MIN_SQNR_DB[recipe]), f"{name}: {db:.1f} dB"
    bounds = group_bounds(offs, a.shape[0])
    tail = bounds[-1][1] if bounds else 0
    assert not got[0][tail:].any(), "tail rows of out"
    assert not got[1][tail:].any(), "tail rows of dA"
    for e, (start, end) in enumerate(bounds):
        assert start < end or not got[2][e].any(), f"dB_t of empty group {e}"


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_group_layouts(layout, recipe, device):
    check_gradients(*problem(301, 96, 64, group_offs(layout, 301, 6), device), recipe)


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize(
    ("m", "k", "n", "e"),
    [
        *[(0, 32, 16, 3), (1, 1, 1, 1), (5, 33, 7, 2), (64, 100, 36, 1), (130, 17, 200, 4)],
        *[(40, 0, 16, 2), (40, 16, 0, 2), (500, 576, 128, 9), (77, 2880, 24, 2)],
    ],
)
def test_sizes(m, k, n, e, recipe, device):
    min_db = MIN_SINGLE_DB[recipe] if m * k * n == 1 else None
    check_gradients(*problem(m, k, n, group_offs("zipf", m, e), device), recipe, min_db)


@pytest.mark.parametrize("recipe", NAMES)
def test_no_experts(recipe, device):
    a, b_t, offs, g = problem(40, 16, 24, group_offs("uniform", 40, 0), device)
    out, d_a, d_b = run(a, b_t, offs, g, recipe)
    assert out.shape == (40, 24) and not out.any()
    assert d_a.shape == (40, 16) and not d_a.any()
    assert d_b.shape == (0, 16, 24)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("recipe", [*map(Recipe, NAMES), Recipe("rowwise", wgrad_high_precision=True)])
def test_corrupt_offsets(recipe, device):
    for offs in corrupt_offs(60):
        check_gradients(*problem(60, 32, 16, offs, device), recipe, MIN_SQNR_DB[recipe.name])


@pytest.mark.parametrize("recipe", NAMES)
def test_contiguous_weight(recipe, device):
    a, b_t, offs, g = problem(90, 64, 48, group_offs("zipf", 90, 3), device)
    contiguous = b_t.detach().contiguous().requires_grad_()
    check_gradients(a, contiguous, offs, g, recipe)
    view, copy = (run(a, b, offs, g, recipe) for b in (b_t, contiguous))
    assert all(torch.equal(*pair) for pair in zip(view, copy, strict=True))


def test_keyword_call_of_torchtitan(device):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 2), device)
    assert_same(grouped_mm(A=a, B_t=b_t, offs=offs), grouped_mm(a, b_t, offs, recipe="rowwise"))


def test_matches_torch_grouped_mm(gpu):
    a, b_t, offs, _ = problem(256, 64, 48, group_offs("uniform", 256, 2), gpu)
    want = torch._grouped_mm(a.detach(), b_t.detach(), offs, out_dtype=torch.bfloat16)
    # 3 dB less, because of two roundings.
    assert sqnr_db(grouped_mm(a, b_t, offs, recipe="bf16").detach(), want) > MIN_SQNR_DB["bf16"] - 3
    assert sqnr_db(grouped_mm(a, b_t, offs).detach(), want) > MIN_SQNR_DB["rowwise"]


@pytest.mark.parametrize("recipe", NAMES)
def test_recipe_object(recipe, device):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 2), device)
    by_object = grouped_mm(a, b_t, offs, recipe=Recipe(recipe))
    assert_same(by_object, grouped_mm(a, b_t, offs, recipe=recipe))


@pytest.mark.parametrize("recipe", NAMES)
def test_expanded_gradient(recipe, device):
    a, b_t, offs, g = problem(70, 32, 48, group_offs("tail_rows", 70, 3), device)

    def summed(a, b):
        return grouped_mm(a, b, offs, recipe=recipe).sum()

    got = gradients(summed, a, b_t, None)
    want = run(a, b_t, offs, torch.ones_like(g), recipe)
    assert_same(got[1:], want[1:])


@pytest.mark.parametrize("recipe", NAMES)
def test_non_contiguous_gradients(recipe, device):
    a, b_t, offs, g = problem(70, 32, 48, group_offs("zipf", 70, 3), device)
    want = run(a, b_t, offs, g, recipe)
    spread = torch.zeros(70, 96, dtype=g.dtype, device=device)[:, ::2].copy_(g)
    row_expanded = g[:1].expand(70, 48)
    for view in (g.t().contiguous().t(), spread):
        assert_same(run(a, b_t, offs, view, recipe), want)
    assert_same(
        run(a, b_t, offs, row_expanded, recipe),
        run(a, b_t, offs, row_expanded.contiguous(), recipe),
    )


@pytest.mark.parametrize("recipe", NAMES)
def test_non_contiguous_activation(recipe, device):
    a, b_t, offs, g = problem(70, 32, 48, group_offs("zipf", 70, 3), device)
    want = run(a, b_t, offs, g, recipe)
    transposed = a.detach().t().contiguous().t().requires_grad_()
    got = run(transposed, b_t, offs, g, recipe)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


@pytest.mark.parametrize("recipe", NAMES)
def test_needs_input_grad(recipe, device):
    a, b_t, offs, g = problem(70, 32, 48, group_offs("zipf", 70, 3), device)
    out, d_a, d_b = run(a, b_t, offs, g, recipe)
    only_a = run(a, b_t.detach(), offs, g, recipe)
    assert_same(only_a[:2], (out, d_a))
    assert only_a[2] is None
    only_b = run(a.detach(), b_t, offs, g, recipe)
    assert_same(only_b[::2], (out, d_b))
    assert only_b[1] is None
    neither = grouped_mm(a.detach(), b_t.detach(), offs, recipe=recipe)
    assert not neither.requires_grad
    assert_same(neither, out)
    with torch.no_grad():
        assert_same(grouped_mm(a, b_t, offs, recipe=recipe), out)


@pytest.mark.parametrize("recipe", NAMES)
def test_float32_operands(recipe, device):
    offs = group_offs("zipf", 90, 3)
    check_gradients(*problem(90, 64, 48, offs, device, torch.float32), recipe, MIN_SQNR_DB[recipe] - CAST_DB)


@pytest.mark.parametrize("recipe", NAMES)
def test_autocast(recipe, device):
    a, b_t, offs, g = problem(90, 64, 48, group_offs("zipf", 90, 3), device, torch.float32)

    def autocast(a, b):
        with torch.autocast(device, dtype=torch.bfloat16):
            return grouped_mm(a, b, offs, recipe=recipe)

    out, d_a, d_b = gradients(autocast, a, b_t, g.bfloat16())
    assert (out.dtype, d_a.dtype, d_b.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    want = exact(a, b_t, offs, g)
    for name, ours, ideal in zip(("out", "dA", "dB_t"), (out, d_a, d_b), want, strict=True):
        assert sqnr_db(ours, ideal) >= MIN_SQNR_DB[recipe] - CAST_DB, name


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", NAMES)
def test_activation_checkpointing(recipe, use_reentrant, device):
    a, b_t, offs, g = problem(70, 32, 48, group_offs("zipf", 70, 3), device)
    want = run(a, b_t, offs, g, recipe)

    def checkpointed(a, b):
        return checkpoint(lambda a, b: grouped_mm(a, b, offs, recipe=recipe), a, b, use_reentrant=use_reentrant)

    assert_same(gradients(checkpointed, a, b_t, g), want)


@pytest.mark.parametrize("recipe", NAMES)
def test_double_use(recipe, device):
    """Gradients accumulate over two uses of the same operands and over two backward passes. Doubling is exact."""
    a, b_t, offs, g = problem(70, 32, 48, group_offs("tail_rows", 70, 3), device)
    out, d_a, d_b = run(a, b_t, offs, g, recipe)

    def twice(a, b):
        return grouped_mm(a, b, offs, recipe=recipe) + grouped_mm(a, b, offs, recipe=recipe)

    assert_same(gradients(twice, a, b_t, g), (2 * out, 2 * d_a, 2 * d_b))
    out = grouped_mm(a, b_t, offs, recipe=recipe)
    for _ in range(2):
        out.backward(g, retain_graph=True)
    assert_same((a.grad, b_t.grad), (2 * d_a, 2 * d_b))


@pytest.mark.parametrize("recipe", NAMES)
def test_chained_layers_of_an_expert(recipe, device):
    """out of one grouped_mm feeds the next, as in the SwiGLU experts of a model."""
    offs = group_offs("tail_rows", 120, 4)
    x, w13, offs, _ = problem(120, 32, 96, offs, device)
    h, w2, _, g = problem(120, 48, 32, offs.cpu(), device)

    def experts(mm, x, w13, w2):
        gate, up = mm(x, w13).chunk(2, dim=-1)
        return mm(torch.nn.functional.silu(gate) * up, w2)

    out = experts(lambda a, b: grouped_mm(a, b, offs, recipe=recipe), x, w13, w2)
    out.backward(g)
    doubles = [t.detach().double().requires_grad_() for t in (x, w13, w2)]
    want = experts(lambda a, b: reference.grouped_mm(a, b, offs), *doubles)
    want.backward(g.double())
    # Two layers in a row: the noise of the second adds to the amplified noise of the first.
    for ours, theirs in ((out, want), *((t.grad, d.grad) for t, d in zip((x, w13, w2), doubles, strict=True))):
        assert sqnr_db(ours.detach(), theirs.detach()) > MIN_SQNR_DB[recipe] - 9


@pytest.mark.parametrize("recipe", NAMES)
def test_diverging_rows_stay_visible(recipe, device):
    a, b_t, offs, g = problem(60, 32, 16, group_offs("uniform", 60, 3), device)
    with torch.no_grad():
        a[7, 3] = float("nan")
    out, d_a, d_b = run(a, b_t, offs, g, recipe)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [7]
    assert d_a.isfinite().all()
    poisoned = [[0, k] for k in range(32)] if recipe == "blockwise" else [[0, 3]]  # a square, or a column
    assert d_b.isnan().any(2).nonzero().tolist() == poisoned


@pytest.mark.parametrize("recipe", NAMES)
def test_deterministic(recipe, device):
    args = problem(500, 64, 48, group_offs("zipf", 500, 5), device)
    a, b_t, offs, g = args
    runs = [run(a, b_t, offs, g, recipe) for _ in range(2)]
    assert_same(*runs)


@pytest.mark.parametrize("recipe", NAMES)
def test_compiles_with_dynamic_rows(recipe, device):
    if recipe == "bf16" and device == "cuda" and torch.__version__ < "2.12":
        pytest.skip("inductor of torch 2.11 copies torch._grouped_mm's transposed operand to rows of M elements")
    backend = counted_backend(device)
    compiled = torch.compile(grouped_mm, fullgraph=True, backend=backend)
    for m in (50, 64, 131):
        a, b_t, offs, g = problem(m, 64, 48, group_offs("zipf", m, 3), device)

        def dynamic(a, b, offs=offs):
            torch._dynamo.mark_dynamic(a, 0)
            return compiled(a, b, offs, recipe=recipe)

        want = run(a, b_t, offs, g, recipe)
        assert_same(gradients(dynamic, a, b_t, g), want, f"M = {m}")
    assert backend.frame_count == 1


@pytest.mark.parametrize("recipe", NAMES)
def test_cuda_graph(recipe, gpu):
    def step(a, b_t, offs, g):
        return run(a, b_t, offs, g, recipe)

    first, later = (
        [t.detach() for t in problem(300, 64, 48, group_offs(layout, 300, 4), gpu, seed=seed)]
        for seed, layout in enumerate(("zipf", "tail_rows"))
    )
    for inputs in (first, later):
        inputs[0].requires_grad_(), inputs[1].requires_grad_()
    check_cuda_graph(step, first, later)


def test_cuda_never_waits_for_the_device(gpu):
    a, b_t, offs, g = problem(300, 64, 48, group_offs("zipf", 300, 4), gpu)
    grouped_mm(a, b_t, offs).backward(g)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_mm(a, b_t, offs).backward(g)
    finally:
        torch.cuda.set_sync_debug_mode("default")


A, B_T, OFFS, _ = problem(50, 32, 16, group_offs("uniform", 50, 2))


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize(
    ("args", "argument"),
    [
        ([A[0], B_T, OFFS], "A"),
        ([A.detach().int(), B_T, OFFS], "A"),
        ([A, B_T[0], OFFS], "B_t"),
        ([A, B_T[:, 1:], OFFS], "B_t"),
        ([A, B_T.detach().float(), OFFS], "B_t"),
        ([A, B_T, OFFS.long()], "offs"),
        ([A, B_T, OFFS[:1]], "offs"),
        ([A, B_T, OFFS[None]], "offs"),
        ([A, B_T, torch.zeros(1025, dtype=torch.int32)], "offs"),
    ],
)
def test_errors(args, argument, recipe, device):
    inputs = on(device, [t.detach() for t in args])
    with pytest.raises(RuntimeError, match=f"^grouped_mm: {argument} .*got") as info:
        grouped_mm(*inputs, recipe=recipe)
    check_compiled_error(lambda *inputs: grouped_mm(*inputs, recipe=recipe), inputs, str(info.value))


@pytest.mark.parametrize("recipe", NAMES)
@pytest.mark.parametrize(("place", "argument"), [*enumerate(("A", "B_t", "offs"))])
def test_what_is_no_dense_tensor(place, argument, recipe):
    """Lists, None and sparse tensors get the usual error."""
    args = [A.detach(), B_T.detach(), OFFS]
    for wrong, got in (([25, 50], "list"), (None, "NoneType"), (args[place].to_sparse(), "sparse_coo")):
        with pytest.raises(RuntimeError, match=f"^grouped_mm: {argument} must be .*got .*{got}"):
            grouped_mm(*args[:place], wrong, *args[place + 1 :], recipe=recipe)


@pytest.mark.parametrize("recipe", NAMES)
def test_derivatives_that_there_are_not(recipe):
    """Forward-mode and second derivatives raise; they are never silently zero."""
    a, b_t = A.detach(), B_T.detach()
    check_no_tangent(lambda a: grouped_mm(a, b_t, OFFS, recipe=recipe), a)
    check_no_tangent(lambda b_t: grouped_mm(a, b_t, OFFS, recipe=recipe), b_t)
    leaves = A.detach().requires_grad_(), B_T.detach().requires_grad_()
    check_no_second_derivative(grouped_mm(*leaves, OFFS, recipe=recipe), *leaves)


@pytest.mark.parametrize("recipe", NAMES)
def test_an_error_leaves_autograd_as_it_was(recipe):
    leaf = A.detach().requires_grad_()
    with pytest.raises(RuntimeError, match="top_k must give at most"):
        grouped_mm(leaf, B_T, OFFS, recipe=recipe, indices=torch.arange(len(A), dtype=torch.int32), top_k=2**31)
    assert torch.relu(leaf).requires_grad


@pytest.mark.parametrize("recipe", NAMES)
def test_result_can_be_changed_in_place(recipe):
    a, b_t = A.detach().requires_grad_(), B_T.detach().requires_grad_()
    want = torch.autograd.grad((grouped_mm(a, b_t, OFFS, recipe=recipe) * 2).sum(), (a, b_t))
    assert_same(torch.autograd.grad(grouped_mm(a, b_t, OFFS, recipe=recipe).mul_(2).sum(), (a, b_t)), want)


@pytest.mark.parametrize("recipe", NAMES)
def test_meta_tensors(recipe):
    a, b_t = torch.empty(5, 16, dtype=torch.bfloat16, device="meta"), torch.empty(2, 16, 32, device="meta").bfloat16()
    out = grouped_mm(a, b_t, torch.empty(2, dtype=torch.int32, device="meta"), recipe=recipe)
    assert out.is_meta and out.shape == (5, 32)


@pytest.mark.parametrize("recipe", NAMES)
def test_compiles_where_the_data_says_how_many_tokens(recipe):
    a, b_t, offs, g = problem(50, 64, 48, group_offs("zipf", 40, 3), "cpu")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(a, b, rows):
        n = rows.item()
        torch._check(n <= a.shape[0])
        return grouped_mm(a[:n], b, offs, recipe=recipe)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_same(compiled(a.detach(), b_t.detach(), torch.tensor(43)), grouped_mm(a[:43], b_t, offs, recipe=recipe))


@pytest.mark.large
def test_experts_of_a_large_model(big_gpu):
    m, k, n, e = 131_072, 2_048, 1_408, 8
    a, b = (torch.randn(s, device=big_gpu, dtype=torch.bfloat16) for s in ((m, k), (e, n, k)))
    offs = group_offs("zipf", m, e, big_gpu)
    g = torch.randn(m, n, device=big_gpu, dtype=torch.bfloat16)
    check_gradients(a.requires_grad_(), b.transpose(1, 2).requires_grad_(), offs, g, "rowwise")
