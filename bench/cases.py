"""One benchmark case per op: its shapes, inputs and call, and the figures that one H200 is held to.

A case says nothing about timing. Bytes need no formula: every argument is read once and every output written once, so
a memory-bound op moves the sizes of its tensors, padding and scales included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from case import HOST, TABLE, Case, Rule, Shape, Target, always, group_ends, is_
from cases_scales import SCALE_CASES
from torch import Tensor

import moe_fp8_ext as moe


def _small() -> list[tuple[int, int, int]]:
    """The (M, K, E) that are more than a corner case and that the CPU loops still finish in moments."""
    return [(m, k, e) for m, k, e in TABLE["correctness_MKE"] if m >= 300 and k < 1000]


def _activations(cpu: bool) -> list[Shape]:
    sizes = [(m, k) for m, k, _ in _small()] if cpu else TABLE["activations_MK"]
    return [Shape(f"[{m}, {k}]", {"m": m, "k": k}) for m, k in sizes]


def _groups(cpu: bool) -> list[Shape]:
    sizes = _small() if cpu else TABLE["grouped_MKE"]
    return [Shape(f"[{m}, {k}] E={e}", {"m": m, "k": k, "e": e}) for m, k, e in sizes]


def _blockwise_groups(cpu: bool) -> list[Shape]:
    return _groups(cpu) + ([] if cpu else [Shape("[8192, 7168] E=1", {"m": 8192, "k": 7168, "e": 1})])


def _mx_rows(cpu: bool) -> list[Shape]:
    """Both layouts of the scales, blocked ones as a whole and by groups."""
    whole = [
        Shape(f"{shape.label} {name}", {**shape.dims, "e": 0, "blocked": blocked})
        for name, blocked in (("rowmajor", 0), ("blocked", 1))
        for shape in _activations(cpu)
    ]
    return whole + [Shape(f"{s.label} blocked", {**s.dims, "blocked": 1}) for s in _groups(cpu)]


def _token_groups(cpu: bool) -> list[Shape]:
    if cpu:
        return _groups(cpu)
    sizes = [(131072, 7168, 8), (131072, 2048, 64), (16640, 5120, 64)]
    return [Shape(f"[{m}, {k}] E={e}", {"m": m, "k": k, "e": e}) for m, k, e in sizes]


def _exchanged(cpu: bool) -> list[Shape]:
    """Tokens that came from R ranks for E experts."""
    sizes = [(m, k, 3, e) for m, k, e in _small()] if cpu else [(131072, 7168, 8, 8), (131072, 2048, 8, 64)]
    return [Shape(f"[{m}, {k}] R={r} E={e}", {"m": m, "k": k, "r": r, "e": e}) for m, k, r, e in sizes]


def _routings(cpu: bool) -> list[Shape]:
    t, top_k, e = (4096, 8, 64) if cpu else (131072, 8, 256)
    return [Shape(f"[{t}, {top_k}] E={e}", {"t": t, "top_k": top_k, "e": e})]


def _slot_rows(cpu: bool) -> list[Shape]:
    t, top_k, k = (300, 4, 512) if cpu else (16384, 8, 7168)
    return [Shape(f"[{t}, {top_k}] K={k}", {"t": t, "top_k": top_k, "k": k})]


def _weights(cpu: bool) -> list[Shape]:
    sizes = [(e, k, k) for _, k, e in _small()] if cpu else TABLE["weights_ENK"]
    return [Shape(f"[{e}, {n}, {k}]", {"e": e, "n": n, "k": k}) for e, n, k in sizes]


def _gemms(cpu: bool) -> list[Shape]:
    sizes = {f"[{m}, {k}] E={e}": (m, k, k, e) for m, k, e in _small()} if cpu else TABLE["grouped_gemm_MKNE"]
    return [Shape(label, dict(zip("mkne", size, strict=True))) for label, size in sizes.items()]


def _both_gemms(cpu: bool) -> list[Shape]:
    return [
        Shape(f"{shape.label} {name}", {**shape.dims, "wgrad": wgrad})
        for shape in _gemms(cpu)
        for name, wgrad in (("2Dx3D", 0), ("2Dx2D", 1))
    ]


def _normal(device: torch.device, *size: int, grad: bool = False) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device=device, requires_grad=grad)


def _tensor(device: torch.device, layout: str, **dims: int) -> tuple[Tensor, ...]:
    return (_normal(device, *dims.values()),)


def _grouped(device: torch.device, layout: str, *, m: int, k: int, e: int) -> tuple[Tensor, ...]:
    return _normal(device, m, k), group_ends(layout, m, e, device)


def _scaled(device: torch.device, layout: str, *, m: int, k: int, n: int, e: int, wgrad: int) -> tuple[Tensor, ...]:
    offs = group_ends(layout, m, e, device)
    if wgrad:
        a, scale_a, padded_offs = moe.quantize_colwise(_normal(device, m, n), offs)
        b, scale_b, _ = moe.quantize_colwise(_normal(device, m, k), offs)
        return a, b.t(), scale_a, scale_b, padded_offs
    a, scale_a = moe.quantize_rowwise(_normal(device, m, k))
    b, scale_b, _, _ = moe.quantize_weight(_normal(device, e, n, k))
    return a, b.transpose(-2, -1), scale_a, scale_b, offs


def _mx_tokens(device: torch.device, layout: str, *, m: int, k: int, e: int, blocked: int) -> tuple[object, ...]:
    offs = group_ends(layout, m, e, device) if e else None
    return _normal(device, m, k), "rceil", "blocked" if blocked else "rowmajor", offs


def _quantized(device: torch.device, layout: str, **dims: int) -> tuple[object, ...]:
    q, scale = moe.quantize_1x128(_normal(device, *dims.values()))
    return q, scale, "1x128"


def _placed(device: torch.device, layout: str, **dims: int) -> tuple[object, ...]:
    x, offs = _grouped(device, layout, **dims)
    padded, starts, _ = moe.pad_token_groups(x, offs)
    return x, offs, starts, padded.shape[0]


def _padded(device: torch.device, layout: str, **dims: int) -> tuple[object, ...]:
    x, offs = _grouped(device, layout, **dims)
    padded, starts, _ = moe.pad_token_groups(x, offs)
    return padded, offs, starts, x.shape[0]


def _counts(device: torch.device, layout: str, m: int, r: int, e: int) -> Tensor:
    """Every rank sends as many tokens, shared out among the experts by the layout."""
    of_rank = group_ends(layout, m // r, e, device).diff(prepend=torch.zeros(1, dtype=torch.int32, device=device))
    return of_rank.repeat(r)


def _sent(device: torch.device, layout: str, *, m: int, k: int, r: int, e: int) -> tuple[object, ...]:
    return _counts(device, layout, m, r, e), r, e, m


def _indexed(device: torch.device, layout: str, *, m: int, k: int, r: int, e: int) -> tuple[object, ...]:
    return _normal(device, m, k), moe.permute_indices(*_sent(device, layout, m=m, k=k, r=r, e=e))[0]


def _indexed_groups(device: torch.device, layout: str, *, m: int, k: int, r: int, e: int) -> tuple[object, ...]:
    indices, offs, _ = moe.permute_indices(*_sent(device, layout, m=m, k=k, r=r, e=e))
    return _normal(device, m, k), indices, offs


def _permuted(device: torch.device, layout: str, **dims: int) -> tuple[object, ...]:
    x, indices = _indexed(device, layout, **dims)
    return moe.permute_pad(x, indices), indices, x.shape[0]


def _tokens_only(args: tuple, out: Tensor) -> int:
    """The padding of the argument is not read: what is read is what is written."""
    return 2 * out.nbytes


def _routed(device: torch.device, layout: str, *, t: int, top_k: int, e: int) -> tuple[object, ...]:
    return torch.randint(e, (t, top_k), device=device), e


def _torch_sort(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """What MoE layers build from topk today: order and offsets, and no inverse."""
    ids = topk_ids.flatten()
    counts = torch.histc(ids.float(), num_experts, 0, num_experts - 1)
    return ids.argsort(stable=True), counts.cumsum(0)


def _slots(device: torch.device, layout: str, *, t: int, top_k: int, k: int) -> tuple[Tensor, ...]:
    inverse = torch.randperm(t * top_k, device=device).int().view(t, top_k)
    return _normal(device, t * top_k, k), inverse, torch.rand(t, top_k, device=device)


def _slot_gradients(device: torch.device, layout: str, *, t: int, top_k: int, k: int) -> tuple[object, ...]:
    y, inverse, scores = _slots(device, layout, t=t, top_k=top_k, k=k)
    return _normal(device, t, k), y, inverse, scores, y.shape[0]


def _training(device: torch.device, layout: str, *, m: int, k: int, n: int, e: int) -> tuple[Tensor, ...]:
    a, w = _normal(device, m, k, grad=True), _normal(device, e, n, k, grad=True)
    return a, w, group_ends(layout, m, e, device), _normal(device, m, n)


def _dense(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    """The GEMM of the same size with one group. In 2D x 2D the padding, at most E * 16 of the tokens, rides along."""
    b, scale_a = (b, scale_a[0]) if b.ndim == 2 else (b[0], scale_a)
    return torch._scaled_mm(
        a, b, scale_a=scale_a[:, None], scale_b=scale_b[:1], out_dtype=torch.bfloat16, use_fast_accum=True
    )


def forward_backward(grouped_mm: Callable[..., Tensor]) -> Callable[..., object]:
    def call(a: Tensor, w: Tensor, offs: Tensor, grad: Tensor) -> object:
        return torch.autograd.grad(grouped_mm(a, w.transpose(-2, -1), offs=offs), (a, w), grad)

    return call


def _bytes_kept(a: Tensor, w: Tensor, offs: Tensor, grad: Tensor) -> float:
    """Bytes that the forward saves for each element of `a`: what M rows save beyond what half of them do, so that the
    quantized weights, which do not depend on M, cancel out."""

    def saved(rows: int) -> int:
        storages: dict[int, int] = {}

        def note(t: Tensor) -> Tensor:
            storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        first = a.detach()[:rows].clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            moe.grouped_mm(first, w.transpose(-2, -1), offs.clamp(max=rows))
        return sum(storages.values())

    half = a.shape[0] // 32 * 16
    return (saved(2 * half) - saved(half)) / (half * a.shape[1])


def _many_tokens(shape: Shape) -> bool:
    return shape.dims["m"] >= 131072


def _over_100_mb(shape: Shape) -> bool:
    return shape.dims["m"] * shape.dims["k"] * 2 > 100e6


def _expert_to_24_mb(shape: Shape) -> bool:
    return shape.dims["n"] * shape.dims["k"] * 2 <= 24e6


def _of_copy(bound: float) -> Target:
    return Target("of_copy", ">=", bound)


def _grouped_rules(e64: float, e128: float, large: float) -> tuple[Rule, ...]:
    return (
        (is_("[16640, 5120] E=64"), _of_copy(e64)),
        (is_("[16640, 2048] E=128"), _of_copy(e128)),
        (_many_tokens, _of_copy(large)),
        HOST,
    )


_ROWWISE: tuple[Rule, ...] = (
    (is_("[512, 7168]"), Target("us", "<=", 4.5)),
    (is_("[8192, 7168]"), _of_copy(0.95)),
    (_over_100_mb, _of_copy(0.97)),
    HOST,
)
_COLWISE = _grouped_rules(0.78, 0.65, 0.70)
_ROWCOL = _grouped_rules(0.60, 0.48, 0.58)
_WEIGHT: tuple[Rule, ...] = ((_expert_to_24_mb, _of_copy(0.70)), (always, _of_copy(0.58)), HOST)
_1X128: tuple[Rule, ...] = ((_over_100_mb, _of_copy(0.97)),)
_128X1: tuple[Rule, ...] = ((_over_100_mb, _of_copy(0.90)),)
_1X128_128X1: tuple[Rule, ...] = (
    (is_("[8192, 7168] E=1"), Target("us", "<=", 65)),
    (is_("[16640, 5120] E=64"), _of_copy(0.78)),
    (_over_100_mb, _of_copy(0.84)),
)
_128X128: tuple[Rule, ...] = ((always, _of_copy(0.84)),)
_MX_1X32: tuple[Rule, ...] = ((_over_100_mb, _of_copy(0.96)),)
_MX_32X1: tuple[Rule, ...] = ((_over_100_mb, _of_copy(0.88)),)
_MX_BOTH: tuple[Rule, ...] = ((_over_100_mb, _of_copy(0.84)),)
_PADDING: tuple[Rule, ...] = (
    (_many_tokens, _of_copy(0.92)),
    (is_("[16640, 5120] E=64"), Target("us", "<=", 100)),
)


def _permuting(bound: float) -> tuple[Rule, ...]:
    return ((is_("[131072, 7168] R=8 E=8"), _of_copy(bound)),)


_SORT: tuple[Rule, ...] = ((always, Target("ratio", ">=", 3)),)
_SPEEDUP = {"dsv3_up": 1.45, "dsv3_down": 1.35, "llama4": 1.45, "dsmoe16b": 1.2}
_TRAINING: tuple[Rule, ...] = (
    *((is_(name), Target("ratio", ">=", bound)) for name, bound in _SPEEDUP.items()),
    (always, Target("kept", "<=", 1)),
)


def _gemm_flops(*, m: int, k: int, n: int, **_: int) -> int:
    return 2 * m * k * n


CASES: dict[str, Case] = {
    case.op: case
    for case in (
        Case("quantize_rowwise", _activations, _tensor, moe.quantize_rowwise, _ROWWISE),
        Case("quantize_colwise", _groups, _grouped, moe.quantize_colwise, _COLWISE),
        Case("quantize_rowcol", _groups, _grouped, moe.quantize_rowcol, _ROWCOL),
        Case("quantize_weight", _weights, _tensor, moe.quantize_weight, _WEIGHT),
        Case("quantize_1x128", _activations, _tensor, moe.quantize_1x128, _1X128),
        Case("quantize_128x1", _groups, _grouped, moe.quantize_128x1, _128X1),
        Case("quantize_1x128_128x1", _blockwise_groups, _grouped, moe.quantize_1x128_128x1, _1X128_128X1),
        Case("quantize_128x128", _weights, _tensor, moe.quantize_128x128, _128X128),
        Case("quantize_mx_1x32", _mx_rows, _mx_tokens, moe.quantize_mx_1x32, _MX_1X32),
        Case("quantize_mx_32x1", _groups, _grouped, moe.quantize_mx_32x1, _MX_32X1),
        Case("quantize_mx_1x32_32x1", _blockwise_groups, _grouped, moe.quantize_mx_1x32_32x1, _MX_BOTH),
        Case("quantize_mx_weight", _weights, _tensor, moe.quantize_mx_weight),
        Case("dequantize", _activations, _quantized, moe.dequantize),
        Case("pad_token_groups", _token_groups, _grouped, moe.pad_token_groups, _PADDING),
        Case("pad_token_groups_to", _token_groups, _placed, moe.pad_token_groups_to, _PADDING),
        Case("unpad_token_groups", _token_groups, _padded, moe.unpad_token_groups, _PADDING, moved=_tokens_only),
        Case("permute_indices", _exchanged, _sent, moe.permute_indices),
        Case("permute_pad", _exchanged, _indexed, moe.permute_pad, _permuting(0.90)),
        Case("unpermute", _exchanged, _permuted, moe.unpermute, moved=_tokens_only),
        Case(
            "permute_pad_quantize_rowwise",
            _exchanged,
            _indexed,
            moe.permute_pad_quantize_rowwise,
            _permuting(0.85),
        ),
        Case(
            "permute_pad_quantize_rowcol",
            _exchanged,
            _indexed_groups,
            moe.permute_pad_quantize_rowcol,
            _permuting(0.52),
        ),
        Case("permute_pad_quantize_1x128", _exchanged, _indexed, moe.permute_pad_quantize_1x128),
        Case(
            "permute_pad_quantize_1x128_128x1",
            _exchanged,
            _indexed_groups,
            moe.permute_pad_quantize_1x128_128x1,
            _permuting(0.78),
        ),
        Case("permute_pad_quantize_mx_1x32", _exchanged, _indexed, moe.permute_pad_quantize_mx_1x32),
        Case("permute_pad_quantize_mx_1x32_32x1", _exchanged, _indexed_groups, moe.permute_pad_quantize_mx_1x32_32x1),
        *SCALE_CASES,
        Case("sort_tokens", _routings, _routed, moe.sort_tokens, _SORT, baseline=_torch_sort),
        Case("combine", _slot_rows, _slots, moe.combine),
        Case("combine_backward", _slot_rows, _slot_gradients, moe.combine_backward),
        Case("scaled_grouped_mm", _both_gemms, _scaled, moe.scaled_grouped_mm, (HOST,), _gemm_flops, _dense),
        Case(
            "grouped_mm",
            _gemms,
            _training,
            forward_backward(moe.grouped_mm),
            _TRAINING,
            lambda **dims: 3 * _gemm_flops(**dims),
            forward_backward(torch._grouped_mm),
            _bytes_kept,
        ),
    )
}
