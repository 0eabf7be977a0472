"""export_fp8 and fp8_state: names, bytes and configs of FP8 checkpoints, loaded by Transformers itself."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import assert_same_tensor, blocks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers_models import transformers

import moe_fp8_ext
from moe_fp8_ext import Recipe, export_fp8, fp8_state, ops

safetensors = pytest.importorskip("safetensors.torch")

E, D, F = 4, 128, 256
SIZES = dict(
    **dict(hidden_size=D, intermediate_size=F, num_hidden_layers=2, vocab_size=128, num_experts_per_tok=2),
    **dict(num_attention_heads=2, num_key_value_heads=2, head_dim=64, max_position_embeddings=64),
    **dict(bos_token_id=1, eos_token_id=2, pad_token_id=0),
)
MODELS = {
    "qwen3_moe": dict(num_experts=E, moe_intermediate_size=F, mlp_only_layers=[1]),
    "mixtral": dict(num_local_experts=E),
    "deepseek_v3": dict(
        **dict(n_routed_experts=E, moe_intermediate_size=F, first_k_dense_replace=1, n_group=1, topk_group=1),
        **dict(q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=64, v_head_dim=64, qk_rope_head_dim=64),
    ),
}
IDS = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))
POW2 = Recipe("blockwise", rounding="pow2")
pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def tiny(name: str = "qwen3_moe", **other: object) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **MODELS.get(name, {}), **other})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def loaded(folder: Path, as_on_a_gpu: bool) -> nn.Module:
    """Loads a folder as Transformers does on a GPU, with FP8 parameters, or as without one, dequantized to BF16."""
    options = dict(dtype=torch.bfloat16, device_map={"": "cpu"}, output_loading_info=True)
    with (
        mock.patch("torch.cuda.is_available", return_value=as_on_a_gpu),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
    ):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(info.values()), info
    return model.eval()


def assert_same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Names, dtypes, shapes and bytes."""
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, name
        assert torch.equal(got[name].contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8)), name


def written(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in safetensors.load_file(path).items()}


def experts_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if hasattr(m, "is_transposed"))


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("linears", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(tmp_path, name, linears):
    """Transformers takes every tensor, with its bytes, and what it loaded is written with the same bytes again."""
    model = tiny(name)
    export_fp8(model, tmp_path / "a", linears=linears)
    want = dict(fp8_state(model, linears=linears))
    assert_same_tensors(written(tmp_path / "a"), want)
    fp8 = loaded(tmp_path / "a", as_on_a_gpu=True)
    assert type(experts_of(fp8)).__name__ == "FP8Experts"
    assert {p.dtype for n, p in fp8.named_parameters() if n.endswith("o_proj.weight")} == {
        torch.float8_e4m3fn if linears and name != "deepseek_v3" else torch.bfloat16
    }
    export_fp8(fp8, tmp_path / "b")
    again, bias = written(tmp_path / "b"), "model.layers.1.mlp.gate.e_score_correction_bias"
    if bias in want:
        again[bias] = again[bias].to(want[bias].dtype)  # float32 in a loaded model of 5.17.0
    assert_same_tensors(again, want)
    assert config_of(tmp_path / "b") == config_of(tmp_path / "a")


def test_names_and_config(tmp_path):
    export_fp8(tiny(), tmp_path / "a", linears=True)
    names = set(written(tmp_path / "a"))
    experts = {f"model.layers.0.mlp.experts.{e}.{w}_proj.weight" for e in range(E) for w in ("gate", "up", "down")}
    linears = {f"model.layers.{i}.self_attn.{w}_proj.weight" for i in range(2) for w in "qkvo"}
    linears |= {f"model.layers.1.mlp.{w}_proj.weight" for w in ("gate", "up", "down")}
    assert {n.removesuffix("_scale_inv") for n in names if n.endswith("_scale_inv")} == experts | linears
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} <= names
    assert config_of(tmp_path / "a") == dict(
        **dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128]),
        modules_to_not_convert=["model.layers.0.mlp.gate", "lm_head"],
    )
    assert (tmp_path / "a" / "generation_config.json").exists()
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["dtype"] == "bfloat16"


def test_wrappers_change_no_name():
    want, model = dict(fp8_state(tiny())), tiny()
    layers = model.model.layers
    layers[0] = torch.compile(layers[0])
    layers[1].mlp = checkpoint_wrapper(layers[1].mlp)
    assert_same_tensors(dict(fp8_state(torch.compile(model))), want)


@pytest.mark.parametrize("recipe", [None, "blockwise", POW2])
def test_bytes_of_training(tmp_path, recipe):
    """The file has the bytes of one call of quantize_weight for all experts, whose halves are gate and up."""
    model = tiny()
    export_fp8(model, tmp_path / "a", recipe=recipe)
    got, experts = written(tmp_path / "a"), experts_of(model)
    rounding = "pow2" if recipe is POW2 else "exact"
    for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        q, scale, _, _ = ops.quantize_weight(getattr(experts, name).detach(), "blockwise", rounding=rounding)
        for e in range(E):
            values, scales = q[e].chunk(len(parts)), scale[e].chunk(len(parts))
            for part, want, want_scale in zip(parts, values, scales, strict=True):
                key = f"model.layers.0.mlp.experts.{e}.{part}.weight"
                assert_same_tensor(got[key].view(torch.uint8), want.contiguous().view(torch.uint8), key)
                assert_same_tensor(got[f"{key}_scale_inv"], want_scale.contiguous(), key)
    assert config_of(tmp_path / "a").get("scale_fmt") == ("ue8m0" if recipe is POW2 else None)


def test_a_part_of_the_experts_at_a_time(monkeypatch):
    model = tiny()
    want = dict(fp8_state(model))
    monkeypatch.setattr(moe_fp8_ext.integrations.export, "_CHUNK", 3 * D * F)
    assert_same_tensors(dict(fp8_state(model)), want)


@pytest.mark.parametrize("recipe", ["blockwise", POW2])
def test_logits_of_dequantized_weights(tmp_path, recipe):
    """Without a GPU, Transformers dequantizes. Its logits equal the logits of weights that ops.dequantize made."""
    model = tiny()
    export_fp8(model, tmp_path / "a", recipe=recipe)
    got = loaded(tmp_path / "a", as_on_a_gpu=False)
    experts = experts_of(model)
    rounding = moe_fp8_ext.quantization.recipe.get_recipe(recipe, "test").rounding
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        for w in (experts.gate_up_proj, experts.down_proj):
            q, scale, _, _ = ops.quantize_weight(w, "blockwise", rounding=rounding)
            w.copy_(ops.dequantize(q, scale, "blockwise"))
        want = model(input_ids=IDS).logits
        assert_same_tensor(got(input_ids=IDS).logits, want, "logits")
    assert not torch.equal(before, want)


@pytest.mark.parametrize("recipe", ["blockwise", POW2])
def test_logits_of_the_loaded_bytes(tmp_path, recipe):
    """The loaded bytes, multiplied as they are, give the logits that the model had while it was trained."""
    model = tiny()
    moe_fp8_ext.convert_(model, recipe)
    export_fp8(model, tmp_path / "a", recipe=recipe)
    frozen = loaded(tmp_path / "a", as_on_a_gpu=True)
    moe_fp8_ext.convert_(frozen, recipe)
    assert type(experts_of(frozen)).__name__ == "FP8Experts"
    with torch.no_grad():
        assert_same_tensor(frozen(input_ids=IDS).logits, model(input_ids=IDS).logits, "logits")


def test_scales_of_powers_of_two(tmp_path):
    """Transformers reads them as E8M0. A model that has such scales keeps them, and its further weights get them."""
    model = tiny()
    export_fp8(model, tmp_path / "a", recipe=POW2)
    fp8 = loaded(tmp_path / "a", as_on_a_gpu=True)
    assert experts_of(fp8).down_proj_scale_inv.dtype == torch.float8_e8m0fnu
    got, want = dict(fp8_state(fp8, linears=True)), dict(fp8_state(model, recipe=POW2, linears=True))
    assert {t.dtype for name, t in got.items() if name.endswith("_scale_inv")} == {torch.float8_e8m0fnu}
    want = {n: t.to(torch.float8_e8m0fnu) if n.endswith("_scale_inv") else t for n, t in want.items()}
    assert_same_tensors(got, want)
    with pytest.raises(
        RuntimeError, match="must have the rounding of the model's own FP8 weights, 'pow2', got 'exact'"
    ):
        export_fp8(fp8, tmp_path / "b", recipe="blockwise")


def test_files(tmp_path):
    """Files are as large as allowed, and the index knows all of their tensors."""
    model, limit = tiny(), 100_000
    export_fp8(model, tmp_path / "a", max_shard_bytes=limit)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "a").glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    sizes = 0
    for path in files:
        tensors = safetensors.load_file(path)
        assert {index["weight_map"].pop(name) for name in tensors} == {path.name}
        size = sum(t.nbytes for t in tensors.values())
        assert size <= limit or len(tensors) == 1
        sizes += size
    assert len(files) > 2 and not index["weight_map"] and index["metadata"]["total_size"] == sizes
    assert_same_tensors(dict(fp8_state(loaded(tmp_path / "a", as_on_a_gpu=True))), dict(fp8_state(model)))


def test_tied_embeddings(tmp_path):
    model = tiny(tie_word_embeddings=True)
    export_fp8(model, tmp_path / "a")
    assert "lm_head.weight" not in written(tmp_path / "a")
    again = loaded(tmp_path / "a", as_on_a_gpu=True)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_dense_model(tmp_path):
    model = tiny("qwen3")
    with pytest.raises(RuntimeError, match="must have experts that Transformers marks, FP8 weights, or linear layers"):
        export_fp8(model, tmp_path / "a")
    export_fp8(model, tmp_path / "a", linears=True)
    assert config_of(tmp_path / "a")["modules_to_not_convert"] == ["lm_head"]
    assert_same_tensors(dict(fp8_state(loaded(tmp_path / "a", True))), dict(fp8_state(model, linears=True)))


def test_experts_that_are_not_marked(tmp_path):
    """They stay as they are, and the config says so. By their name alone, Transformers would take them for FP8."""
    model = tiny("llama4_text", num_local_experts=E, intermediate_size_mlp=F)
    export_fp8(model, tmp_path / "a", linears=True)
    assert "model.layers.0.feed_forward.experts" in config_of(tmp_path / "a")["modules_to_not_convert"]
    again = loaded(tmp_path / "a", as_on_a_gpu=True)
    assert again.model.layers[0].self_attn.q_proj.weight.dtype == torch.float8_e4m3fn
    assert_same_tensors(dict(fp8_state(again)), dict(fp8_state(model, linears=True)))


def test_linears_of_a_parent_stay_together():
    """Engines fuse q, k and v, which must then be all FP8 or none. k and v have 64 rows here."""
    names = [name for name, _ in fp8_state(tiny(num_key_value_heads=1), linears=True) if name.endswith("_scale_inv")]
    assert not any("self_attn" in name for name in names) and any("layers.1.mlp.up_proj" in name for name in names)


# ---- Adapters --------------------------------------------------------------------------------------------------------


def with_adapters(model: nn.Module, **options: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    targets = dict(target_modules=["q_proj", "o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, **{**targets, **options}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape) / 20)
    return model


@pytest.mark.parametrize("options", [{}, dict(target_parameters=None, use_dora=True, modules_to_save=["lm_head"])])
def test_merged_adapters(tmp_path, options):
    """The file has the weights that merge_and_unload gives a copy. The model keeps its adapters and weights."""
    model = with_adapters(tiny(), **options)
    moe_fp8_ext.convert_(model, "blockwise")
    if "modules_to_save" in options:
        with torch.no_grad():
            model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(2)
    merged = copy.deepcopy(model).merge_and_unload()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="must have no adapters with merge_adapters=False, got some on"):
        export_fp8(model, tmp_path / "a")
    export_fp8(model, tmp_path / "a", merge_adapters=True, linears=True)
    assert_same_tensors(written(tmp_path / "a"), dict(fp8_state(merged, linears=True)))
    assert_same_tensors(model.state_dict(), before)
    without = dict(fp8_state(tiny(), linears=True))
    changed = "mlp.experts.0.up_proj.weight" if not options else "self_attn.o_proj.weight"
    got = written(tmp_path / "a")[f"model.layers.0.{changed}"]
    assert not torch.equal(got.float(), without[f"model.layers.0.{changed}"].float())


def test_merged_adapters_over_fp8(tmp_path):
    """W + s B A in float32, quantized again; weights without an adapter keep their bytes."""
    export_fp8(tiny(), tmp_path / "a", linears=True)
    fp8 = loaded(tmp_path / "a", as_on_a_gpu=True)
    plain = dict(fp8_state(fp8))
    wide = {n: p.detach().clone() for n, p in fp8.named_parameters()}
    model = with_adapters(fp8, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    got = dict(fp8_state(model, merge_adapters=True))
    q = "model.layers.0.self_attn.q_proj"
    layer = model.get_base_model().get_submodule(q)
    adapter = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
    w = ops.dequantize(
        wide[f"{q}.weight"][None], wide[f"{q}.weight_scale_inv"][None], "blockwise", out_dtype=torch.float32
    )
    values, scale, _, _ = ops.quantize_weight(w + adapter.detach().float(), "blockwise")
    assert_same_tensors({"q": got[f"{q}.weight"], "s": got[f"{q}.weight_scale_inv"]}, {"q": values[0], "s": scale[0]})
    changed = {n for n in got if not torch.equal(got[n].float(), plain[n].float())}
    assert changed and all("q_proj" in n or "down_proj" in n for n in changed)
    assert {n.split(".experts.")[1] for n in changed if ".experts." in n} >= {f"{e}.down_proj.weight" for e in range(E)}
    assert_same_tensors({n: got[n] for n in plain.keys() - changed}, {n: plain[n] for n in plain.keys() - changed})


def test_adapters_that_are_not_active_leave_the_bytes_of_fp8(tmp_path):
    export_fp8(tiny(), tmp_path / "a", linears=True)
    fp8 = loaded(tmp_path / "a", as_on_a_gpu=True)
    plain = dict(fp8_state(fp8))
    model = with_adapters(fp8)
    model.add_adapter("other", type(model.active_peft_config)(r=2, target_modules=["k_proj"], init_lora_weights=False))
    model.set_adapter("other")
    got = dict(fp8_state(model, merge_adapters=True))
    changed = {n for n in got if not torch.equal(got[n].float(), plain[n].float())}
    assert {f"model.layers.{i}.self_attn.k_proj.weight" for i in range(2)} <= changed
    assert all("k_proj" in name for name in changed)


def test_disabled_adapters_are_merged_too():
    """As PEFT's merge_and_unload does. `unload` gives the weights without them."""
    model = with_adapters(tiny())
    with model.disable_adapter():
        got = dict(fp8_state(model, merge_adapters=True))
    assert_same_tensors(got, dict(fp8_state(copy.deepcopy(model).merge_and_unload())))
    without = dict(fp8_state(model.unload()))
    assert_same_tensors(without, dict(fp8_state(tiny())))
    assert any(not torch.equal(got[n].float(), t.float()) for n, t in without.items())


# ---- What cannot be written ------------------------------------------------------------------------------------------


def gpt_oss() -> nn.Module:
    return tiny("gpt_oss", num_local_experts=E)


def without_scales() -> nn.Module:
    model = tiny()
    experts = experts_of(model)
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model.config.quantization_config = dict(quant_method="fp8", weight_block_size=[128, 128])
    return model


def of_other_blocks() -> nn.Module:
    model = without_scales()
    model.config.quantization_config["weight_block_size"] = None
    return model


def on_meta() -> nn.Module:
    return tiny().to("meta")


def with_integers() -> nn.Module:
    model = tiny()
    experts_of(model).down_proj = nn.Parameter(torch.zeros(E, D, F, dtype=torch.int8), requires_grad=False)
    return model


def with_a_parametrization() -> nn.Module:
    model = tiny()
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    return model


def with_other_sizes() -> nn.Module:
    return tiny(moe_intermediate_size=192)


def with_an_adapter_on_tied_weights() -> nn.Module:
    return with_adapters(tiny(tie_word_embeddings=True), target_modules=["embed_tokens"])


def with_prompts() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (gpt_oss, r"mlp.experts \(GptOssExperts\) must have no biases, as Transformers' FP8 experts have"),
        (without_scales, r"experts.down_proj_scale_inv must have shape \(4, 1, 2\), got none"),
        (of_other_blocks, r"quantization_config of the model must have weight_block_size=\[128, 128\], got \(\)"),
        (on_meta, "model.embed_tokens.weight must have values, got a weight on the meta device, .*before they are off"),
        (with_integers, "experts.down_proj must be bfloat16, float16, float32 or float8_e4m3fn, got int8"),
        (with_a_parametrization, "must have every tensor of its class, got none for model.layers.0.self_attn.q_proj.w"),
        (with_other_sizes, r"\(Qwen3MoeExperts\) must have sizes that are multiples of 128, got 192 and 128"),
        (
            with_an_adapter_on_tied_weights,
            "weights that other modules share, got model.embed_tokens and lm_head: untie",
        ),
        (with_prompts, "adapters of model must change its weights, got prompts"),
        (lambda: nn.Linear(2, 2), "model must be a model of Transformers, or a PeftModel around one, got Linear"),
    ],
)
def test_what_cannot_be_written(tmp_path, make, text):
    model = make()
    with pytest.raises(RuntimeError, match=f"export_fp8: .*{text}"):
        export_fp8(model, tmp_path / "a", merge_adapters=True)
    with pytest.raises(RuntimeError, match=f"fp8_state: .*{text}"):
        fp8_state(model, merge_adapters=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            dict(recipe="rowwise"),
            RuntimeError,
            r"recipe must be 'blockwise', with dtype None or float8_e4m3fn, got Rec",
        ),
        (
            dict(recipe=Recipe("blockwise", dtype=torch.float8_e5m2)),
            RuntimeError,
            "got Recipe.'blockwise', dtype=torch",
        ),
        (dict(recipe="fp9"), ValueError, "export_fp8"),
        (dict(linears="all"), TypeError, "linears must be a bool, got str"),
        (dict(merge_adapters=1), TypeError, "merge_adapters must be a bool, got int"),
        (dict(max_shard_bytes=0), ValueError, "max_shard_bytes must be a positive int, got 0"),
    ],
)
def test_bad_options(tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        export_fp8(tiny(), tmp_path / "a", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("args", "got"), [(("folder", tiny), "function"), ((tiny, None), "NoneType")])
def test_arguments_exchanged_or_missing(args, got):
    with pytest.raises(TypeError, match=f"^export_fp8: folder must be a path, got {got}; the model is the first arg"):
        export_fp8(*args)


def test_folder_with_files(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(RuntimeError, match="folder must be new or empty, got .* which has files"):
        export_fp8(tiny(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_weights_that_are_not_finite(tmp_path):
    """They are found while writing. No folder remains, neither the one asked for nor a temporary one."""
    model = tiny()
    with torch.no_grad():
        experts_of(model).down_proj[3, 5, 7] = float("nan")
    with pytest.raises(RuntimeError, match=r"model.layers.0.mlp.experts.down_proj must be finite, got Inf or NaN"):
        export_fp8(model, tmp_path / "a", max_shard_bytes=100_000)
    assert not list(tmp_path.iterdir())


def test_documented_blocks(tmp_path):
    """Loads what the page's block writes, and an engine of Transformers takes the page's stream."""
    model, engine = tiny(), {}
    names = dict(model=model, folder=tmp_path / "a", moe_fp8_ext=moe_fp8_ext, engine=mock.Mock())
    names["engine"].load_weights.side_effect = engine.update
    for code in blocks("docs/export-fp8.md"):
        exec(code, names)
    assert_same_tensors(engine, dict(fp8_state(model)))
    assert type(experts_of(loaded(tmp_path / "a", as_on_a_gpu=True))).__name__ == "FP8Experts"
