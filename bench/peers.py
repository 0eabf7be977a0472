"""The cost of the same work elsewhere: torchao and DeepGEMM if they are installed, torch's own GEMMs, and the plain
formula through torch.compile. A peer takes the arguments of a case and returns a call of the same work."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

Call = Callable[[], object]
Peer = Callable[..., Call]

# The sizes at which torchao is timed: compiling and tuning its kernels takes seconds for every new size.
TORCHAO_AT = frozenset(
    (
        *("[131072, 7168]", "[131072, 7168] E=8", "[8, 4096, 7168]"),
        *("[131072, 224]", "[16, 8192, 160]", "[131072, 224] E=8", "[7168, 4096] E=8"),
        *("dsv3_up", "dsmoe16b"),
    )
)


def peers_of(label: str, shape: str, even: bool, compiled: bool) -> dict[str, Peer]:
    """Peers of a case at one of its shapes, by name.

    torchao's GEMM asserts on the device that every group is a multiple of 16, so it gets only even groups.
    """
    found = {}
    if shape in TORCHAO_AT and label in TORCHAO and find_spec("torchao") and (even or "grouped_mm" not in label):
        found["torchao"] = TORCHAO[label]
    if label == "scaled_grouped_mm rowwise":
        found["torch FP8"] = _torch_fp8
    if label == "scaled_grouped_mm blockwise" and shape.endswith("2Dx3D") and even and find_spec("deep_gemm"):
        found["DeepGEMM"] = _deepgemm
    # Torch would have to move rows taken by index.
    if label.startswith("scaled_grouped_mm") and "by index" not in label:
        found["torch BF16"] = _torch_bf16
    if compiled and label in COMPILED:
        found["compiled"] = COMPILED[label]
    return found


def _torch_fp8(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format: str, offs: Tensor, *_: object) -> Call:
    if b.ndim == 2:
        scale_a, scale_b = scale_a.flatten(), scale_b.flatten()
    return lambda: torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=torch.bfloat16, use_fast_accum=True)


def _deepgemm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format: str, offs: Tensor, *_: object) -> Call:
    """DeepGEMM needs the group of every row, which is found before the timing, and groups of whole tiles."""
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    if bool((sizes % 128).any()):
        raise ValueError("groups must be multiples of 128 rows")
    groups = torch.arange(len(offs), dtype=torch.int32, device=a.device).repeat_interleave(sizes)
    out = torch.empty(a.shape[0], b.shape[2], dtype=torch.bfloat16, device=a.device)
    multiply = import_module("deep_gemm").m_grouped_fp8_gemm_nt_contiguous

    def call() -> Tensor:
        multiply((a, scale_a), (b.mT, scale_b.mT), out, groups)
        return out

    return call


def _torch_bf16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, format: str, offs: Tensor, *_: object) -> Call:
    a, b = a.bfloat16(), b.bfloat16()
    return lambda: torch._grouped_mm(a, b, offs=offs)


# torchao's scales are factors to multiply by, row-major, and it pads nothing, so it does less work than ours. If it has
# no op for both directions, both of its ops are timed. Its blockwise and MX casts have no groups.
def _torchao(module: str, kernel: str, pick: Callable[..., tuple[Tensor, ...]]) -> Peer:
    """Calls the kernel with the arguments that `pick` selects."""

    def peer(*args: Tensor) -> Call:
        call, chosen = getattr(import_module(f"torchao.prototype.{module}"), kernel), pick(*args)
        return lambda: call(*chosen)

    return peer


def _both(first: Peer, second: Peer) -> Peer:
    def peer(*args: Tensor) -> Call:
        calls = first(*args), second(*args)
        return lambda: [call() for call in calls]

    return peer


def _first(x: Tensor, *_: object) -> tuple[Tensor]:
    return (x,)


def _with_offs(x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    return x, offs


def _transposed(w: Tensor) -> tuple[Tensor]:
    return (w.mT,)


def _torchao_training(a: Tensor, w: Tensor, offs: Tensor, grad: Tensor) -> Call:
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as grouped_mm

    def call() -> object:
        out = grouped_mm(a, w.mT, offs, pad_token_groups_for_grouped_mm=False)
        return torch.autograd.grad(out, (a, w), grad)

    return call


_MOE, _MX, _SQUARES = "moe_training.kernels", "mx_formats.kernels", "blockwise_fp8_training.grouped_kernels"
_BLOCKS, _SWIZZLES = "blockwise_fp8_training.kernels", "moe_training.kernels.mxfp8"
_rows = _torchao(_MOE, "triton_fp8_rowwise_2d_scale_and_cast", _first)
_tokens = _torchao(_MOE, "triton_fp8_per_group_colwise_scales", _with_offs)
_block_rows = _torchao(_BLOCKS, "triton_fp8_blockwise_act_quant_lhs", _first)
_block_tokens = _torchao(_BLOCKS, "triton_fp8_blockwise_act_quant_transposed_lhs", _first)
TORCHAO: dict[str, Peer] = {
    "quantize_rows rowwise": _rows,
    "quantize_rows blockwise": _block_rows,
    "quantize_rows mxfp8_rowmajor": _torchao(_MX, "triton_to_mxfp8_dim0", _first),
    "quantize_tokens rowwise": _tokens,
    "quantize_tokens blockwise": _block_tokens,
    "quantize_tokens mxfp8": _torchao(_MX, "triton_to_mxfp8_dim1", _first),
    "quantize_both rowwise": _both(_rows, _tokens),
    "quantize_both blockwise": _both(_block_rows, _block_tokens),
    "quantize_weight rowwise": _both(
        _torchao(_MOE, "triton_fp8_colwise_3d_scale_and_cast", _transposed),
        _torchao(_MOE, "triton_fp8_rowwise_3d_transpose_rhs", _transposed),
    ),
    "quantize_weight blockwise": _both(
        _torchao(_SQUARES, "triton_fp8_blockwise_weight_quant_grouped_transposed_rhs", _transposed),
        _torchao(_SQUARES, "triton_fp8_blockwise_weight_quant_grouped_rhs", _transposed),
    ),
    "swizzle_scales": _torchao(_MX, "triton_mx_block_rearrange", _first),
    "swizzle_scales experts": _torchao(_SWIZZLES, "triton_mx_block_rearrange_per_group_3d", _first),
    "swizzle_scales rows": _torchao(_SWIZZLES, "triton_mx_block_rearrange_2d_M_groups", _with_offs),
    "swizzle_scales columns": _torchao(_SWIZZLES, "triton_mx_block_rearrange_2d_K_groups", _with_offs),
    "grouped_mm rowwise": _torchao_training,
}


def _formula(x: Tensor) -> tuple[Tensor, Tensor]:
    limit = torch.finfo(torch.float8_e4m3fn).max
    m = limit / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12)
    return (x.float() * m).clamp(-limit, limit).to(torch.float8_e4m3fn), m.reciprocal().squeeze(-1)


_compiled_rows = torch.compile(_formula, dynamic=False)
_compiled_weight = torch.compile(lambda w: (_formula(w), _formula(w.mT.contiguous())), dynamic=False)
# Only ops without groups: torch.compile cannot express groups without a host sync.
COMPILED: dict[str, Peer] = {
    "quantize_rows rowwise": lambda x, offs: lambda: _compiled_rows(x),
    "quantize_weight rowwise": lambda w: lambda: _compiled_weight(w),
}
