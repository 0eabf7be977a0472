"""The documents: tests run each of their blocks and commands, links lead somewhere, and the API reference is complete.

Blocks of some pages need a framework or several processes. Those are run by the tests of that framework, which ask for
them by `blocks(page, section)`. All others are run here. docs/troubleshooting.md has a test file of its own.
"""

from __future__ import annotations

import ast
import functools
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import ROOT, blocks
from processes import BACKENDS, device, in_processes
from torch import nn

import moe_fp8_ext
from moe_fp8_ext import ops

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))]
OTHERS = ["DESIGN.md", "CHANGELOG.md", "bench/results/README.md"]
OWN_TEST = {"docs/troubleshooting.md": "test_troubleshooting.py"}


# ---- Python ----------------------------------------------------------------------------------------------------------

E, D, F, TOKENS, TOP_K = 8, 256, 128, 1000, 2  # as docs/layer.md has them
SMALLER = {"256, 7168, 2048": f"{E}, {D}, {F}"}  # than DeepSeek-V3


def run(page: str, **given: object) -> dict[str, object]:
    """Runs the blocks of a page, in order, and returns all names."""
    names = dict(given)
    for code in blocks(page):
        for large, small in SMALLER.items():
            code = code.replace(large, small)
        exec(code, names)
    return names


def of_layer() -> dict[str, object]:
    """What docs/layer.md takes for granted."""
    counts = torch.full((2, E), TOKENS // (2 * E), dtype=torch.int32)
    return dict(counts=counts, num_ranks=2, my_activation=nn.functional.silu)


def of_training() -> dict[str, object]:
    """What docs/training.md takes for granted."""
    sizes = dict(w=(F, D), w_gate_up=(2 * F, D), w_down=(D, F))
    weights = {name: nn.Parameter(torch.randn(E, *size).bfloat16()) for name, size in sizes.items()}
    for w in weights.values():
        w.main_grad = torch.zeros(w.shape)
    x = torch.randn(TOKENS, D).bfloat16()
    topk_scores, topk_ids = torch.rand(TOKENS, E).topk(TOP_K)
    model = moe_fp8_ext.Experts(E, D, F)
    return dict(
        **dict(moe_fp8_ext=moe_fp8_ext, torch=torch, functools=functools, x=x, topk_ids=topk_ids),
        **dict(topk_scores=topk_scores, offs=torch.arange(1, E + 1, dtype=torch.int32) * (TOKENS // E), **weights),
        **dict(router=moe_fp8_ext.Router(E, D, TOP_K), micro_batches=x.split(500), loss=lambda out: out.float().mean()),
        model=lambda batch: model(batch, topk_ids[:500], topk_scores[:500]),
        optimizer=torch.optim.SGD(model.parameters()),
        block=lambda x: moe_fp8_ext.grouped_mm(x, weights["w"].mT, torch.full((E,), TOKENS, dtype=torch.int32)),
    )


def of_performance() -> dict[str, object]:
    layer = moe_fp8_ext.MoE(moe_fp8_ext.Router(E, D, TOP_K), moe_fp8_ext.Experts(E, D, F))
    return dict(layer=layer, x=torch.randn(20, D).bfloat16())


class Recorded:
    """A dispatcher of one rank, and a buffer as DeepEP's, that repeat what they received."""

    def __init__(self, ids: torch.Tensor, scores: torch.Tensor) -> None:
        self.received = ids, scores

    def send(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.clone()

    def send_back(self, rows: torch.Tensor) -> torch.Tensor:
        self.sent_back = rows.clone()
        return self.sent_back

    def dispatch(self, x: tuple[torch.Tensor, torch.Tensor], *, expert_alignment: int) -> tuple[object, ...]:
        ids, scores = self.received
        counts = (ids[..., None] == torch.arange(E)).sum((0, 1))
        return x, ids, scores, (-(-counts // expert_alignment) * expert_alignment).tolist(), "handle", None

    def combine(self, x: torch.Tensor, handle: str) -> tuple[object, ...]:
        return x, None, None


def of_dispatchers() -> dict[str, object]:
    w_gate_up, w_down = (torch.randn(E, *size).bfloat16() for size in ((2 * F, D), (D, F)))
    scores, ids = torch.rand(TOKENS, E).topk(TOP_K)
    ids[:3] = -1
    return dict(
        **dict(tokens=torch.randn(TOKENS, D).bfloat16().requires_grad_(), w_gate_up=w_gate_up, w_down=w_down),
        **dict(offs=torch.arange(1, E + 1, dtype=torch.int32) * (TOKENS // E), scores=torch.rand(TOKENS)),
        **dict(dispatcher=(recorded := Recorded(ids, scores)), buffer=recorded, layout=dict(expert_alignment=128)),
    )


def gradients_are_sent_back(names: dict[str, object]) -> None:
    tokens, buffer = names["tokens"], names["buffer"]
    weights = names["w_gate_up"], names["w_down"]
    plain = moe_fp8_ext.experts(tokens.detach(), *buffer.received, *weights, recipe="blockwise")
    assert names["combined"].equal(plain)
    rows = moe_fp8_ext.Quantized(names["q"], names["scale"], "blockwise")
    how = dict(recipe="blockwise", stand_in=names["Dispatch"].apply(tokens, buffer)[2])
    moe_fp8_ext.experts_of_groups(rows, names["offs"], names["scores"], *weights, **how).float().sum().backward()
    assert tokens.grad.equal(buffer.sent_back) and tokens.grad.any()


def leaves_have_gradients(names: dict[str, object]) -> None:
    assert all(names[leaf].grad.isfinite().all() for leaf in ("x", "w_gate_up", "rows"))
    assert names["router"].e_score_correction_bias.any()
    assert list(names["layer"].state_dict()) == [
        *("gate.weight", "gate.e_score_correction_bias", "experts.gate_up_proj", "experts.down_proj"),
        "shared_experts.weight",
    ]
    assert names["y"].shape[1] == D and names["out"].shape == names["x"].shape
    experts, checkpoint = names["layer"].experts, names["checkpoint"]
    assert experts.gate_up_proj[1, F:].equal(checkpoint["1.up_proj.weight"])
    assert experts.down_proj[1].equal(checkpoint["1.down_proj.weight"])


def main_grads_are_added(names: dict[str, object]) -> None:
    assert names["layer"].experts.adds_to_main_grad and names["frozen"].format == "blockwise"
    assert not [*names["experts"].parameters()] and names["experts"].down_proj.q_t is None
    assert names["values"].shape == names["w"].shape and names["y"].shape == (TOKENS, F)
    assert names["delayed"].waiting == 0 and names["w_down"].grad.any()
    assert all(p.equal(q) for p, q in zip(names["moe"].parameters(), names["resumed"].parameters(), strict=True))
    assert names["optimizer"].state[names["resumed"].experts.down_proj]["exp_avg"].any()
    call = names["x"].detach(), names["topk_ids"], names["topk_scores"]
    assert names["again"](*call).equal(names["experts"](*call))


RUN_HERE: dict[str, tuple[Callable[[], dict[str, object]], Callable[[dict[str, object]], None] | None]] = {
    "docs/quickstart.md": (dict, None),
    "docs/recipes.md": (dict, None),
    "docs/layer.md": (of_layer, leaves_have_gradients),
    "docs/dispatchers.md": (of_dispatchers, gradients_are_sent_back),
    "docs/training.md": (of_training, main_grads_are_added),
    "docs/performance.md": (of_performance, None),
    "docs/validate.md": (of_training, None),
}


@pytest.mark.parametrize("page", RUN_HERE)
def test_blocks(page: str) -> None:
    if any("transformers" in code for code in blocks(page)):
        pytest.importorskip("transformers")
    given, check = RUN_HERE[page]
    names = run(page, **given())
    if check:
        check(names)


def train_over_ranks(rank: int, page: str) -> None:
    """Runs the example of docs/ddp.md or docs/fsdp2.md. Ranks with different tokens train the same model."""
    (block,) = blocks("docs/ddp.md") if page == "docs/ddp.md" else blocks("docs/fsdp2.md", "A whole example")
    torch.set_default_device(device())
    torch.manual_seed(rank)
    names: dict[str, object] = {}
    exec(block, names)
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in names["model"].state_dict().values()]
    for t in whole:
        of_ranks = [torch.empty_like(t) for _ in range(2)]
        torch.distributed.all_gather(of_ranks, t)
        assert of_ranks[0].equal(of_ranks[1]) and t.isfinite().all()
    outs = [torch.empty_like(names["out"]) for _ in range(2)]
    torch.distributed.all_gather(outs, names["out"].detach())
    assert not outs[0].equal(outs[1])
    assert page == "docs/fsdp2.md" or names["router"].e_score_correction_bias.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", ["docs/ddp.md", "docs/fsdp2.md"])
def test_examples_over_ranks(page: str, backend: str) -> None:
    in_processes(2, train_over_ranks, page, backend=backend)


@functools.cache
def asked_for() -> set[tuple[str, str | None, str]]:
    """(page, section, language) of every call of `blocks` with literal arguments in a test."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "blocks":
                if all(isinstance(argument, ast.Constant) for argument in node.args):
                    page, *place = [argument.value for argument in node.args]
                    found.add((page, *[*place, None, "python"][: len(place)][:2], *[None, "python"][len(place) :]))
    return found


def test_every_block_has_a_test() -> None:
    missing = []
    for page in PAGES:
        if page in RUN_HERE or page in OWN_TEST or (page, None, "python") in asked_for():
            continue
        sections = (ROOT / page).read_text().split("\n## ")
        names = [section.split("\n")[0] for section in sections if "```python\n" in section]
        missing += [(page, name) for name in names if (page, name, "python") not in asked_for()]
    assert not missing


# ---- Commands --------------------------------------------------------------------------------------------------------

HERE = "run here"
MAKE = "make prints its commands here; what they run has tests"
GPU, NETWORK, MINUTES = "needs a GPU", "needs the network", "takes minutes; CI runs it"
# Every command of the pages, and which test runs it: a test file, one of the first two, or why none does.
COMMANDS = {
    "pip install .": MINUTES,
    "pip install dist/moe_fp8_ext-0.1.0+cu130-py3-none-manylinux_2_28_x86_64.whl": MINUTES,
    'python -c "import moe_fp8_ext; print(moe_fp8_ext.build_info())"': HERE,
    "python examples/grouped_matmul.py": HERE,
    "python examples/moe_layer.py": HERE,
    "python examples/transformers_model.py": HERE,
    "python examples/finetune_transformers.py path/to/model text.txt --implementation moe_fp8 "
    "--out path/to/finetuned": "tests/integrations/test_finetune_transformers.py",
    "python examples/finetune_transformers.py path/to/model text.txt --lora --out path/to/adapter": (
        "tests/integrations/test_finetune_transformers.py"
    ),
    "torchrun --nproc-per-node 2 examples/train_moe_lm.py --ep": "tests/training/test_train_moe_lm.py",
    "torchrun --nproc_per_node 8 -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b "
    "--override.imports moe_fp8_ext.integrations.torchtitan.moe_fp8": "tests/integrations/test_torchtitan.py",
    "torchrun --nproc_per_node 8 -m torchtitan.train --module deepseek_v3 --config deepseek_v3_16b --override.imports "
    """'moe_fp8_ext.integrations.torchtitan.moe_fp8={"recipe": "blockwise"}'""": (
        "tests/integrations/test_torchtitan.py"
    ),
    "torchrun --nproc-per-node 8 pretrain_gpt.py $ARGUMENTS --spec moe_fp8_ext.integrations.megatron rowwise": (
        "tests/integrations/test_megatron.py"
    ),
    "make demo": MAKE,
    'make demo ARGS="--recipes bf16,mxfp8"': MAKE,
    "make bench": MAKE,
    "python -m moe_fp8_ext": "tests/house/test_command_line.py",
    "python -m moe_fp8_ext --check": "tests/house/test_command_line.py",
    "python -m moe_fp8_ext --speed": "tests/house/test_command_line.py",
    "python -m moe_fp8_ext --check --json": "tests/house/test_command_line.py",
    "python -m moe_fp8_ext --check --speed > report.txt 2>&1": GPU,
    "python bench/profile_layer.py --out bench/results/profile.json": GPU,
    "python bench/report.py": "tests/house/test_house.py",
    # Of CONTRIBUTING.md
    'make test ARGS="tests/ops/test_numerics.py tests/ops/test_format.py tests/ops/test_quantize.py"': MAKE,
    "sed -i '/const bool second = /d; /^\\/\\/ second: /d' csrc/quantize/types.h csrc/cpu/quantize{.cpp,_parts.h}": (
        "changes the sources"
    ),
    "sed -i 's/\\bbool second\\b/Rounding rounding/; s/\\bsecond\\b/rounding/g' csrc/cpu/quantize{.cpp,_parts.h}": (
        "changes the sources"
    ),
    ".ci/run": MINUTES,
    "make build": MAKE,
    "make test": MAKE,
    'make test ARGS="-k quantize_rows -x"': MAKE,
    "make fuzz": MAKE,
    "make wheel": MAKE,
    "make kernel-hub": MAKE,
    "python tests/toolchain/wheel_check.py": MINUTES,
    '.venv/bin/pip install --no-build-isolation -e ".[torchtitan]"': NETWORK,
    "make lint": MAKE,
    "make docs": MAKE,
    'make bench ARGS="-k quantize_both zipf"': MAKE,
    'make bench ARGS="-k router --again FILE"': MAKE,
    "python bench/compare.py before.json after.json": "tests/house/test_bench.py",
    "python bench/titan.py": "tests/integrations/test_torchtitan.py",
    "python bench/finetune.py --impl ours": "tests/integrations/test_bench_finetune.py",
    "python bench/finetune_losses.py --out bench/results/finetune_losses.json": (
        "tests/integrations/test_bench_finetune.py"
    ),
    "python bench/corpus.py --out corpus.pt": "tests/training/test_pretrain.py",
    "python bench/pretrain.py --corpus corpus.pt --recipe rowwise --out rowwise.json": (
        "tests/training/test_pretrain.py"
    ),
    "python bench/mcore.py": "tests/integrations/test_megatron.py",
    "python bench/beside.py --out bench/results/beside.json": GPU,
    "torchrun --nproc-per-node 2 bench/expert_parallel.py --out bench/results/expert_parallel.json": GPU,
    "python tests/toolchain/cuda_check.py": "tests/house/test_toolchain_checks.py",
    "python tests/toolchain/hip_check.py": "tests/house/test_toolchain_checks.py",
    "python tests/toolchain/every_kernel.py": GPU,
    "python tests/toolchain/sanitize.py racecheck --seconds 600": GPU,
    "python bench/host.py": "tests/house/test_bench.py",
    "python bench/stats.py --out bench/results/stats.json": GPU,
    "python bench/adapters.py --out bench/results/adapters.json": GPU,
    "python bench/shared_experts.py --out bench/results/shared_experts.json": "tests/house/test_bench.py",
    "python bench/decode.py --out bench/results/decode.json": "tests/house/test_bench.py",
    "python bench/whole_models.py --out bench/results/whole_models.json": (
        "tests/integrations/test_bench_whole_models.py"
    ),
    "python bench/underflow.py --out docs/stats.png": "takes minutes",
}


def commands(page: str) -> list[str]:
    """Every command of a page: the lines of its bash blocks, and the first column of a table of commands."""
    text = (ROOT / page).read_text()
    lines = [line for block in blocks(page, None, "bash") for line in block.replace("\\\n", " ").splitlines()]
    tables = re.findall(r"^\| command \|.*?\n\n", text, re.M | re.S)
    lines += [line for table in tables for line in re.findall(r"^\| `([^`]+)` \|", table, re.M)]
    return [re.sub(r"\s+", " ", re.sub(r"\s+#.*$", "", line)).strip() for line in lines if line.strip()]


def test_every_command_is_listed() -> None:
    found = {command for page in PAGES for command in commands(page)}
    assert found == set(COMMANDS)
    tests = {how for how in COMMANDS.values() if how.startswith("tests/")}
    assert all((ROOT / path).exists() for path in tests)


def test_scripts_know_the_options_that_pages_give_them() -> None:
    for command in COMMANDS:
        words = shlex.split(command)
        scripts = [word for word in words if re.fullmatch(r"(?:examples|bench|tests)/[\w/]+\.py", word)]
        for script in scripts:
            text = (ROOT / script).read_text()
            for word in words[words.index(script) :]:
                assert not word.startswith("--") or f'"{word}"' in text, command


@pytest.mark.parametrize("command", [command for command, how in COMMANDS.items() if how == MAKE])
def test_make_knows(command: str) -> None:
    """With SYSTEM_SITE=1, because otherwise make would first create a virtual environment, even with --dry-run."""
    words = shlex.split(command.split(" > ")[0])
    system = ["SYSTEM_SITE=1", f"PYTHON={sys.executable}"]
    found = subprocess.run([*words, *system, "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    scripts = re.findall(r"(?<![\w/])(?:examples|bench|tests|build_backend)/[\w/]+\.py|setup\.py", found.stdout)
    assert all((ROOT / script).exists() for script in scripts)
    for argument in words[2:]:
        assert not argument.startswith("ARGS=") or argument.removeprefix("ARGS=") in found.stdout


@pytest.mark.parametrize("name", ["grouped_matmul", "moe_layer", "transformers_model"])
def test_examples(name: str, capsys: pytest.CaptureFixture) -> None:
    """Each prints a row for every recipe. FP8 is near BF16, and is not BF16."""
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) < 100
    if name == "transformers_model":
        pytest.importorskip("transformers")
    runpy.run_path(str(path), run_name="__main__")
    *_, rows = re.split(r"\n +(?:recipe|experts) .*\n", capsys.readouterr().out)
    base, *others = [[float(cell.rstrip("%")) for cell in row.split()[1:]] for row in rows.splitlines()]
    assert len(others) >= 2 and len(base) >= 2
    for row in others:
        if name == "grouped_matmul":
            # E4M3 rounds by 2^-4 at most, by 2^-4 / sqrt(3) in the root mean square for numbers below a power of two,
            # and by less above it; a product of two such operands has sqrt(2) of that.
            assert all(0 < error < 100 * 2**-4 * (2 / 3) ** 0.5 for error in row)
        else:
            assert row != base and row[-1] < 0.7 * row[0]
            assert row[-1] == pytest.approx(base[-1], rel=0.05)


def test_build_info_command(capsys: pytest.CaptureFixture) -> None:
    (command,) = [command for command in COMMANDS if command.startswith("python -c ")]
    exec(shlex.split(command)[2], {})
    assert "scaled_grouped_mm" in capsys.readouterr().out


# ---- Links and the API reference -------------------------------------------------------------------------------------

LINK = re.compile(r"\[[^\[\]]*\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")


@functools.cache
def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    heads = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", [*PAGES, *OTHERS])
def test_links(page: str) -> None:
    path = ROOT / page
    for target, anchor in LINK.findall(re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)):
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def test_every_page_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1].split("\nvalidation:")[0]
    assert {p.removeprefix("docs/") for p in PAGES if p.startswith("docs/")} <= set(
        re.findall(r": (\S+\.md)$", nav, re.M)
    )


def test_the_reference_has_every_public_name() -> None:
    text = "".join(p.read_text() for p in (ROOT / "docs" / "api").glob("*.md"))
    named = set(re.findall(r"^::: moe_fp8_ext\.([\w.]+)$", text, re.M))
    assert set(moe_fp8_ext.__all__) - {"build_info"} <= named and "## build_info" in text
    assert "ops" in named and set(ops.__all__) <= set(dir(ops))
    for name in named:
        found: object = moe_fp8_ext
        module, _, attribute = name.rpartition(".")
        if module:
            path = ROOT / "moe_fp8_ext" / f"{module.replace('.', '/')}.py"
            if path.exists():  # read, not imported: integrations need their frameworks
                assert re.search(rf"^(?:def|class) {attribute}\b", path.read_text(), re.M), name
                continue
            found = importlib.import_module(f"moe_fp8_ext.{module}")
        assert hasattr(found, attribute), name


def test_first_screen_of_the_readme() -> None:
    """Installation, the change to make, both pictures and the table are on the first 45 lines."""
    lines = (ROOT / "README.md").read_text().splitlines()[:45]
    text = "\n".join(lines)
    for part in ("pip install", "Requirements", "experts_implementation", "layer_speed.png", "layer_memory.png"):
        assert part in text
    assert sum(line.startswith("|") for line in lines[: lines.index("<!-- figures: end -->")]) == 2 + 5
