"""Inputs, group layouts, comparisons and checks that many tests share."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

ROOT = Path(__file__).resolve().parents[2]
SHAPES = json.loads((ROOT / "bench" / "shapes.json").read_text())
LAYOUTS: list[str] = SHAPES["group_layouts"]
CORRECTNESS_MKE: list[list[int]] = SHAPES["correctness_MKE"]

GPUS = torch.cuda.device_count()
NO_GPU = pytest.mark.skipif(GPUS < 1, reason="no CUDA GPU")
NO_SECOND_GPU = pytest.mark.skipif(GPUS < 2, reason="fewer than two CUDA GPUs")

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def short(value: object) -> str:
    """A readable pytest id for a dtype, a shape or a function."""
    value = getattr(value, "__name__", value)
    return "x".join(map(short, value)) if isinstance(value, (list, tuple)) else str(value).removeprefix("torch.")


def pairs(**axes: Sequence[object]) -> tuple[list[str], list[list[object]]]:
    """The arguments of pytest.mark.parametrize: few rows in which every two values of every two axes meet.

    Most faults depend on one argument or on two. Those show in these rows as well as in the full product.
    """
    names = list(axes)
    places = {(i, v): None for i, name in enumerate(names) for v in range(len(axes[name]))}
    missing = {pair: None for pair in itertools.combinations(places, 2) if pair[0][0] != pair[1][0]}
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for i, name in enumerate(names):
            if i not in row:
                gains = [
                    sum(tuple(sorted([(i, v), p])) in missing for p in row.items()) for v in range(len(axes[name]))
                ]
                row[i] = gains.index(max(gains))
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append([axes[name][row[i]] for i, name in enumerate(names)])
    return names, rows


def blocks(page: str, section: str | None = None, language: str = "python") -> list[str]:
    """The code blocks of a document, or of one of its sections."""
    text = (ROOT / page).read_text()
    if section is not None:
        text = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [code for name, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if name == language]


# Inputs


def seed_generators(seed: int) -> None:
    """Seeds the default generators of torch.

    Without a GPU, `torch.manual_seed` keeps the stack of its caller for later. That takes milliseconds in a test.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.device_count():
        torch.cuda.manual_seed_all(seed)


def wide(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0) -> Tensor:
    """Random values whose magnitudes vary by row and by column, so that no two scales are equal."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for dim in range(-min(len(shape), 2), 0):
        exponents = torch.randint(-6, 7, [shape[dim]] + [1] * (-dim - 1), generator=generator)
        x = x * torch.exp2(exponents.float())
    return x.to(dtype).to(device)


def group_offs(layout: str, m: int, e: int, device: str = "cpu") -> Tensor:
    """End offsets of `e` groups over `m` rows, in one of the layouts of bench/shapes.json."""
    weights = [1.0] * e
    if layout == "zipf":
        weights = [1.0 / (1 + (i * 7) % e) for i in range(e)]
    elif layout == "one_giant":
        weights = [float(i == e // 2) for i in range(e)]
    elif layout.startswith("empty_"):
        weights[{"first": 0, "middle": e // 2, "last": e - 1}[layout.removeprefix("empty_")]] = 0.0
    elif layout == "all_empty":
        weights = [0.0] * e
    elif layout not in ("uniform", "tail_rows"):
        raise ValueError(f"unknown group layout {layout}")
    rows = m * 3 // 4 if layout == "tail_rows" else m
    total = sum(weights)
    ends, cumulative = [], 0.0
    for weight in weights:
        cumulative += weight
        ends.append(round(rows * cumulative / total) if total else 0)
    return torch.tensor(ends, dtype=torch.int32, device=device)


def slot_indices(m: int, top_k: int, p: int, device: str = "cpu", seed: int = 0) -> Tensor:
    """[p] indices of the m * top_k slots in any order, each at most once, mixed with padding and invalid indices."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(m * top_k, generator=generator)[: p * 3 // 4].int()
    invalid = torch.tensor([-1, -1, m * top_k, INT32_MIN, INT32_MAX], dtype=torch.int32).repeat(p)
    indices = torch.cat([slots, invalid[: p - len(slots)]])
    return indices[torch.randperm(p, generator=generator)].to(device)


def inverse_of(indices: Tensor, m: int, top_k: int) -> Tensor:
    """[m, top_k]: the last position of each slot in indices, or -1."""
    inverse = torch.full((m * top_k,), -1, dtype=torch.int32)
    for p, slot in enumerate(indices.tolist()):
        if 0 <= slot < m * top_k:
            inverse[slot] = p
    return inverse.view(m, top_k).to(indices.device)


def corrupt_offs(m: int, device: str = "cpu") -> list[Tensor]:
    """Offsets that break every rule of the contract."""
    cases = [
        [-5, m // 2, m],
        [m, m // 2, m // 4],
        [m // 2, m + 1, m + 1000],
        [INT32_MAX, INT32_MIN, m // 2],
        [INT32_MIN, INT32_MAX, -1],
        [3, 1, m // 2, m // 3, m * 2, m],
    ]
    return [torch.tensor(case, dtype=torch.int32, device=device) for case in cases]


def misaligned(x: Tensor, elements: int = 1) -> Tensor:
    """A copy of x whose base pointer is `elements` elements past an aligned one."""
    buffer = torch.empty(x.numel() + elements, dtype=x.dtype, device=x.device)
    view = buffer[elements:].view(x.shape)
    view.copy_(x)
    assert x.numel() == 0 or view.data_ptr() % 16 == elements * x.element_size() % 16
    return view


def strided_2d(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views equal to x [M, K] with inner stride 1 and unusual base pointers or row strides."""
    m, k = x.shape
    yield "misaligned", misaligned(x)
    wide_rows = x.new_zeros(m, k + 3)
    wide_rows[:, 1 : k + 1] = x
    yield "odd row stride", wide_rows[:, 1 : k + 1]
    aligned_rows = x.new_zeros(m, -(-k // 64) * 64 + 64)
    aligned_rows[:, :k] = x
    yield "padded rows", aligned_rows[:, :k]
    every_other = x.new_zeros(2 * m, k)
    every_other[::2] = x
    yield "every other row", every_other[::2]


def full(t: Tensor) -> Tensor:
    """The whole of a DTensor; any other tensor itself."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


# Byte equality


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of t in logical order, [numel, itemsize]."""
    flat = t.detach().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a single row or column counts as contiguous, whatever its stride is
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).view(-1, t.element_size())


def assert_same_tensor(got: Tensor, want: Tensor, what: str) -> None:
    """Asserts equal dtype, shape, stride, device and bytes. The message shows the first element that differs."""
    for attribute in ("dtype", "shape", "device"):
        assert getattr(got, attribute) == getattr(want, attribute), (
            f"{what}: {attribute} {getattr(got, attribute)}, want {getattr(want, attribute)}"
        )
    assert got.stride() == want.stride(), f"{what}: stride {got.stride()}, want {want.stride()}"
    if torch.equal(as_bytes(got), as_bytes(want)):
        return
    differs = (as_bytes(got) != as_bytes(want)).any(1)
    first = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), got.shape))
    got_hex, want_hex = (bytes(as_bytes(t)[first].tolist())[::-1].hex() for t in (got, want))
    got_value, want_value = (t.reshape(-1)[first].item() for t in (got.float(), want.float()))
    pytest.fail(
        f"{what}: {int(differs.sum())} of {differs.numel()} elements differ, first at {index}: "
        f"0x{got_hex} ({got_value}), want 0x{want_hex} ({want_value})",
        pytrace=False,
    )


def assert_same(got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor], what: str = "output") -> None:
    """assert_same_tensor for a tensor, or for every tensor of a result."""
    if isinstance(want, Tensor):
        return assert_same_tensor(got, want, what)
    assert len(got) == len(want), f"{what}: {len(got)} tensors, want {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_same_tensor(g, w, f"{what} {i}")


def on(device: str, values: Sequence[object] | dict[str, object]) -> list[object] | dict[str, object]:
    """Copies tensors to a device, with their strides; other values stay as they are."""
    if isinstance(values, dict):
        return dict(zip(values, on(device, list(values.values())), strict=True))
    return [
        torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device).copy_(v) if isinstance(v, Tensor) else v
        for v in values
    ]


# Accuracy


def sqnr_db(got: Tensor, want: Tensor) -> float:
    """Signal to quantization noise ratio in decibels: infinite if equal, NaN if a value is not finite."""
    signal = want.double().square().sum().item()
    noise = (got.double() - want.double()).square().sum().item()
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


# Checks that every op must pass


@contextmanager
def flushed_subnormals() -> Iterator[None]:
    """A context in which this thread's CPU arithmetic flushes float32 subnormals, as torch.set_flush_denormal does."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def check_opcheck(op: str, args: Sequence[object], **kwargs: object) -> None:
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(isinstance(t, Tensor) and t.dtype in FP8_DTYPES for t in [*args, *kwargs.values()]):
        tests.append("test_schema")  # compares inputs by torch.allclose, which FP8 does not have
    torch.library.opcheck(getattr(torch.ops.moe_fp8, op).default, tuple(args), kwargs, test_utils=tests)


def check_deterministic(fn: Callable, args: Sequence[object]) -> None:
    """A second run and a run in one thread give the same bytes."""
    want = fn(*args)
    assert_same(fn(*args), want, "second run")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert_same(fn(*args), want, "one thread")
    finally:
        torch.set_num_threads(threads)


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """A context that lists the tensors that autograd saves for backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        yield saved


def kept_bytes(call: Callable[[], object], *held: Tensor) -> int:
    """Bytes that a call keeps for backward, without the storages of the tensors that the caller holds anyway."""
    with saved_tensors() as saved:
        call()
    known = {t.untyped_storage().data_ptr() for t in held}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    return sum(size for at, size in kept.items() if at not in known)


def counted_backend(device: str) -> Callable:
    """A backend for torch.compile that counts graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    torch._dynamo.reset()
    return CompileCounterWithBackend("inductor" if device == "cuda" else "aot_eager")


def check_compiled(fn: Callable, calls: Sequence[Sequence[object]], device: str, dynamic: Sequence[int] = (0,)) -> None:
    """There is one graph and no recompilation while dimension 0 of the arguments in `dynamic` varies."""
    frames = counted_backend(device)
    compiled = torch.compile(fn, fullgraph=True, backend=frames)
    for args in calls:
        for i in dynamic:
            torch._dynamo.mark_dynamic(args[i], 0)
        assert_same(compiled(*args), fn(*args), f"compiled, M = {args[0].shape[0]}")
    assert frames.frame_count == 1


def check_cuda_graph(fn: Callable, args: Sequence[object], later: Sequence[object]) -> None:
    """A captured call replays to the bytes of an eager call, also after its inputs were overwritten in place."""
    static = [t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t for t in args]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(*static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn(*static)
    for inputs in (args, later, args):
        for buffer, value in zip(static, inputs, strict=True):
            if isinstance(buffer, Tensor):
                buffer.detach().copy_(value.detach())
        graph.replay()
        assert_same(out, fn(*inputs), "replayed graph")


def check_two_streams(fn: Callable, calls: Sequence[Sequence[object]]) -> None:
    """Calls that overlap on two streams do not disturb one another."""
    want = [fn(*args) for args in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    got = []
    for _ in range(20):
        for stream, args in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                got.append(fn(*args))
    torch.cuda.synchronize()
    for i, result in enumerate(got):
        assert_same(result, want[i % len(calls)], f"call {i}")


def check_stream_order(fn: Callable, calls: Sequence[Sequence[object]], overwrite: float = math.nan) -> None:
    """Kernels of a call may overlap with each other, but not with the kernel before the call nor with later kernels.

    The kernel before writes the input. Later kernels read the outputs and overwrite the input. The call is checked
    eagerly and in a CUDA graph.
    """
    want = [[t.clone() for t in fn(*args)] for args in calls]  # clones, as below: they have no room between columns
    x = torch.empty_like(calls[0][0])

    def all_calls() -> list[list[Tensor]]:
        results = []
        for first, *others in calls:
            x.copy_(first)
            outputs = fn(x, *others)
            x.fill_(overwrite)
            results.append([t.clone() for t in outputs])
            for t in outputs:
                lines = t if t.stride(-1) == 1 else t.mT  # column-major scales
                lines.view(torch.uint8).fill_(0xFF)
        return results

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_calls()
    for _ in range(5):
        assert_same(sum(all_calls(), []), [t for outputs in want for t in outputs], "eager")
        graph.replay()
        assert_same(sum(captured, []), [t for outputs in want for t in outputs], "replayed graph")


def check_second_gpu(fn: Callable, args: Sequence[object], second_gpu: str) -> None:
    """An op runs on the device of its arguments and not on the current one, and leaves the current one as it was."""
    want = fn(*on("cuda:0", args))
    with torch.cuda.device(0):
        got = fn(*on(second_gpu, args))
        assert torch.cuda.current_device() == 0
    assert [t.stride() for t in got] == [t.stride() for t in want]
    assert_same([t.cpu() for t in got], [t.cpu() for t in want], "second GPU")  # a copy does not keep padded strides


def error_of(fn: Callable, args: Sequence[object], kwargs: dict[str, object] | None = None) -> str:
    """The first line of the RuntimeError that fn(*args, **kwargs) must raise."""
    with pytest.raises(RuntimeError) as info:
        fn(*args, **kwargs or {})
    return str(info.value).splitlines()[0]


def check_error(op: str, args: Sequence[object], argument: str, got: str, **kwargs: object) -> None:
    """Bad arguments raise the same sentence in eager and in fake mode; it names the op, the argument and the value."""
    fn = getattr(torch.ops.moe_fp8, op)
    message = error_of(fn, args, kwargs)
    assert message.startswith(f"{op}: {argument} "), message
    assert "got" in message and got in message.split("got", 1)[1], message
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in [*args, *kwargs.values()]]
        assert error_of(fn, fake[: len(args)], dict(zip(kwargs, fake[len(args) :], strict=True))) == message
    check_compiled_error(fn.default, args, message, **kwargs)


def check_compiled_error(fn: Callable, args: Sequence[object], message: str, **kwargs: object) -> None:
    """torch.compile raises the same sentence, within an exception and a text of its own."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a, **k: fn(*a, **k), backend="eager", fullgraph=True, dynamic=False)
    with pytest.raises(Exception) as info:
        compiled(*args, **kwargs)
    assert message in str(info.value), info.value
