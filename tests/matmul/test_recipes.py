"""Recipes: the ops of each, its options, names and errors, and the choices of "auto"."""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path

import experts_problem
import pytest
import torch
from grouped_problem import MIN_SQNR_DB, exact, gradients, problem, run
from helpers import assert_same, group_offs, sqnr_db
from torch import Tensor

from moe_fp8_ext import Experts, Recipe, grouped_mm, quantize_weight, reference
from moe_fp8_ext.quantization import cost
from moe_fp8_ext.quantization.format import FORMATS
from moe_fp8_ext.quantization.recipe import RECIPES, get_recipe

QUANTIZED = tuple(FORMATS)


# A recipe differs from the exact composition of its ops by one rounding of the product to bfloat16, at most 2^-14 / 12
# of the signal, and by the accumulator, which for rowwise operands on Hopper has its own precision. Formats with blocks
# may have two more such roundings, of dequantized operands.
@pytest.mark.parametrize("name", QUANTIZED)
def test_is_the_composition_of_its_ops(name, device):
    """The recipe adds nothing to the three products of quantized operands."""
    recipe, min_db = Recipe(name), 48.1 if FORMATS[name].block else 45
    a, b_t, offs, g = problem(300, 160, 144, group_offs("tail_rows", 300, 3), device)
    rounding, how = {"rounding": recipe.rounding}, {"align": recipe.align, "out_dtype": torch.float64}
    along_tokens = {"offs": offs, "align": recipe.align, **rounding}
    amax = recipe.amax_of_groups
    q_a, s_a, qt_a, st_a, ends = reference.quantize_both(a.detach(), name, **along_tokens, amax=amax)
    q_g, s_g, qt_g, st_g, _ = reference.quantize_both(g, name, **along_tokens)
    q_w, s_w, qt_w, st_w = reference.quantize_weight(b_t.detach().mT, name, **rounding)
    if FORMATS[name].order == "column_major":
        s_w, st_w, st_a = s_w.mT, st_w.mT, st_a.mT
    want = (
        reference.scaled_grouped_mm(q_a, q_w.mT, s_a, s_w, name, offs, out_dtype=torch.float64),
        reference.scaled_grouped_mm(q_g, qt_w.mT, s_g, st_w, name, offs, out_dtype=torch.float64),
        reference.scaled_grouped_mm(qt_g, qt_a.t(), st_g, st_a, name, ends, **how).mT,
    )
    for what, ours, ideal in zip(("out", "dA", "dB_t"), run(a, b_t, offs, g, recipe), want, strict=True):
        assert sqnr_db(ours, ideal) > min_db, what


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_accuracy_of_mxfp8(rounding, device):
    """Holds the product to 28 dB with "rceil" and 26.2 dB with "floor".

    Scales that saturate nothing give 28.5 dB (see grouped_problem.py). 0.5 dB of it are left for the spread of draws
    and, in wgrad, for short blocks.

    "floor" rounds scales down. Then the largest of 32 elements saturates at 448 if it is between 448 and 512, and loses
    at most 1/8. This happens in log2(8/7) = 0.19 of all blocks, and the square of the largest element is on average 5
    times the mean square. So an operand has 1/64 * 5/32 * 0.19 = 0.0005 more noise than the 0.0007 of rounding. Both
    give 26.2 dB, which is an upper bound of the noise and needs no further room.
    """
    a, b_t, offs, g = problem(1000, 512, 384, group_offs("zipf", 1000, 4), device)
    recipe = Recipe("mxfp8", rounding=rounding)
    for ours, ideal in zip(run(a, b_t, offs, g, recipe), exact(a, b_t, offs, g), strict=True):
        assert sqnr_db(ours, ideal) >= {"rceil": 28, "floor": 26.2}[rounding]


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("indexed", [False, True])
def test_wgrad_high_precision(name, indexed, device):
    """The gradient of weights equals recipe "bf16", bit for bit. Outputs and other gradients equal the recipe's."""
    recipe = Recipe(name, wgrad_high_precision=True)
    a, b_t, offs, g = problem(120, 90, 75, group_offs("tail_rows", 120, 3), device)
    indices = torch.randperm(120, generator=torch.Generator().manual_seed(0)).int().to(device)
    gathered = {"indices": indices, "top_k": 1} if indexed else {}

    def gradients_of(recipe: str | Recipe) -> list[Tensor]:
        return gradients(lambda a, b: grouped_mm(a, b, offs, recipe=recipe, **gathered), a, b_t, g)

    out, d_a, d_b = gradients_of(recipe)
    assert_same((out, d_a), gradients_of(Recipe(name))[:2])
    assert_same(d_b, gradients_of("bf16")[2])


def test_wgrad_high_precision_of_frozen_operands(device):
    recipe = Recipe("mxfp8", wgrad_high_precision=True)
    a, b_t, offs, g = problem(120, 64, 48, group_offs("zipf", 120, 3), device)
    both = run(a, b_t, offs, g, recipe)
    for frozen, names in ((a, (0, 2)), (b_t, (0, 1))):
        frozen.requires_grad_(False)
        got = run(a, b_t, offs, g, recipe)
        frozen.requires_grad_()
        assert_same([got[i] for i in names], [both[i] for i in names])
        assert sum(t is None for t in got) == 1


def test_wgrad_high_precision_takes_as_many_experts_as_torch(gpu):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 1024), gpu)
    with pytest.raises(RuntimeError, match="at most 1023 entries with wgrad_high_precision, got 1024"):
        grouped_mm(a, b_t, offs, recipe=Recipe("mxfp8", wgrad_high_precision=True))


# E5M2 has one bit less than E4M3, so one of two operands has four times the noise: 4 dB less than 25.8 or 28.5 dB.
@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
def test_gradients_in_another_dtype(name, device):
    recipe = Recipe(name, grad_dtype=torch.float8_e5m2)
    a, b_t, offs, g = problem(120, 96, 80, group_offs("zipf", 120, 3), device)
    got, want = run(a, b_t, offs, g, recipe), exact(a, b_t, offs, g)
    assert_same(got[0], run(a, b_t, offs, g, name)[0])
    for ours, ideal, fine in zip(got[1:], want[1:], run(a, b_t, offs, g, name)[1:], strict=True):
        assert MIN_SQNR_DB[name] - 4 <= sqnr_db(ours, ideal) < sqnr_db(fine, ideal) - 2


def test_padding_changes_no_result(device):
    """The multiple that groups are padded to changes memory, and no result."""
    a, b_t, offs, g = problem(120, 64, 48, group_offs("zipf", 120, 3), device)
    for name, aligns in (("rowwise", (1, 16, 256)), ("blockwise", (1, 32, 256)), ("mxfp8", (32, 128))):
        results = [run(a, b_t, offs, g, Recipe(name, align=align)) for align in aligns]
        for got in results[1:]:
            for ours, first in zip(got, results[0], strict=True):
                assert sqnr_db(ours, first) > 45  # on a GPU, another GEMM may multiply


def test_names():
    assert list(RECIPES) == ["bf16", "rowwise", "blockwise", "mxfp8", "auto"]
    for name, recipe in RECIPES.items():
        assert Recipe(name) == get_recipe(name) == recipe
        assert get_recipe(recipe) is recipe
    assert RECIPES["bf16"].format is None
    assert RECIPES["auto"] == Recipe("auto", "rowwise", bf16_where_faster=True)
    assert Recipe("mxfp8_rowmajor").format == "mxfp8_rowmajor"
    assert Recipe("mine", "mxfp8", rounding="floor") == Recipe(name="mine", format="mxfp8", rounding="floor")


# Points that bench/auto_sweep.py measured: an op, its sizes, and microseconds by recipe.
RESULTS = Path(__file__).parents[2] / "bench" / "results"
MEASURED = json.loads((RESULTS / "auto.json").read_text())
LAYERS = [(1536, 256, 128), (2048, 768, 128), (4096, 1536, 64), (2880, 2880, 32), (7168, 2048, 256), (1024, 512, 8)]
PRODUCTS = [(2048, 1536, 128), (768, 2048, 128), (7168, 4096, 32), (512, 512, 8), (128, 4096, 8), (4096, 128, 8)]


@pytest.fixture
def no_fixed_costs(monkeypatch):
    """Removes fixed costs, so that the choice of "auto" changes within sizes that a test can compute."""
    for op, costs in cost.COSTS.items():
        without = {name: c._replace(fixed_us=0.0, host_us=0.0) for name, c in costs.items()}
        monkeypatch.setitem(cost.COSTS, op, without)


def lost_time(point):
    """How much longer than the fastest recipe the choice of "auto" takes."""
    auto, sizes, us = RECIPES["auto"], point["sizes"], point["us"]
    chosen = auto.for_layer(**sizes, gated=True) if point["op"] == "layer" else auto.for_grouped_mm(**sizes)
    return us[chosen.name] / min(us.values()) - 1


@pytest.mark.parametrize("point", MEASURED["earlier"], ids=lambda p: f"{p['op']} {[*p['sizes'].values()]}")
def test_auto_is_within_3_percent_of_the_fastest(point):
    assert lost_time(point) <= 0.03


def test_auto_over_many_sizes():
    """Times of small sizes are the host's. They vary by 10% from one call to the next, and some choices with them."""
    losses = [lost_time(point) for point in MEASURED["points"]]
    assert sum(losses) / len(losses) < 0.005
    assert sum(loss > 0.03 for loss in losses) <= 10 and max(losses) < 0.11


def test_auto_without_a_backward():
    """At the measured sizes, choices for forward alone lose 0.24% on average and at most 4.6%."""
    auto, points = RECIPES["auto"], json.loads((RESULTS / "auto_forward.json").read_text())["points"]

    def losses(backward):
        chosen = (auto.for_layer(**point["sizes"], gated=True, backward=backward).name for point in points)
        return [p["us"][name] / min(p["us"].values()) - 1 for p, name in zip(points, chosen, strict=True)]

    alone, training = losses(backward=False), losses(backward=True)
    assert sum(alone) / len(alone) < 0.0025 and sum(loss > 0.03 for loss in alone) <= 3 and max(alone) < 0.05
    assert sum(training) / len(training) > 0.02  # the choices of a training step would not do


@pytest.mark.parametrize("training", [False, True])
def test_auto_in_eval_mode(training, device):
    """Without gradients, a module in eval mode computes with the recipe that is fastest for forward alone."""
    sizes = slots, hidden, intermediate, experts = 64, 1024, 512, 64
    auto = RECIPES["auto"]
    names = [auto.for_layer(*sizes, True, backward).name for backward in (False, True)]
    layer = Experts(experts, hidden, intermediate, recipe="auto", device=device, dtype=torch.bfloat16)
    x = torch.randn(slots // 2, hidden, device=device, dtype=torch.bfloat16)
    ids = torch.rand(slots // 2, experts, device=device).topk(2).indices
    call = x, ids, torch.rand(slots // 2, 2, device=device)
    with torch.no_grad():
        got = layer.train(training)(*call)
        layer.options["recipe"] = RECIPES[names[training]]
        assert names[0] != names[1] and torch.equal(got, layer(*call))


def test_ids_that_are_no_tensor_in_eval_mode():
    layer = Experts(4, 32, 32, recipe="auto").eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match="experts: topk_ids must be a tensor, got list"):
        layer(torch.randn(2, 32), [[0], [1]], torch.rand(2, 1))


def test_auto_takes_fp8_for_narrow_experts():
    """On an H200, FP8 was faster at [1536, 256, 128] for every number of slots: its layer moves fewer bytes of rows."""
    for slots in (64, 128, 256, 512, 1536):
        assert RECIPES["auto"].for_layer(slots * 128, 1536, 256, 128, True).format is not None


@pytest.mark.parametrize("sizes", [*LAYERS, *PRODUCTS])
def test_auto_changes_at_most_once_from_one_recipe_to_another(sizes, no_fixed_costs):
    """With more rows, the GPU's time never returns to a recipe that it left, and moves on to faster products."""
    *features, experts = sizes
    choose = RECIPES["auto"].for_layer if sizes in LAYERS else RECIPES["auto"].for_grouped_mm
    rest = (True,) if sizes in LAYERS else ()
    names = [choose(rows * experts, *features, experts, *rest).name for rows in range(0, 20_000, 8)]
    found = [name for name, _ in itertools.groupby(names)]
    assert len(found) == len(set(found))
    if sizes in LAYERS:
        assert found == sorted(found, key=["bf16", "blockwise", "rowwise"].index) and found[-1] == "rowwise"


def test_what_auto_chooses_from(no_fixed_costs):
    """The chosen recipe has the options that belong to no format. A given format, rounding or amax fixes the format."""
    few, some, many = (64, 1024, 1056, 1), (1600, 1024, 1056, 1), (131072, 7168, 4096, 8)
    auto = RECIPES["auto"]
    assert [auto.for_grouped_mm(*sizes).name for sizes in (few, some, many)] == ["bf16", "blockwise", "rowwise"]
    assert auto.for_grouped_mm(*few) is RECIPES["bf16"]
    options = dict(grad_dtype=torch.float8_e5m2, wgrad_high_precision=True, align=64, use_fast_accum=False)
    for sizes in (some, many):
        chosen = Recipe("auto", **options).for_grouped_mm(*sizes)
        assert chosen == Recipe(chosen.name, **options) and chosen.name in ("blockwise", "rowwise")
    fixed = [
        Recipe("auto", rounding="exact"),
        Recipe("auto", amax="group"),
        Recipe("auto", "blockwise"),
        Recipe("auto", "mxfp8"),
        Recipe("rowwise", bf16_where_faster=True),
        Recipe("mine", "blockwise", bf16_where_faster=True),
    ]
    for recipe in fixed:
        assert recipe.for_grouped_mm(*few) is RECIPES["bf16"]
        assert recipe.for_grouped_mm(*many) is recipe
        assert recipe.for_layer(10, 1024, 512, 128, True) is RECIPES["bf16"]
        assert recipe.for_layer(10**6, 1024, 512, 128, True) is recipe
    for name in ("bf16", "rowwise", "blockwise", "mxfp8"):
        assert get_recipe(name).for_grouped_mm(*few) is get_recipe(name)
        assert get_recipe(name).for_layer(10, 1024, 512, 128, True) is get_recipe(name)


def test_auto_takes_bf16_for_sizes_that_no_native_gemm_multiplies():
    auto = RECIPES["auto"]
    for k, n in ((7168, 4104), (7176, 4096)):
        assert auto.for_grouped_mm(131072, k, n, 8) is RECIPES["bf16"]
        assert auto.for_layer(131072, k, n, 8, True) is RECIPES["bf16"]
    # torch's BF16 product does not take 1024 experts, so FP8 is the only choice.
    for n in (4096, 4104):
        assert auto.for_grouped_mm(4096, 7168, n, 1024).format and auto.for_layer(64, 7168, n, 1024, True).format


@pytest.mark.parametrize(("m", "chosen"), [(1600, "blockwise"), (64, "bf16")])
def test_auto_is_what_it_chooses(m, chosen, no_fixed_costs, device):
    a, b_t, offs, g = problem(m, 1024, 1056, group_offs("zipf", m, 1), device)
    assert_same(run(a, b_t, offs, g, "auto"), run(a, b_t, offs, g, chosen))
    slots = torch.arange(m, dtype=torch.int32, device=device)
    got = grouped_mm(a, b_t, offs, indices=slots, top_k=1, recipe="auto")
    assert_same(got, grouped_mm(a, b_t, offs, indices=slots, top_k=1, recipe=chosen))
    # Weights that are already in fp8 fix the format.
    frozen = quantize_weight(b_t.detach().mT, "rowwise")
    got = grouped_mm(a.detach(), frozen, offs, recipe=Recipe("auto", rounding="exact"))
    assert_same(got, grouped_mm(a.detach(), frozen, offs, recipe=Recipe("rowwise", rounding="exact")))


@pytest.mark.parametrize(("tokens", "chosen"), [(6, "bf16"), (20, "blockwise"), (100, "rowwise")])
def test_auto_of_the_layer(tokens, chosen, no_fixed_costs, device):
    layer = experts_problem.layer(t=tokens, d=32, f=32, e=2, top_k=2).at(device)
    got, want = (experts_problem.run(layer, recipe=recipe) for recipe in ("auto", chosen))
    experts_problem.assert_equal(got, want)


def test_auto_in_a_graph_for_any_number_of_rows(no_fixed_costs, device):
    """The choice is a guard of the graph. A number of rows that changes the choice compiles another graph."""
    torch._dynamo.reset()
    call = torch.compile(partial(grouped_mm, recipe="auto"), fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (64, 80, 1600, 3200):
        a, b_t, offs, _ = problem(m, 1024, 1056, group_offs("zipf", m, 1), device)
        chosen = RECIPES["auto"].for_grouped_mm(m, 1024, 1056, 1)
        assert chosen.name == ("bf16" if m < 100 else "blockwise")
        assert_same(call(a, b_t, offs).detach(), grouped_mm(a, b_t, offs, recipe=chosen).detach())


def test_align_of_numpy():
    numpy = pytest.importorskip("numpy", reason="torch runs without it")
    assert repr(Recipe("rowwise", align=numpy.int32(64))) == "Recipe('rowwise', align=64)"


def test_defaults():
    defaults = {name: (Recipe(name).rounding, Recipe(name).align) for name in ("bf16", *QUANTIZED)}
    assert defaults == {
        "bf16": (None, 8),
        "rowwise": ("pow2", 32),
        "blockwise": ("exact", 32),
        "mxfp8": ("rceil", 32),
        "mxfp8_rowmajor": ("rceil", 32),
    }
    assert Recipe("mine", "blockwise", align=128).align == 128
    amaxes = {name: Recipe(name).amax for name in ("bf16", "auto", *QUANTIZED)}
    assert amaxes == dict(zip(amaxes, (None, "batch", "batch", "square", "group", "group"), strict=True))


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe("rowwise").align = 32
    assert dataclasses.replace(Recipe("rowwise"), align=32) == Recipe("rowwise", align=32)


@pytest.mark.parametrize(
    ("error", "args", "kwargs", "text"),
    [
        (ValueError, ["mine"], {}, "name must be .*or come with a format, got 'mine'"),
        (ValueError, ["mine", "tensorwise"], {}, "format must be .*got 'tensorwise'"),
        (ValueError, ["mine", "rowwise"], {"dtype": torch.bfloat16}, "dtype must be .*got torch.bfloat16"),
        (ValueError, ["rowwise"], {"dtype": "float8_e4m3fn"}, "dtype must be .*got 'float8_e4m3fn'"),
        (ValueError, ["mxfp8"], {"grad_dtype": torch.float16}, "grad_dtype must be .*got torch.float16"),
        (ValueError, ["mxfp8"], {"grad_dtype": torch.float8_e8m0fnu}, "grad_dtype must be .*got torch.float8_e8m0fnu"),
        (ValueError, ["mxfp8"], {"rounding": "pow2"}, "rounding must be 'rceil' or 'floor' .*got 'pow2'"),
        (ValueError, ["blockwise"], {"rounding": "even"}, "rounding must be 'exact' or 'pow2' .*got 'even'"),
        (ValueError, ["bf16"], {"rounding": "exact"}, "rounding must be None .*got 'exact'"),
        (ValueError, ["bf16"], {"amax": "group"}, "amax must be None .*got 'group'"),
        (ValueError, ["rowwise"], {"amax": "row"}, "amax must be 'group' or 'batch' .*got 'row'"),
        (ValueError, ["mxfp8"], {"amax": "batch"}, "amax must be 'group' with format 'mxfp8', got 'batch'"),
        (TypeError, [None, "rowwise"], {}, "name must be of type str, got None"),
        (TypeError, ["rowwise"], {"wgrad_high_precision": 1}, "wgrad_high_precision must be of type bool, got 1"),
        (TypeError, ["rowwise"], {"bf16_where_faster": 0}, "bf16_where_faster must be of type bool, got 0"),
        (ValueError, ["auto"], {"bf16_where_faster": False}, "bf16_where_faster must be True .*got False"),
        (ValueError, ["rowwise", "mxfp8"], {}, "format must be 'rowwise' with name 'rowwise', got 'mxfp8'"),
        (ValueError, ["bf16"], {"dtype": torch.float8_e5m2}, "dtype must be None without a format, got .*"),
        (ValueError, ["bf16"], {"grad_dtype": torch.float8_e5m2}, "grad_dtype must be None without .*"),
        (TypeError, ["rowwise"], {"align": True}, "align must be of type int, got True"),
        (TypeError, ["rowwise"], {"align": torch.tensor(32)}, r"align must be of type int, got tensor\(32\)"),
        (TypeError, ["rowwise"], {"align": "16"}, "align must be of type int, got '16'"),
        (TypeError, ["bf16"], {"align": 8.0}, "align must be of type int, got 8.0"),
        (ValueError, ["mxfp8"], {"align": 16}, "align must be a power of two .*got 16"),
        (ValueError, ["mxfp8"], {"align": 256}, "align must be a power of two .*got 256"),
        (ValueError, ["rowwise"], {"align": 24}, "align must be a power of two .*got 24"),
        (ValueError, ["blockwise"], {"align": 512}, "align must be a power of two .*got 512"),
    ],
)
def test_errors(error, args, kwargs, text):
    with pytest.raises(error, match=f"^Recipe: {text}$"):
        Recipe(*args, **kwargs)


PRINTED = {
    "Recipe('bf16')": '{"name": "bf16"}',
    "Recipe('bf16', align=16)": '{"name": "bf16", "align": 16}',
    "Recipe('rowwise')": '{"name": "rowwise"}',
    "Recipe('rowwise', amax='group')": '{"name": "rowwise", "amax": "group"}',
    "Recipe('mine', format='mxfp8')": '{"name": "mine", "format": "mxfp8"}',
    "Recipe('blockwise', rounding='pow2')": '{"name": "blockwise", "rounding": "pow2"}',
    "Recipe('auto')": '{"name": "auto"}',
    "Recipe('auto', format='mxfp8', wgrad_high_precision=True)": (
        '{"name": "auto", "format": "mxfp8", "wgrad_high_precision": true}'
    ),
    "Recipe('mine', format='rowwise', dtype=torch.float8_e4m3fnuz, use_fast_accum=False, bf16_where_faster=True)": (
        '{"name": "mine", "format": "rowwise", "dtype": "float8_e4m3fnuz", "use_fast_accum": false, '
        '"bf16_where_faster": true}'
    ),
    "Recipe('mxfp8', grad_dtype=torch.float8_e5m2)": '{"name": "mxfp8", "grad_dtype": "float8_e5m2"}',
}


@pytest.mark.parametrize(("printed", "text"), PRINTED.items())
def test_prints_fields_without_defaults(printed, text):
    recipe = eval(printed)
    assert repr(recipe) == printed and recipe.to_json() == text
    assert Recipe.from_json(text) == recipe
    everything = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    everything |= {n: None if v is None else str(v)[6:] for n, v in everything.items() if n.endswith("dtype")}
    assert Recipe.from_json(json.dumps(everything)) == recipe


@pytest.mark.parametrize(
    ("error", "given", "text"),
    [
        (ValueError, "rowwise", "text must be JSON, got 'rowwise': Expecting value: .*"),
        (ValueError, '["rowwise"]', "text must be an object in JSON with a name, got .*"),
        (ValueError, '"name"', "text must be an object in JSON with a name, got .*"),
        (ValueError, '{"format": "rowwise"}', "text must be an object in JSON with a name, got .*"),
        (ValueError, '{"name": "rowwise", "scaling": 1}', "every field must be one of 'name', .*, got 'scaling'"),
        (ValueError, '{"name": "rowwise", "dtype": "float16"}', "dtype must be .*, got 'float16'"),
        (ValueError, '{"name": "rowwise", "dtype": ["float8_e5m2"]}', "dtype must be .*, got .'float8_e5m2'."),
        (ValueError, '{"name": "rowwise", "grad_dtype": 1}', "grad_dtype must be .*, got 1"),
        (ValueError, '{"name": "mine", "format": {}}', "format must be .*, got {}"),
        (ValueError, '{"name": "mxfp8", "rounding": []}', "rounding must be .*, got .*"),
        (TypeError, None, "text must be a str, got NoneType"),
        (TypeError, '{"name": ["rowwise"]}', "name must be of type str, got .'rowwise'."),
        (TypeError, '{"name": "rowwise", "align": 32.0}', "align must be of type int, got 32.0"),
        (
            TypeError,
            '{"name": "rowwise", "use_fast_accum": "false"}',
            "use_fast_accum must be of type bool, got 'false'",
        ),
    ],
)
def test_json_that_is_no_recipe(error, given, text):
    with pytest.raises(error, match=f"^Recipe: {text}$"):
        Recipe.from_json(given)


@pytest.mark.parametrize(
    ("error", "recipe", "text"),
    [(ValueError, "nosuch", "rowwise.*nosuch"), (TypeError, 8, "int"), (TypeError, None, "NoneType")],
)
def test_unknown_recipe(error, recipe, text, device):
    a, b_t, offs, _ = problem(50, 32, 16, group_offs("uniform", 50, 2), device)
    with pytest.raises(error, match=text):
        grouped_mm(a, b_t, offs, recipe=recipe)
