"""The tools that check the kernels find what they are meant to find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "toolchain"))
import cuda_check  # noqa: E402
import hip_check  # noqa: E402
import isa_report  # noqa: E402
from simt_kernels import SIMT, compile_cxx  # noqa: E402

# ---- SIMT emulation --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("faults") / "faults"
    compile_cxx(SIMT / "faults.cpp", "-ldl", "-o", program, wave=64)
    return program


@pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads Linux' ELF structures")
@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("sum of a wave", r"ok 40"),
        ("sum of 32 lanes", r"ok 20"),  # half of what the author of a CUDA-only reduction wanted
        ("blocks wait for one another", r"ok 28"),
        ("more cooperative blocks than fit", r"error 720: cooperative grid 100,1,1.* on 2 multiprocessors"),
        ("wait without end", r"error 719: no end in sight"),
        ("divergent barrier", r"error 719: a thread returned while others wait in __syncthreads at faults.cpp:\d+ "),
        (
            "two barriers",
            r"error 719: divergence: __syncthreads at faults.cpp:(\d+) while others .*faults.cpp:(?!\1\b)\d+",
        ),
        ("barrier after exit", r"error 719: a thread returned while others wait in __syncthreads"),
        ("shuffle after exit", r"error 719: __shfl at faults.cpp:\d+ after 1 of its threads returned .*thread 1,0,0"),
        (
            "barrier and shuffle",
            r"error 719: deadlock: (?=.*65 threads wait in __sync)(?=.*63 threads wait in __shfl)",
        ),
        (
            "beyond dynamic shared memory",
            r"error 719: access beyond the 512 bytes of dynamic shared mem.*thread 2,0,0",
        ),
        ("misaligned vector", r"error 719: undefined behaviour"),
        ("uninitialised shared memory", r"ok cdcdcdcd"),
    ],
)
def test_emulation(faults, case, outcome):
    environment = {**os.environ, "SIMT_TIMEOUT": "1" if case == "wait without end" else "60"}
    done = subprocess.run([faults, case], capture_output=True, text=True, timeout=120, env=environment)
    assert re.match(outcome, done.stdout), done


# ---- Compile checks --------------------------------------------------------------------------------------------------

BF16_TO = "_ZN7moe_fp823quantize_rowwise_kernelINS_4BF16ELNS_7Fp8TypeE{}ELi1ELb1EEEvNS_21QuantizeRowwiseParamsE"
AMD_LOAD, AMD_CAST = "global_load_dwordx4 v[0:3], v4, s[0:1]", "v_cvt_pk_fp8_f32 v0, v1, v2"


def amd_assembly(symbol: str, *instructions: str, vgpr_spills: int = 0, sgpr_spills: int = 0, scratch: int = 0) -> str:
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
    .vgpr_count:     84
    .vgpr_spill_count: {vgpr_spills}
amdhsa.version:
  - 1
  - 2
"""


@pytest.mark.parametrize(
    ("assembly", "arch", "problems"),
    [
        (amd_assembly(BF16_TO.format(0), AMD_LOAD, AMD_CAST), "gfx950", []),
        (amd_assembly(BF16_TO.format(0), AMD_LOAD, AMD_CAST, vgpr_spills=3), "gfx950", ["3 vgpr spills"]),
        (amd_assembly(BF16_TO.format(0), AMD_LOAD, AMD_CAST, sgpr_spills=2), "gfx950", []),
        (amd_assembly(BF16_TO.format(0), AMD_LOAD, AMD_CAST, scratch=32), "gfx950", ["32 bytes of scratch"]),
        (amd_assembly(BF16_TO.format(0), AMD_LOAD, AMD_CAST, "s_swappc_b64 s[4:5], s[6:7]"), "gfx950", ["1 calls"]),
        (amd_assembly(BF16_TO.format(0), "global_load_dword v0, v1, s[0:1]", AMD_CAST), "gfx950", ["no vector loads"]),
        (amd_assembly(BF16_TO.format(0), AMD_LOAD), "gfx950", ["no E4M3FN conversion instructions"]),
        (amd_assembly(BF16_TO.format(0), AMD_LOAD), "gfx942", []),  # in software there
        (amd_assembly(BF16_TO.format(3), AMD_LOAD, AMD_CAST), "gfx942", ["no E5M2FNUZ conversion instructions"]),
        (amd_assembly("_Z14unknown_kernelv"), "gfx942", ["no rule in isa_report.py says what it must contain"]),
    ],
)
def test_hip_check(assembly, arch, problems):
    (kernel,) = hip_check.parse(assembly, arch)
    assert (kernel.registers, kernel.shared, kernel.problems) == (84, 384, problems)
    assert isa_report.print_report([kernel], "vgpr") == bool(problems)


def ptxas_log(symbol: str, stack: int = 0, spills: int = 0) -> str:
    return f"""ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{symbol}' for 'sm_90a'
ptxas info    : Function properties for {symbol}
    {stack} bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads
ptxas info    : Used 62 registers, used 1 barriers, 128 bytes smem
"""


PTX_LOAD = "ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd1];"
PTX_CAST = "cvt.rn.satfinite.e4m3x2.f32 %rs1, %f1, %f2;"
SASS_LOAD = "LDG.E.NA.128.CONSTANT R4, desc[UR4][R2.64]"
SASS_CAST = "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R0, R1, R2, RZ"


@pytest.mark.parametrize(
    ("log", "body", "problems"),
    [
        (ptxas_log("s"), [PTX_LOAD, PTX_CAST], []),
        (ptxas_log("s", stack=16), [PTX_LOAD, PTX_CAST], ["16 bytes of stack"]),
        (ptxas_log("s", spills=8), [PTX_LOAD, PTX_CAST], ["16 bytes of spills"]),
        (ptxas_log("s"), ["ld.global.u16 %rs1, [%rd1];", PTX_CAST], ["no vector loads"]),
        (ptxas_log("s"), [PTX_LOAD], ["no E4M3FN conversion instructions"]),
        (ptxas_log("s"), [SASS_LOAD, SASS_CAST], []),
        (ptxas_log("s"), ["LDG.E.U16 R4, desc[UR4][R2.64]", SASS_CAST], ["no vector loads"]),
        (ptxas_log("s"), [SASS_LOAD], ["no E4M3FN conversion instructions"]),
    ],
)
def test_cuda_check(log, body, problems):
    symbol, text = BF16_TO.format(0), "\n".join(body)
    if "ld.global" in text:
        patterns, bodies = cuda_check.PTX, cuda_check.ptx_bodies(f".visible .entry {symbol}(\n)\n{{{text}}}")
    else:
        patterns, bodies = cuda_check.SASS, cuda_check.sass_bodies(f"\t\tFunction : {symbol}\n{text}")
    (kernel,) = cuda_check.judge(log.replace("'s'", f"'{symbol}'"), "sm_90a", bodies, patterns)
    assert (kernel.name, kernel.registers, kernel.shared) == ("quantize_rowwise_kernel<BF16, E4M3FN, 1, true>", 62, 128)
    assert kernel.problems == problems


def test_formats_are_in_the_order_of_the_enum():
    text = (isa_report.CSRC / "numerics" / "formats.h").read_text()
    names = re.search(r"enum class Fp8Type.*?\{(.*?)\}", text, re.S)[1]
    assert tuple(re.findall(r"k(\w+)", names)) == isa_report.FORMATS


def test_a_check_that_saw_no_kernel_fails():
    assert isa_report.print_report([], "vgpr") == 1
