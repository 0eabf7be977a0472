"""Experts of Hugging Face Transformers: our forward against Transformers' own."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, assert_same_tensor, blocks, short
from torch import Tensor
from transformers_models import (
    DIM,
    EXPERTS,
    HIDDEN,
    LAYOUTS,
    MODELS,
    SIZES,
    Sizes,
    assert_close,
    assert_same,
    calls,
    drawn,
    experts_of,
    gradients,
    marked_classes,
    results,
    tiny_model,
    transformers,
)

import moe_fp8_ext
from moe_fp8_ext import clamped_swiglu
from moe_fp8_ext.integrations import transformers as integration
from moe_fp8_ext.integrations.transformers import register

moe = importlib.import_module("transformers.integrations.moe")
pytestmark = [
    pytest.mark.usefixtures("registered"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def run(experts: torch.nn.Module, implementation: str, x: Tensor, ids: Tensor, scores: Tensor) -> dict[str, Tensor]:
    """Returns the output and every gradient."""
    experts.config._experts_implementation = implementation
    return results(experts, x, ids, scores)


# From an input to the output there are these roundings to bfloat16: 2 products, 2 biases, at most 5 in a gate and 3 in
# a norm, scores and their sum. Backward has as many, and adds about 10 rows of a bias's gradient one by one. Each
# rounding has a relative error of at most 2^-8, and of at most 2^-8 / sqrt(3) in the root mean square. Independent
# errors add up in squares, and the errors of both results add up in the same way. Random weights do not change a
# relative error.
ROUNDINGS = 14 + 14 + 10
TOLERANCE = (2 * ROUNDINGS / 3) ** 0.5 * 2**-8  # 2 %


@pytest.mark.parametrize("scores", [torch.float32, torch.bfloat16], ids=short)
@pytest.mark.parametrize("name", LAYOUTS)
def test_bf16_is_what_transformers_computes(name, scores):
    experts, call = experts_of(name), calls(scores=scores)
    assert_close(run(experts, "moe_fp8_bf16", *call), run(experts, "grouped_mm", *call), TOLERANCE)


# Models whose experts have a gate that is no activation of this package, or a norm: docs/transformers.md lists them.
COMPOSED = {"Inkling2", "Inkling2Loop", "MuseSpark", "MuseSparkText"}


def test_every_class_that_is_marked():
    """Compares the experts of all models that Transformers has. All but the listed ones are one operation."""
    composed, names = set(), set()
    for marked in marked_classes():
        experts, call = drawn(marked(Sizes())).bfloat16(), calls()
        assert_close(run(experts, "moe_fp8_bf16", *call), run(experts, "grouped_mm", *call), TOLERANCE)
        names.add(marked.__name__.removesuffix("Experts"))
        if integration._experts_arguments(experts) is None:
            composed.add(marked.__name__.removesuffix("Experts"))
    assert len(names) >= 54 and composed == COMPOSED & names


@pytest.mark.parametrize("name", LAYOUTS)
def test_float32_experts_under_autocast(name):
    """Compares with eager experts, because Transformers' grouped_mm ignores autocast."""
    experts, (x, ids, scores) = experts_of(name, torch.float32), calls()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (run(experts, which, x.float(), ids, scores) for which in ("moe_fp8_bf16", "eager"))
    assert_close(got, want, TOLERANCE)


def test_recipes():
    """Each recipe has its name. `moe_fp8` is the recipe that `register` got."""
    experts, call = experts_of("mixtral"), calls()
    names = "rowwise", "blockwise", "mxfp8", "bf16", "auto"
    assert {name for name in interface() if "moe_fp8" in name} == {"moe_fp8", *(f"moe_fp8_{name}" for name in names)}
    named = {name: run(experts, f"moe_fp8_{name}", *call) for name in names}
    assert_same(run(experts, "moe_fp8", *call), named["rowwise"])
    x, ids, _ = call
    chosen = moe_fp8_ext.Recipe("auto").for_layer(ids.numel(), x.shape[-1], HIDDEN, EXPERTS, gated=True)
    assert_same(named["auto"], named[chosen.name])
    for other in ("blockwise", "bf16"):
        assert not torch.equal(named[other]["out"], named["rowwise"]["out"])
        register(other)
        assert_same(run(experts, "moe_fp8", *call), named[other])
    register(moe_fp8_ext.Recipe("rowwise", grad_dtype=torch.float8_e5m2))
    mine = run(experts, "moe_fp8", *call)
    assert_same_tensor(mine["out"], named["rowwise"]["out"], "out")
    assert not torch.equal(mine["x"], named["rowwise"]["x"])
    assert_same(run(experts, "moe_fp8_rowwise", *call), named["rowwise"])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "muse_spark_text"])
def test_auto_in_eval_mode(name):
    """Without gradients in eval mode, "auto" chooses by forward alone, also where the model's own gate runs."""
    experts, (x, ids, scores) = experts_of(name), calls()
    sizes = ids.numel(), x.shape[-1], HIDDEN, EXPERTS, experts.has_gate
    chosen = [moe_fp8_ext.Recipe("auto").for_layer(*sizes, backward=backward).name for backward in (False, True)]
    assert chosen[0] != chosen[1]

    def out(implementation: str, training: bool) -> Tensor:
        experts.train(training).config._experts_implementation = implementation
        with torch.no_grad():
            return experts(x, ids, scores)

    assert torch.equal(out("moe_fp8_auto", training=False), out(f"moe_fp8_{chosen[0]}", training=True))
    if integration._experts_arguments(experts) is not None:  # else "auto" chooses for each grouped_mm
        assert torch.equal(out("moe_fp8_auto", training=True), out(f"moe_fp8_{chosen[1]}", training=True))


def losses(name: str, implementation: str) -> list[float]:
    model = tiny_model(name, implementation)
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for _ in range(15):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("name", "implementation"), [*((name, "moe_fp8") for name in MODELS), ("qwen3_moe", "moe_fp8_blockwise")]
)
def test_training(name, implementation):
    stock, ours = losses(name, "grouped_mm"), losses(name, implementation)
    assert stock[-1] < 0.9 * stock[0] and ours != stock
    assert ours == pytest.approx(stock, rel=0.01)


@pytest.fixture
def activations(monkeypatch) -> list[str]:
    """Records the activations of all calls of `experts`."""
    called = []

    def spy(*args: object, activation: str, **kwargs: object) -> Tensor:
        called.append(activation)
        return moe_fp8_ext.experts(*args, activation=activation, **kwargs)

    monkeypatch.setattr(integration, "experts", spy)
    return called


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_one_operation(name, activations):
    """Experts with a known activation and without a norm become one call of `experts`."""
    known = {"gpt_oss": ["swiglu_oai"], "nemotron_h": ["relu2"], "muse_spark_text": []}
    run(experts_of(name), "moe_fp8", *calls())
    assert activations == known.get(name, ["swiglu"])


@pytest.mark.parametrize(
    ("name", "act", "activation"),
    [
        *(("mixtral", act, "swiglu") for act in ("silu", "swish", torch.nn.functional.silu)),
        *(("mixtral", act, "geglu") for act in ("gelu_pytorch_tanh", "gelu_new")),
        *(("nemotron_h", act, "silu") for act in ("silu", torch.nn.functional.silu)),
        ("nemotron_h", "gelu_new", "gelu"),
    ],
)
def test_activations_that_are_known(name, act, activation, activations):
    module, call = experts_of(name), calls()
    del module.act_fn  # it is a module, and a function cannot be assigned in its place
    module.act_fn = transformers.activations.ACT2FN[act] if isinstance(act, str) else act
    assert_close(run(module, "moe_fp8_bf16", *call), run(module, "grouped_mm", *call), TOLERANCE)
    assert activations == [activation]


@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "nemotron_h"])
def test_class_that_was_replaced(name, activations):
    """Experts are one operation even if `fully_shard` or a parametrization (such as LoRA) replaced their class."""
    module, call = experts_of(name), calls()
    want = run(module, "moe_fp8", *call)
    torch.nn.utils.parametrize.register_parametrization(module, "down_proj", torch.nn.Identity())
    assert type(module).__name__.startswith("Parametrized")
    assert_same_tensor(run(module, "moe_fp8", *call)["x"], want["x"], "x")
    assert len(activations) == 2 and len(set(activations)) == 1


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v4", "glm5_next"])
def test_clamped_gates(name, activations):
    """Any limit and alpha. The gate of DeepSeek-V4 and of GLM-5-Next has none of GPT-OSS's alpha and offset."""
    found = [marked for marked in marked_classes() if marked.__module__.endswith(f".modeling_{name}")]
    if not found:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    module, call = drawn(found[0](Sizes())).bfloat16(), calls()
    limit, alpha = ("swiglu_limit", None) if name == "glm5_next" else ("limit", "alpha" if name == "gpt_oss" else None)
    setattr(module, limit, 0.75)
    if alpha:
        module.alpha = 1.5
    got, stock = run(module, "moe_fp8_bf16", *call), run(module, "grouped_mm", *call)
    assert activations == [clamped_swiglu(0.75, 1.5, 1) if alpha else clamped_swiglu(0.75)]
    x, ids, scores = call
    want = run(module.double(), "eager", x.double(), ids, scores.double())
    for name in want:
        # Values of h near the limit are rounded to either side of it. The model's own code rounds gates and ups again.
        error, of_stock = ((of[name] - want[name]).norm() / want[name].norm() for of in (got, stock))
        assert error <= max(of_stock, TOLERANCE), f"{name}: {error:.4f}, of Transformers' own code {of_stock:.4f}"


def test_activations_that_are_not_known(activations):
    """The model's own code runs."""
    module, call = experts_of("mixtral"), calls()
    module.act_fn = torch.nn.Tanh()
    assert_close(run(module, "moe_fp8_bf16", *call), run(module, "grouped_mm", *call), TOLERANCE)
    assert not activations


class SiLU(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.nn.functional.silu(x)


CHANGES = [*("gpt_oss one", "gpt_oss class", "qwen3_moe one"), *(f"mixtral {of}" for of in ("hook", "act_fn", "act"))]


@pytest.mark.parametrize("change", CHANGES)
def test_activations_that_were_changed(change, activations, monkeypatch):
    name, change = change.split()
    module, call = experts_of(name), calls()
    of_class = type(module)._apply_gate

    @functools.wraps(of_class)
    def gate(self: torch.nn.Module, h: Tensor) -> Tensor:
        return 3 * of_class(self, h)

    if change == "one":
        module._apply_gate = gate.__get__(module)
    elif change == "class":
        monkeypatch.setattr(type(module), "_apply_gate", gate)
    elif change == "hook":
        module.act_fn.register_forward_hook(lambda act, args, out: 3 * out)
    elif change == "act":
        monkeypatch.setattr(type(module.act_fn), "forward", SiLU.forward)
    else:
        module.act_fn = SiLU()
    assert_close(run(module, "moe_fp8_bf16", *call), run(module, "grouped_mm", *call), TOLERANCE)
    assert not activations


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiles(name):
    torch._dynamo.reset()
    experts = experts_of(name)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (37, 50):
        call = calls(tokens)
        want = run(experts, "moe_fp8", *call)
        got = results(compiled, *call)
        assert_same({key.removeprefix("_orig_mod."): value for key, value in got.items()}, want)


def test_a_whole_model_compiles():
    torch._dynamo.reset()
    model = tiny_model("mixtral", "moe_fp8")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 16))
    want, got = (m(input_ids=tokens, labels=tokens, use_cache=False).loss for m in (model, compiled))
    got.backward()
    assert got.item() == pytest.approx(want.item(), rel=0.01)  # the two run different attention kernels
    assert all(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_gradient_checkpointing(name):
    model = tiny_model(name, "moe_fp8")
    want = gradients(model)
    model.gradient_checkpointing_enable()
    assert_same(gradients(model), want)


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name, tmp_path):
    """Weights come back unchanged, and config.json does not name this package."""
    model = tiny_model(name, "moe_fp8")
    model.save_pretrained(tmp_path)
    assert "moe_fp8" not in (tmp_path / "config.json").read_text()
    options = dict(dtype=torch.bfloat16, experts_implementation="moe_fp8")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert_same(gradients(loaded), gradients(model))
    model.set_experts_implementation("grouped_mm")
    loaded.set_experts_implementation("grouped_mm")
    assert_same(gradients(loaded), gradients(model))


# On the way to a gradient there are 7 casts to FP8: both operands of three products, and the activation's input that is
# kept for backward. Each has a relative error of at most 2^-4.
FP8_TOLERANCE = (7 / 3) ** 0.5 * 2**-4  # 9.5 %, in the root mean square


def test_bench_cases(monkeypatch):
    """With the small sizes of a CPU, a case and its baseline give the same gradients within the error of FP8."""
    torch.manual_seed(0)
    monkeypatch.syspath_prepend(ROOT / "bench")
    cases = importlib.import_module("cases_models").MODEL_CASES
    assert len(cases) == 4
    for case in cases:
        (shape,) = case.shapes(True)
        inputs = case.inputs(torch.device("cpu"), shape.groups, **shape.dims)
        got, want = (torch.cat([g.double().flatten() for g in call(*inputs)]) for call in (case.call, case.baseline))
        assert 0 < (got - want).norm() <= FP8_TOLERANCE * want.norm()


def test_bench_tables(monkeypatch):
    """The table has a line for each size, with tokens a second and the ratio to the baseline."""
    pytest.importorskip("tabulate", reason="the bench's dependencies are not installed")
    monkeypatch.syspath_prepend(ROOT / "bench")
    cases, tables = (importlib.import_module(name) for name in ("cases_models", "tables"))
    times = dict(us=2e6, baseline_us=3e6, ratio=1.5)
    rows = [
        dict(op=case.label, shape=shape.label, dims=shape.dims, **times)
        for case in cases.MODEL_CASES
        for shape in case.shapes(False)
    ]
    versions = dict(torch="2.11.0+cu130", transformers="5.24.0")
    text = tables.adoption_table({"": dict(device="a GPU", commit="a" * 40, rows=rows, **versions)})
    lines = [re.sub(" +", " ", line) for line in text.splitlines() if " x)" in line]
    place = "a GPU, torch 2.11.0, Transformers 5.24.0 at aaaaaaa"
    assert [line.split("| ", 2)[2] for line in lines] == [
        f"{place} | 10,923 | 16,384 (1.50 x) | 16,384 (1.50 x) |",
        f"{place} | 5,461 | 8,192 (1.50 x) | 8,192 (1.50 x) |",
    ]


IN_README = blocks("README.md")


OF_TRAINER = blocks("docs/transformers.md", "Checkpoints of Trainer")  # run by test_trainer.py
IN_DOCS = [b for b in blocks("docs/transformers.md") if "convert_" not in b and b not in OF_TRAINER]


@pytest.mark.parametrize("given", [IN_README, IN_DOCS])
def test_documents(given, tmp_path, capsys):
    tiny_model("mixtral", "eager").save_pretrained(tmp_path)
    offs = torch.tensor([3, 3, 8], dtype=torch.int32)
    x, w = (torch.randn(*size).bfloat16() for size in ((8, 32), (3, 16, 32)))
    names = dict(path=tmp_path, moe_fp8_ext=moe_fp8_ext, x=x, w=w, offs=offs)
    for block in given:
        exec(block, names)
    model = names["model"]
    assert model.config._experts_implementation == "moe_fp8"
    want = gradients(model)
    model.set_experts_implementation("moe_fp8_rowwise")
    assert_same(gradients(model), want)
    assert given is not IN_README or names["out"].shape == (8, 16)
    printed = capsys.readouterr().out
    assert given is IN_README or all(f"model.layers.{i}.mlp.experts  transformers" in printed for i in range(2))


def shard(experts: torch.nn.Module, first: int, count: int) -> torch.nn.Module:
    """Returns one rank's part of the experts."""
    part = copy.deepcopy(experts)
    part.num_experts, part._is_expert_parallel = count, True
    for name, p in experts.named_parameters():
        if p.shape[0] == EXPERTS:
            getattr(part, name).data = p.data[first : first + count].clone()
    return part


@pytest.mark.parametrize("name", LAYOUTS)
def test_expert_parallel_sentinels(name):
    """Two ranks add up to the whole. A slot without a local expert has no effect, whatever its values are."""
    experts, (x, ids, scores) = experts_of(name), calls()
    ids[:5] %= EXPERTS // 2  # these tokens have experts of the first rank alone
    whole, parts = run(experts, "moe_fp8_bf16", x, ids, scores), []
    for rank in range(2):
        local = ids - rank * EXPERTS // 2
        local[(local < 0) | (local >= EXPERTS // 2)] = EXPERTS // 2
        mine = x.clone()
        mine[(local == EXPERTS // 2).all(1)] = float("nan")
        part = shard(experts, rank * EXPERTS // 2, EXPERTS // 2)
        parts.append(run(part, "moe_fp8_bf16", mine, local, scores))
        assert not parts[-1]["scores"][local == EXPERTS // 2].any()
    assert not parts[1]["out"][:5].any() and not parts[1]["x"][:5].any()
    halves = {k: (parts[0][k], parts[1][k]) for k in whole}
    sharded = {k for k, p in experts.named_parameters() if p.shape[0] == EXPERTS}
    assert_close({k: torch.cat(v) if k in sharded else sum(v) for k, v in halves.items()}, whole, TOLERANCE)


def test_no_tokens_and_no_experts():
    experts, (x, ids, scores) = experts_of("gpt_oss"), calls()
    none = run(experts, "moe_fp8", x[:0], ids[:0], scores[:0])
    assert none["out"].shape == (0, DIM) and not none["down_proj"].any()
    foreign = run(experts, "moe_fp8", x, ids + EXPERTS, scores)
    assert not any(value.any() for value in foreign.values())


VALIDATED = """
import sys
import torch
import moe_fp8_ext
assert not [m for m in sys.modules if m.startswith(("transformers", "moe_fp8_ext.integrations.t"))]
from moe_fp8_ext.integrations.transformers import register
assert not [m for m in sys.modules if m.startswith("transformers")]
register()
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

class Experts(torch.nn.Module):
    num_experts, has_gate, has_bias, is_transposed, act_fn = 2, False, False, True, torch.nn.ReLU()
    up_proj = down_proj = torch.ones(2, 16, 16)

x, scores = torch.ones(3, 16), torch.ones(3, 1)
forward = ALL_EXPERTS_FUNCTIONS["moe_fp8"]
assert forward(Experts(), x, torch.tensor([[0], [2], [5]]), scores)[:, 0].tolist() == [256, 0, 0]
try:
    forward(Experts(), x, torch.tensor([[0], [-2], [1]]), scores)
except RuntimeError as error:
    assert "topk_ids" in str(error)
else:
    raise AssertionError("an id below -1 was taken")
"""


def test_validation_lets_sentinels_pass_and_import_is_lazy():
    environment = {**os.environ, "MOE_FP8_VALIDATE": "1"}
    subprocess.run([sys.executable, "-c", VALIDATED], env=environment, check=True)


def interface() -> dict[str, object]:
    return dict(moe.ALL_EXPERTS_FUNCTIONS)


def check_refused(error: type[Exception], text: str, *args: object) -> None:
    """Checks that `register` raises one sentence, and that nothing has changed."""
    before = interface()
    with pytest.raises(error, match=f"^{text}$"):
        register(*args)
    assert interface() == before


KNOWN = re.escape(integration._KNOWN)


def test_transformers_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    check_refused(ImportError, f"{KNOWN} none")


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "6.0.0", "6.0rc1", "6.1.0.dev0", "main"])
def test_transformers_is_too_old_or_too_new(monkeypatch, version):
    monkeypatch.setattr("transformers.__version__", version)
    check_refused(ImportError, f"{KNOWN} {re.escape(version)}")


def test_transformers_declares_a_layout_that_is_unknown(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.99.0")
    monkeypatch.setattr(moe, "use_experts_implementation", lambda experts_class=None, *, has_bias, has_pre_norm: None)
    strange = "has_gate, has_pre_norm, is_concatenated, is_transposed"
    check_refused(ImportError, rf"{KNOWN} 5\.99\.0, whose experts differ in {strange}")


def test_recipe_that_does_not_exist():
    names = "'bf16', 'rowwise', 'blockwise', 'mxfp8', 'auto' or a Recipe"
    check_refused(ValueError, f"register: recipe must be {names}, got 'fp9'", "fp9")
    check_refused(TypeError, "register: recipe must be a str or a Recipe, got int", 8)
    with pytest.raises(ValueError, match="moe_fp8_fp9"):
        tiny_model("mixtral", "moe_fp8_fp9")


def test_expert_weights_that_are_quantized_already():
    experts, call = experts_of("mixtral"), calls()
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.to(torch.uint8), requires_grad=False)
    experts.config._experts_implementation = "moe_fp8"
    with pytest.raises(RuntimeError, match="moe_fp8: gate_up_proj must be .* float32, got torch.uint8"):
        experts(*call)
