"""The compile checks of both vendors report every problem that a compiler's output shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
import cache  # noqa: E402
import cuda_check  # noqa: E402
import every_kernel  # noqa: E402
import hip_check  # noqa: E402
import isa_report  # noqa: E402
import sanitize  # noqa: E402

from build_backend.environment import DEFAULT_ARCHS  # noqa: E402

TYPES = "NS_10VectorizedINS_4BF16ELNS_10Fp8VariantE0EEE"
FAST = f"_ZN7moe_fp820quantize_rows_kernelI{TYPES}Li2ELNS_3RowE0EEEvNS_8RowsPlanE"
EITHER = FAST.replace("4BF16", "3F32").replace("VariantE0", "VariantE2")
GENERIC = "_ZN7moe_fp820quantize_rows_kernelINS_7GenericELi1ELNS_3RowE1EEEvNS_8RowsPlanE"
BLOCKS = f"_ZN7moe_fp826quantize_row_blocks_kernelILNS_10ScaleOrderE2E{TYPES}EEvNS_13RowBlocksPlanE"
GEMM_TRAITS = "NS0_6TraitsILNS0_6ScalesE0ELNS0_7GroupedE0ELNS_7Fp8TypeE0ENS0_5StoreEEE"
GEMM = f"_ZN7moe_fp84sm9019grouped_gemm_kernelI{GEMM_TRAITS}EEvNT_10KernelArgsE"
GEMM_MX = GEMM.replace("ScalesE0", "ScalesE4")
MMA = "_ZN7moe_fp83mma10mma_kernelINS0_6TraitsILNS0_5TypesE0ELi32ENS_8UnscaledEEEEEvNS_21ScaledGroupedMmParamsE"
MMA_SCALED, MMA_TABLES = MMA.replace("8Unscaled", "6Scaled"), MMA.replace("TypesE0", "TypesE2")
AMD_LOAD, AMD_CAST = "global_load_dwordx4 v[0:3], v4, s[0:1]", "v_cvt_pk_fp8_f32 v0, v1, v2"
AMD_HALF, NEITHER = AMD_LOAD.replace("x4", "x2"), ["no 16-byte loads", "no matrix instructions"]
AMD_MMA, TOO_MANY = "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[4:5], v[6:7], v[0:3]", "257 registers, more than 256"
AMD_MMA_SCALED = "v_mfma_scale_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3], v20, v21 op_sel_hi:[0,0,0]"


def amd_assembly(
    symbol: str, *instructions: str, vgpr_spills: int = 0, sgpr_spills: int = 0, scratch: int = 0, registers: int = 84
) -> str:
    body = "\n".join(f"\t{i}" for i in instructions)
    return f"""
{symbol}:
{body}
.Lfunc_end0:
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .offset:         0
        .size:           168
    .group_segment_fixed_size: 384
    .name:           {symbol}
    .private_segment_fixed_size: {scratch}
    .sgpr_spill_count: {sgpr_spills}
    .symbol:         {symbol}.kd
    .vgpr_count:     {registers}
    .vgpr_spill_count: {vgpr_spills}
amdhsa.version:
  - 1
  - 2
"""


@pytest.mark.parametrize(
    ("assembly", "problems"),
    [
        (amd_assembly(FAST, AMD_LOAD, AMD_CAST), []),
        (amd_assembly(FAST, AMD_LOAD, AMD_CAST, vgpr_spills=3), ["3 vgpr spills"]),
        (amd_assembly(FAST, AMD_LOAD, AMD_CAST, sgpr_spills=2), []),
        (amd_assembly(FAST, AMD_LOAD, AMD_CAST, scratch=32), ["32 bytes of scratch"]),
        (amd_assembly(FAST, AMD_LOAD, AMD_CAST, "s_swappc_b64 s[4:5], s[6:7]"), ["1 calls"]),
        (amd_assembly(FAST, "global_load_dword v0, v1, s[0:1]", AMD_CAST), ["no vector loads"]),
        (amd_assembly(FAST, AMD_LOAD), ["no E4M3 casts"]),
        (amd_assembly(EITHER, AMD_LOAD, AMD_CAST), ["no E5M2 casts"]),
        (amd_assembly(GENERIC), []),
        (amd_assembly(GENERIC, vgpr_spills=1), ["1 vgpr spills"]),
        (amd_assembly("_Z14unknown_kernelv"), ["isa_report.py does not list it"]),
    ],
)
def test_hip_check(assembly, problems):
    (kernel,) = hip_check.parse(assembly, "gfx942")
    assert (kernel.registers, kernel.shared, kernel.problems) == (84, 384, problems)
    assert isa_report.print_report([kernel], "vgpr") == bool(problems)


@pytest.mark.parametrize(
    ("arch", "symbol", "instructions", "registers", "problems"),
    [
        *(("gfx950", MMA_SCALED, [AMD_LOAD, AMD_MMA_SCALED], 256 + n, [TOO_MANY] * n) for n in (0, 1)),
        ("gfx950", MMA_SCALED, [AMD_LOAD, AMD_MMA], 256, ["no matrix instructions that take scales"]),
        *(("gfx942", MMA_SCALED, [AMD_HALF] * n, 9, ["vector loads in a kernel that never runs"] * n) for n in (0, 1)),
        *(("gfx942", name, [AMD_LOAD, AMD_MMA], 257, bad) for name, bad in ((MMA, [TOO_MANY]), (MMA_TABLES, []))),
        *((arch, MMA, [AMD_HALF, AMD_MMA_SCALED], 256, NEITHER) for arch in hip_check.ARCHS),
    ],
)
def test_hip_check_of_matrices(arch, symbol, instructions, registers, problems):
    (kernel,) = hip_check.parse(amd_assembly(symbol, *instructions, registers=registers), arch)
    assert kernel.problems == problems


def ptxas_log(symbol: str, arch: str = "sm_90a", stack: int = 0, spills: int = 0, waits: int = 0) -> str:
    wait = "ptxas info    : (C7517) warpgroup.wait is injected in around line 143 by compiler to allow use of registers"
    return (
        waits * f"{wait} defined by GMMA in function '{symbol}'\n"
        + f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{symbol}' for '{arch}'
ptxas info    : Function properties for {symbol}
    {stack} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used 62 registers, used 1 barriers, 128 bytes smem
"""
    )


ARCHS = [f"sm_{arch}" for arch in DEFAULT_ARCHS["cuda"].split(";")]
PTX_LOAD = "ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];"
PTX_CAST = "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;"
PTX_SCALE = "cvt.rp.satfinite.ue8m0x2.f32 %rs1, %f1, %f2;"
PTX_MMA = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6};"
PTX_WGMMA = "wgmma.mma_async.sync.aligned.m64n128k32.f32.{0}.{0} {{%f1, %f2}}, %rd1, %rd2, p, 1, 1;"
PTX_BOX = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r4];"
)
SASS_LOAD = "LDG.E.NA.128.CONSTANT R4, desc[UR4][R2.64]"
SASS_CAST = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R0, R1, R2, RZ"
SASS_GEMM = ["QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR28], R24", "UTMALDG.2D.MULTICAST [UR8], [UR16], UR6"]
HGMMA = "HGMMA.64x256x16.F32.BF16 R24, R20, gdesc[UR4], R24"
NO_FP8 = "no FP8 wgmma instructions"


@pytest.mark.parametrize(
    ("log", "body", "problems"),
    [
        (ptxas_log(FAST), [PTX_LOAD, PTX_CAST], []),
        (ptxas_log(FAST, stack=16), [PTX_LOAD, PTX_CAST], ["16 bytes of stack"]),
        (ptxas_log(FAST, spills=8), [PTX_LOAD, PTX_CAST], ["16 bytes of spills"]),
        (ptxas_log(FAST), ["ld.global.u16 %rs1, [%rd1];", PTX_CAST], ["no vector loads"]),
        (ptxas_log(FAST), [PTX_LOAD], ["no E4M3 casts"]),
        (ptxas_log(FAST), [SASS_LOAD, SASS_CAST], []),
        (ptxas_log(FAST), ["LDG.E.U16 R4, desc[UR4][R2.64]", SASS_CAST], ["no vector loads"]),
        (ptxas_log(FAST), [SASS_LOAD], ["no E4M3 casts"]),
        (ptxas_log(GENERIC), ["ld.global.u16 %rs1, [%rd1];"], []),
        (ptxas_log(GENERIC, spills=4), ["ld.global.u16 %rs1, [%rd1];"], ["8 bytes of spills"]),
        (ptxas_log(BLOCKS), [PTX_LOAD, PTX_CAST], []),
        (ptxas_log(BLOCKS, "sm_100a"), [PTX_LOAD, PTX_CAST], ["no E8M0 casts"]),
        (ptxas_log(BLOCKS, "sm_100a"), [PTX_LOAD, PTX_CAST, PTX_SCALE], []),
        (ptxas_log(BLOCKS, "sm_120"), [PTX_LOAD, PTX_CAST], []),
        (ptxas_log(BLOCKS, "sm_120a"), [PTX_LOAD, PTX_CAST], ["no E8M0 casts"]),
        (ptxas_log(FAST, "sm_80"), [PTX_LOAD], []),
        (ptxas_log(FAST, "sm_80"), [PTX_CAST], ["no vector loads"]),
        (ptxas_log(FAST, "sm_89"), [PTX_LOAD], ["no E4M3 casts"]),
        *((ptxas_log(MMA, arch), [PTX_LOAD, PTX_MMA], []) for arch in ARCHS),
        *((ptxas_log(MMA, arch), [PTX_LOAD], ["no matrix instructions"]) for arch in ARCHS),
        (ptxas_log(GEMM), SASS_GEMM, []),
        *((ptxas_log(name), [HGMMA, SASS_GEMM[1]], bad) for name, bad in ((GEMM_MX, []), (GEMM, [NO_FP8]))),
        (ptxas_log(GEMM), [PTX_WGMMA.format("e4m3"), PTX_BOX], []),
        (ptxas_log(GEMM), [PTX_WGMMA.format("bf16"), PTX_BOX], [NO_FP8]),
        (ptxas_log(GEMM_MX), [PTX_WGMMA.format("bf16"), PTX_BOX], []),
        (ptxas_log(GEMM_MX), [PTX_WGMMA.format("e5m2"), PTX_BOX], ["no BF16 wgmma instructions"]),
        (ptxas_log(GEMM, waits=2), SASS_GEMM, ["2 waits between wgmma instructions"]),
        (ptxas_log(GEMM), [*SASS_GEMM, "FFMA R0, R24, R191.reuse, R9", "FFMA R207, R25.reuse, R192, R207"], []),
        (
            ptxas_log(GEMM),
            [*SASS_GEMM, "FFMA R206, R24, R190.reuse, R206"],
            ["1 FFMAs of one register bank"],
        ),
        (ptxas_log(GEMM), SASS_GEMM[1:], [NO_FP8]),
        (ptxas_log(GEMM), SASS_GEMM[:1], ["no TMA copies"]),
        (ptxas_log(GEMM, "sm_100a"), ["EXIT"], []),
    ],
)
def test_cuda_check(log, body, problems):
    symbol, arch = re.search(r"'(\w+)' for '(\w+)'", log).groups()
    text = "\n".join(body)
    if "%r" in text:  # PTX names registers so
        patterns, bodies = cuda_check.PTX, cuda_check.ptx_bodies(f".visible .entry {symbol}(\n)\n{{{text}}}")
    else:
        patterns, bodies = cuda_check.SASS, cuda_check.sass_bodies(f"\t\tFunction : {symbol}\n{text}")
    (kernel,) = cuda_check.judge(log, arch, bodies, patterns)
    assert (kernel.registers, kernel.shared, kernel.problems) == (62, 128, problems)


def test_names_of_kernels():
    names = isa_report.short_names([FAST, GENERIC, BLOCKS])
    assert list(names.values()) == [
        "quantize_rows_kernel<Vectorized<BF16, (Fp8Variant)0>, 2, (Row)0>",
        "quantize_rows_kernel<Generic, 1, (Row)1>",
        "quantize_row_blocks_kernel<(ScaleOrder)2, Vectorized<BF16, (Fp8Variant)0> >",
    ]


def test_enums_are_in_the_order_that_names_of_kernels_have():
    types = (cache.CSRC / "quantize" / "types.h").read_text()
    kinds = re.search(r"enum class Fp8Variant \{(.*?)\}", types)[1].split(", ")
    assert [k.strip() for k in kinds] == ["kE4M3", "kE5M2", "kRuntime"]
    formats = (cache.CSRC / "numerics" / "format.h").read_text()
    assert "enum class ScaleType : int { kF32, kE8M0 }" in formats
    assert "enum class ScaleOrder : int { kRowMajor, kColumnMajor, kBlocked }" in formats
    products = (cache.CSRC / "gemm" / "sm90" / "args.h").read_text()
    assert "enum class Scales { kRows, kRowsPromoted, kBlocks, kSquares, kMx }" in products


def test_every_kernel_is_known():
    """isa_report.py lists every kernel that does not quantize, and no other name."""
    sources = "".join(p.read_text() for p in cache.CSRC.rglob("*") if p.suffix in (".h", ".cu"))
    kernels = set(re.findall(r"\b(\w+_kernel)\(MOE_GRID_CONSTANT", sources))
    assert kernels == {name for name in kernels if name.startswith("quantize_")} | isa_report.LOADS_VECTORS.keys()


def test_a_check_without_kernels_fails():
    assert isa_report.print_report([], "vgpr") == 1


def test_processes_divide_the_calls_of_every_kernel(tmp_path):
    queue = tmp_path / "queue"
    queue.write_text("0")
    one, other = every_kernel.turns(queue, 7), every_kernel.turns(queue, 7)
    first = [next(one), next(other), next(one)]
    assert first == [0, 1, 2]
    assert [*other, *one] == [3, 4, 5, 6]
    assert [*every_kernel.turns(None, 3)] == [0, 1, 2]


def test_words_select_calls_of_every_kernel():
    calls = every_kernel.selected({"quantize_weight", "expand_scales"}, {"rowwise"})
    assert {name.split()[0] for name, *_ in calls} == {"quantize_weight", "expand_scales"}
    assert not any("rowwise" in name for name, *_ in calls)
    sizes = [every_kernel.elements(call) for call in calls]
    assert sizes == sorted(sizes)


def test_reports_of_a_sanitizer_are_counted_by_kernel():
    race = "Error: Race reported between Write access at void moe_fp8::tiles_kernel<moe_fp8::Types>"
    output = f"""========= COMPUTE-SANITIZER
call 3 of 9: quantize_rows rowwise [(300, 272)]
========= {race}+0x1c70
=========     and Read access at void moe_fp8::tiles_kernel<moe_fp8::Types>+0x1d0 [16 hazards]
=========
========= {race}+0x1d80
=========     and Read access at void moe_fp8::tiles_kernel<moe_fp8::Types>+0x1d0 [8 hazards]
========= Barrier error detected. Divergent thread(s) in warp.
=========     at void moe_fp8::rows_kernel<moe_fp8::Types>+0x990
=========     by thread (2,0,0) in block (0,0,0)
call 3 took 1.50 s
call 5 of 9: quantize_rows mxfp8 [(300, 272)]
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
========= ERROR SUMMARY: 3 errors
"""
    barrier = "Barrier error detected. Divergent thread(s) in warp.: moe_fp8::rows_kernel<moe_fp8::Types>"
    assert sanitize.reports(output) == {race: 2, barrier: 1}
    begun, ended = sanitize.calls_of(output)
    assert begun == {3: "quantize_rows rowwise [(300, 272)]", 5: "quantize_rows mxfp8 [(300, 272)]"}
    assert ended == {3: 1.5}
    assert not sanitize.reports("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n")
