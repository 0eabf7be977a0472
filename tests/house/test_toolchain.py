"""The tools that build and check the kernels: the emulation, the choice of architectures, the cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
import cache  # noqa: E402
import compile_cached  # noqa: E402
from simt_library import CXX, RUNTIME, SIMT, compile_cxx  # noqa: E402

from build_backend.environment import DEFAULT_ARCHS, choose_archs  # noqa: E402

# ---- SIMT emulation --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("faults") / "faults"
    compile_cxx(SIMT / "faults.cpp", RUNTIME, "-ldl", "-o", program, wave=64)
    return program


@pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads Linux' ELF structures")
@pytest.mark.parametrize(
    ("case", "outcome"),
    [
        ("sum of a wave", r"ok 40"),
        ("sum of 32 lanes", r"ok 20"),  # half of the wave: a reduction written for CUDA alone loses the rest
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


# ---- Chips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("macros", "multiplies"),
    [
        ("__CUDA_ARCH__=750", False),
        ("__CUDA_ARCH__=800", True),
        ("__HIP_DEVICE_COMPILE__ __gfx90a__ __GFX9__", False),
        ("__HIP_DEVICE_COMPILE__ __gfx1201__ __GFX12__", False),
        ("__HIP_DEVICE_COMPILE__ __gfx950__ __GFX9__", True),
        ("__HIP_DEVICE_COMPILE__ __gfx942__ __GFX9__", True),
    ],
)
def test_a_chip_that_would_multiply_to_zeros_is_no_target(macros, multiplies):
    defined = [f"-D{macro}" for macro in macros.split()]
    command = [*CXX, "-E", *defined, f"-I{cache.CSRC}", str(cache.CSRC / "platform" / "mma.h")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode == 0) == multiplies and ("sm_80 and newer" in run.stderr) != multiplies


# ---- Architectures of a build ----------------------------------------------------------------------------------------


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of commands in PATH that describe a machine: a compiler, and no GPU until a test adds one."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for variable in ("MOE_FP8_CUDA_ARCHS", "MOE_FP8_ROCM_ARCHS"):
        monkeypatch.delenv(variable, raising=False)
    says(tmp_path / "nvcc", *(f"sm_{n}" for n in (75, 80, 86, 89, 90, 100, 103, 120)))
    says(tmp_path / "nvidia-smi")
    says(tmp_path / "rocm_agent_enumerator", "gfx000")
    return tmp_path


def says(tool: Path, *words: str) -> None:
    tool.write_text("#!/bin/sh\n" + "".join(f"echo {word}\n" for word in words))
    tool.chmod(0o755)


@pytest.mark.parametrize(
    ("backend", "asked"), [("cuda", "90a"), ("cuda", "90a;100a"), ("cuda", "86;103a;120f"), ("rocm", "gfx950;gfx942")]
)
def test_architectures_from_the_environment(tools, monkeypatch, backend, asked):
    monkeypatch.setenv(f"MOE_FP8_{backend.upper()}_ARCHS", asked)
    assert choose_archs(backend, str(tools / "nvcc"))[0] == asked


@pytest.mark.parametrize(
    ("backend", "asked", "message"),
    [
        ("cuda", "90;100a", "MOE_FP8_CUDA_ARCHS must name Hopper as 90a, .* got 90 in 90;100a"),
        ("cuda", "75;80", "MOE_FP8_CUDA_ARCHS must name architectures from 80 on, got 75 of 75;80"),
        ("cuda", "hopper", "must name architectures from 80 on, got hopper of hopper"),
        ("cuda", "90a;130", "nvcc does not know 130 of 90a;130"),
        (
            "rocm",
            "gfx942;gfx1100",
            "MOE_FP8_ROCM_ARCHS must name some of gfx942, gfx950, got gfx1100 of gfx942;",
        ),
    ],
)
def test_refused_architectures(tools, monkeypatch, backend, asked, message):
    monkeypatch.setenv(f"MOE_FP8_{backend.upper()}_ARCHS", asked)
    with pytest.raises(SystemExit, match=message):
        choose_archs(backend, str(tools / "nvcc"))


def test_architectures_of_the_machine(tools):
    assert choose_archs("cuda", str(tools / "nvcc"))[0] == DEFAULT_ARCHS["cuda"]
    assert choose_archs("rocm", "hipcc")[0] == DEFAULT_ARCHS["rocm"]
    says(tools / "nvidia-smi", "9.0", "7.5", "8.9", "9.0")
    says(tools / "rocm_agent_enumerator", "gfx000", "gfx942", "gfx1036", "gfx942")  # a CPU and its graphics
    assert (choose_archs("cuda", str(tools / "nvcc"))[0], choose_archs("rocm", "hipcc")[0]) == ("89;90a", "gfx942")


@pytest.mark.parametrize(
    ("backend", "tool", "gpu", "arch"),
    [("cuda", "nvidia-smi", "7.5", "75"), ("rocm", "rocm_agent_enumerator", "gfx90a", "gfx90a")],
)
def test_a_machine_with_unsupported_gpus(tools, backend, tool, gpu, arch):
    says(tools / tool, gpu)
    with pytest.raises(SystemExit, match=f"but this machine has {arch}: .*MOE_FP8_{backend.upper()}_ARCHS to build"):
        choose_archs(backend, str(tools / "nvcc"))


# ---- The cache -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source in csrc/ that includes one header through another, and a compiler that records its runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "root"
    for module in (cache, compile_cached):
        monkeypatch.setattr(module, "ROOT", root)
        monkeypatch.setattr(module, "CSRC", root / "csrc")
    texts = {"a/k.cu": '#include "b/h.h"\n', "b/h.h": '#include "i.h"\n', "b/i.h": "1\n", "b/other.h": "1\n"}
    for name, text in texts.items():
        file = root / "csrc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    compiler = root / "compiler"
    compiler.write_text(
        """#!/bin/sh
        if [ "$1" = --version ]; then echo 1; exit; fi
        echo ran >> "$(dirname "$0")/runs"
        echo "warning: here"; echo "ptxas info    : Used 3 registers"
        while [ $# -gt 0 ]; do case $1 in
          -o) echo object > "$2";;
          -MF) echo "k.o: $(dirname "$0")/csrc/a/k.cu" > "$2";;
          --keep-dir) echo ptx > "$2/k.ptx";;
        esac; shift; done
        [ ! -e "$(dirname "$0")/broken" ]"""
    )
    compiler.chmod(0o755)
    return root


def compile_one(tree: Path, *flags: str) -> int:
    """Compiles the source and returns how often the compiler ran."""
    (tree / "runs").write_text("")
    outputs = ["-MF", str(tree / "k.o.d"), "-o", str(tree / "k.o")]
    command = [str(tree / "compiler"), *flags, "-MD", "-MT", "k.o", "-c", str(tree / "csrc" / "a" / "k.cu"), *outputs]
    assert compile_cached.main(command) == 0
    assert (tree / "k.o").read_text() == "object\n"
    assert (tree / "k.o.d").read_text() == f"k.o: {tree}/csrc/a/k.cu\n"
    return (tree / "runs").read_text().count("ran")


def test_cache_compiles_what_changed(tree, capfd):
    assert [compile_one(tree), compile_one(tree)] == [1, 0]
    assert capfd.readouterr().err == "warning: here\n" * 2
    assert [compile_one(tree, "-O2"), compile_one(tree, "-O2")] == [1, 0]
    (tree / "csrc" / "b" / "other.h").write_text("2\n")
    assert compile_one(tree) == 0
    (tree / "csrc" / "b" / "i.h").write_text("2\n")
    assert [compile_one(tree), compile_one(tree)] == [1, 0]
    compiler = tree / "compiler"
    compiler.write_text(compiler.read_text().replace("echo 1", "echo 2"))
    assert compile_one(tree) == 1


def test_cache_serves_another_clone(tree, monkeypatch):
    assert compile_one(tree) == 1
    clone = tree.rename(tree.parent / "clone")
    for module in (cache, compile_cached):
        monkeypatch.setattr(module, "ROOT", clone)
        monkeypatch.setattr(module, "CSRC", clone / "csrc")
    assert compile_one(clone) == 0


def test_cache_does_not_keep_failures(tree, capfd):
    (tree / "broken").touch()
    command = [str(tree / "compiler"), "-c", str(tree / "csrc" / "a" / "k.cu"), "-o", str(tree / "k.o")]
    assert [compile_cached.main(command), compile_cached.main(command)] == [1, 1]
    assert "warning: here" in capfd.readouterr().err
    assert (tree / "runs").read_text().count("ran") == 2 and not (tree / "k.o").exists()
    (tree / "broken").unlink()
    assert compile_one(tree) == 1


def test_launcher_ignores_other_commands(tree):
    for command in (["--version"], ["-o", str(tree / "k.so"), "k.o"], ["-c", str(tree / "else.cu"), "-o", "/dev/null"]):
        assert compile_cached.main([str(tree / "compiler"), *command]) == 0
    assert not cache.folder().exists()


def test_cache_removes_old_entries(tree):
    compile_one(tree)
    (entry,) = cache.folder().iterdir()
    os.utime(entry, (0, 0))
    compile_one(tree, "-O2")
    assert not entry.exists() and len(list(cache.folder().iterdir())) == 1
