"""Models of Hugging Face Transformers, or their experts alone, as small as tests need them."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import assert_same_tensor
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

EXPERTS, TOP_K, DIM, HIDDEN = 8, 2, 64, 48
SIZES = dict(
    **dict(hidden_size=DIM, intermediate_size=HIDDEN, num_hidden_layers=2, vocab_size=128, max_position_embeddings=64),
    **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts_per_tok=TOP_K),
    **dict(bos_token_id=1, eos_token_id=2, pad_token_id=0),
)
MODELS = {
    "qwen3_moe": dict(num_experts=EXPERTS, moe_intermediate_size=HIDDEN),
    "mixtral": dict(num_local_experts=EXPERTS),
    "gpt_oss": dict(num_local_experts=EXPERTS, layer_types=["full_attention", "sliding_attention"]),
    "nemotron_h": dict(
        **dict(n_routed_experts=EXPERTS, moe_intermediate_size=HIDDEN, moe_shared_expert_intermediate_size=HIDDEN),
        layers_block_type=["attention", "moe"],
    ),
    "deepseek_v3": dict(
        **dict(n_routed_experts=EXPERTS, moe_intermediate_size=HIDDEN, first_k_dense_replace=0, n_group=1),
        **dict(topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=16),
        **dict(qk_rope_head_dim=8, head_dim=8),
    ),
    "aria_text": dict(moe_num_experts=EXPERTS, moe_topk=TOP_K),
}
# muse_spark_text is for its experts alone: a norm behind each expert, which no model above has.
LAYOUTS = {
    **MODELS,
    "muse_spark_text": dict(num_local_experts=EXPERTS, moe_intermediate_size=HIDDEN, moe_hidden_size=DIM),
}


def config_of(name: str) -> object:
    try:
        return transformers.AutoConfig.for_model(name, **{**SIZES, **LAYOUTS[name]})
    except ValueError:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


def tiny_model(name: str, implementation: str) -> torch.nn.Module:
    config = config_of(name)
    if not hasattr(modeling(config), "use_experts_implementation"):
        pytest.skip(f"{name} of transformers {transformers.__version__} does not use the experts interface")
    torch.manual_seed(0)
    options = dict(dtype=torch.bfloat16, experts_implementation=implementation)
    return transformers.AutoModelForCausalLM.from_config(config, **options)


def modeling(config: object) -> ModuleType:
    return importlib.import_module(type(config).__module__.replace("configuration", "modeling"))


def experts_of(name: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """The experts of a model alone, with weights that keep the variance of the input."""
    config = config_of(name)
    classes = vars(modeling(config))
    experts = next(c for n, c in classes.items() if n.endswith("Experts") and isinstance(c, type))(config)
    if not hasattr(experts, "is_transposed"):
        pytest.skip(f"{name} of transformers {transformers.__version__} does not use the experts interface")
    return drawn(experts).to(dtype)


class Sizes(SimpleNamespace):
    """A config for experts alone, for any names that a model uses."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        of_word = dict(intermediate=HIDDEN, limit=7.0, alpha=1.702, softcap=20.0, act="silu", size=DIM, eps=1e-6)
        return next((value for word, value in of_word.items() if word in name), EXPERTS)


def marked_classes() -> Iterator[type[torch.nn.Module]]:
    """The classes of all models that the experts decorator marks, found in the text of their files."""
    marked = re.compile(r"^@use_experts_implementation\b.*\nclass (\w+)", re.M)
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        for name in marked.findall(path.read_text()):
            yield getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)


def drawn(experts: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for p in experts.parameters():
            terms = p.shape[1 if experts.is_transposed else 2] if p.dim() == 3 else 1
            p.copy_(torch.randn(p.shape) * terms**-0.5)
    return experts


def calls(tokens: int = 37, scores: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states, top_k_index and top_k_weights; expert 3 gets no token."""
    ids = torch.rand(tokens, EXPERTS - 1).topk(TOP_K).indices
    return torch.randn(tokens, DIM).bfloat16(), ids + (ids >= 3), torch.rand(tokens, TOP_K).to(scores)


def results(experts: torch.nn.Module, x: Tensor, ids: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """The output and every gradient, by name."""
    experts.zero_grad()
    x, scores = x.detach().requires_grad_(), scores.detach().requires_grad_()
    out = experts(x, ids, scores)
    out.backward(torch.linspace(-1, 1, out.numel()).cos().view(out.shape).to(out.dtype))
    of_parameters = {name: p.grad for name, p in experts.named_parameters()}
    return dict(out=out.detach(), x=x.grad, scores=scores.grad, **of_parameters)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 16), generator=torch.Generator().manual_seed(1))
    model.train().zero_grad()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Compares results by name. tolerance: of the norm of their difference, relative to the norm of `want`."""
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, name
        a, b = got[name].double(), want[name].double()
        assert (a - b).norm() <= tolerance * b.norm(), f"{name}: {(a - b).norm() / b.norm():.4f} > {tolerance:.4f}"


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in want:
        assert_same_tensor(got[name], want[name], name)
