"""GPT-OSS in MXFP4, loaded into frozen FP8 experts."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from fp8_checkpoints import E, loss, write, write_mxfp4
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers_models import transformers

import moe_fp8_ext
from moe_fp8_ext import Quantized
from moe_fp8_ext.integrations.fp8_checkpoint import master_weights_

mxfp4 = importlib.import_module("moe_fp8_ext.integrations.mxfp4")
pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def drawn(*shape: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Blocks of any values, and scales from 2^(low - 127) to 2^(high - 127)."""
    g = torch.Generator().manual_seed(0)
    e, n, k = shape
    blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8, generator=g)
    return blocks, torch.randint(low, high + 1, (e, n, k // 32), dtype=torch.uint8, generator=g)


def values(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights [E, N, K] in float32, by Transformers' own function, which gives [E, K, N]."""
    convert = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    return convert(blocks, scales, dtype=torch.float32).mT.contiguous()


def dequantized(weight: Quantized) -> Tensor:
    return weight.dequantize(torch.float32)


@pytest.mark.parametrize("shape", [(3, 256, 128), (2, 192, 160)])  # the second has blocks that are not full
def test_is_exact(shape):
    """As far as scales differ by 2^14; in both directions, as backward takes the same bytes."""
    packed = drawn(*shape, low=106, high=120)
    weight, rounded = mxfp4.from_mxfp4(*packed)
    assert weight.q.dtype == torch.float8_e4m3fn and weight.format == "blockwise" and rounded == 0
    assert torch.equal(dequantized(weight), values(*packed))
    other = Quantized(weight.q.mT.contiguous(), weight.scale.mT.contiguous(), "blockwise", transposed=True)
    assert torch.equal(dequantized(other).mT, values(*packed))


def test_limit():
    """The row with the smallest scale is exact at a distance of 2^14. At 2^15 odd multiples of its 0.5 are rounded."""
    blocks, scales = drawn(1, 128, 128, low=120, high=120)
    blocks[0, 1] = 0x77  # 6, so that all scales are known
    for distance, wanted in ((14, 0), (15, None)):
        scales[0, 0] = 120 - distance
        weight, rounded = mxfp4.from_mxfp4(blocks, scales)
        exact = values(blocks, scales)
        odd = torch.isin(exact[0, 0].abs() * 2 ** (127 - 120 + distance), torch.tensor([0.5, 1.5])).sum()
        assert rounded == (odd if wanted is None else wanted) and odd > 10
        error = (dequantized(weight) - exact).abs().max()
        assert error <= 0.5 * 2.0 ** (120 - distance - 127)  # half of the distance of E4M3's subnormals


def test_mxfp8():
    """It has the blocks of MXFP4 in forward. Backward has blocks along N, with a limit for the scales of 32 rows."""
    for low, is_exact in ((106, True), (60, False)):
        exact = values(*drawn(1, 128, 128, low=low, high=120))
        first, second = moe_fp8_ext.quantize_weight(exact, "mxfp8")
        assert torch.equal(dequantized(first), exact)
        assert torch.equal(dequantized(second).mT, exact) == is_exact


def test_bad_arguments():
    blocks, scales = drawn(1, 32, 64, low=120, high=120)
    for arguments, text in (
        ((blocks.int(), scales), "blocks must be uint8, got torch.int32"),
        ((blocks, scales.float()), "scales must be uint8, got torch.float32"),
        ((blocks.flatten(-2), scales), r"blocks must have shape \[E, N, K / 32, 16\], got \[1, 32, 32\]"),
        ((blocks, scales[:, :8]), r"scales must have shape \[1, 32, 2\], got \[1, 8, 2\]"),
    ):
        with pytest.raises(RuntimeError, match=f"from_mxfp4: {text}"):
            mxfp4.from_mxfp4(*arguments)


class Largest(TorchDispatchMode):
    """Finds the largest tensor of an op that has more than one byte an element."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor) and t.element_size() > 1 and t.device.type != "meta":
                self.elements = max(self.elements, t.numel())
        return out


# Five casts to FP8 on the way to a gradient, in each of two layers; see MODEL_TOLERANCE in test_fp8_checkpoint.py.
TOLERANCE = (2 * 5 / 3) ** 0.5 * 2**-4


def test_load(tmp_path):
    """No weight of experts is there in BF16 or in float32, but one expert of it. The rest trains, biases too."""
    folder = write_mxfp4(tmp_path)
    with warnings.catch_warnings(), Largest() as largest:
        warnings.simplefilter("error", UserWarning)
        model = mxfp4.load_mxfp4(folder, dtype=torch.float32)
    want = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=transformers.Mxfp4Config(dequantize=True), experts_implementation="eager"
    )
    of_experts = model.model.layers[0].mlp.experts
    assert largest.elements <= of_experts.gate_up_proj.numel() // E
    for name in ("gate_up_proj", "down_proj"):
        q, scale = getattr(of_experts, name), getattr(of_experts, f"{name}_scale_inv")
        assert not q.requires_grad and not scale.requires_grad
        exact = getattr(want.model.layers[0].mlp.experts, name)
        assert torch.equal(Quantized(q, scale, "blockwise").dequantize().mT, exact.bfloat16())
    want = want.double()
    loss(model).backward()
    loss(want).backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert "model.layers.0.mlp.experts.gate_up_proj_bias" in trained
    for name, p in want.named_parameters():
        assert (name in trained) == (not name.endswith(("gate_up_proj", "down_proj")))
        if name in trained:
            assert (trained[name].double() - p.grad).norm() <= TOLERANCE * p.grad.norm(), name
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="^moe_fp8: gate_up_proj must not ask for a gradient"):
        loss(model)


def test_load_refuses(tmp_path):
    with pytest.raises(RuntimeError, match="load_mxfp4: folder must have GPT-OSS in MXFP4, got qwen3_moe with quant_m"):
        mxfp4.load_mxfp4(write(tmp_path / "fp8"))
    with pytest.warns(UserWarning, match=r"load_mxfp4: \d[\d,]* values of experts were rounded"):
        model = mxfp4.load_mxfp4(write_mxfp4(tmp_path / "mxfp4", spread=40))
    assert all(layer.mlp.experts.num_rounded > 0 for layer in model.model.layers)
    with pytest.raises(RuntimeError, match="gate_up_proj must have the shape of the checkpoint"):
        master_weights_(model)  # its weights are transposed without quantization
    model.set_experts_implementation("moe_fp8_rowwise")
    with pytest.raises(RuntimeError, match='choose "moe_fp8_blockwise"'):
        loss(model)


def test_missing_scales(tmp_path):
    lost = "model.layers.1.mlp.experts.down_proj"
    folder = write_mxfp4(tmp_path, keep=lambda name: name != f"{lost}_scales")
    with pytest.raises(RuntimeError, match=f"got none for {lost}_blocks; download it again"):
        mxfp4.load_mxfp4(folder)
