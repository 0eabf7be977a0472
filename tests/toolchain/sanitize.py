"""Runs every_kernel.py under a tool of compute-sanitizer, in several processes that divide the calls among themselves.

    python tests/toolchain/sanitize.py racecheck --seconds 110

It prints how many calls were made, which calls did not end, and what the tool reported, by kernel. Further arguments go
to every_kernel.py. Calls with small inputs come first: if time runs out, those with the largest inputs are left.

A process needs a core, because racecheck follows accesses to shared memory on the host. With several GPUs the processes
take them in turn.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOLS = {
    # These two look at our kernels only; initcheck must see who wrote a byte, so it looks at all.
    "racecheck": ("--racecheck-num-workers", "1", "--kernel-name", "kns=moe_fp8"),
    "synccheck": ("--num-cuda-barriers", "65536", "--kernel-name", "kns=moe_fp8"),
    "initcheck": (),
    "memcheck": (),
}
OPTIONS = "--launch-timeout 100 --show-backtrace no --demangle simple --print-limit 1000".split()
GRACE = 25  # seconds after --seconds, in which a process may end the call that it is in
REPORT = re.compile(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY)(\S.*)$", re.M)
PLACE = re.compile(r"\bat (?:void )?(.+?)(?:\+0x[0-9a-f]+|$)", re.M)


def reports(output: str) -> collections.Counter[str]:
    """Headlines of what the tool reported, each with the kernel that the headline or the lines below it name."""
    found: collections.Counter[str] = collections.Counter()
    headlines = list(REPORT.finditer(output))
    ends = [*(following.start() for following in headlines[1:]), len(output)]
    for headline, end in zip(headlines, ends, strict=False):  # without a headline, there is one end too many
        record = output[headline.start() : end]
        place = PLACE.search(record)
        text = re.sub(r"\+?0x[0-9a-f]+", "", headline[1])
        found[text if place is None or place[1] in text else f"{text}: {place[1]}"] += 1
    return found


def calls_of(output: str) -> tuple[dict[int, str], dict[int, float]]:
    begun = {int(n): name for n, name in re.findall(r"^call (\d+) of \d+: (.*)$", output, re.M)}
    ended = {int(n): float(s) for n, s in re.findall(r"^call (\d+) took (\S+) s$", output, re.M)}
    return begun, ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at once (default: one per core)")
    parser.add_argument("--seconds", type=float, default=600, help="begin no call after this time")
    parser.add_argument("--logs", type=Path, help="a folder that keeps the output of each process")
    options, passed_on = parser.parse_known_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("sanitize: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    gpus = max(1, len(listed.splitlines()))

    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        queue = Path(folder) / "queue"
        queue.write_text("0")
        program = [sys.executable, str(Path(__file__).with_name("every_kernel.py")), *passed_on]
        program += ["--queue", str(queue), "--until", str(time.time() + options.seconds)]
        jobs = []
        for job in range(options.jobs):
            # Each process has its own ports, and its own core: the CPU's loops must not take others.
            tool = [sanitizer, "--tool", options.tool, *TOOLS[options.tool], *OPTIONS, "--port", str(20000 + 20 * job)]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(job % gpus), "OMP_NUM_THREADS": "1"}
            environment["PYTHONUNBUFFERED"] = "1"  # a process that is killed has then printed which call it is in
            command = ["timeout", "--kill-after", "5", str(options.seconds + GRACE), *tool, *program]
            with (logs / f"{options.tool}_{job}.log").open("w") as log:
                jobs.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        codes = [job.wait() for job in jobs]
        outputs = [(logs / f"{options.tool}_{job}.log").read_text() for job in range(options.jobs)]

    total = max((int(n) for o in outputs for n in re.findall(r"^call \d+ of (\d+):", o, re.M)), default=0)
    begun, ended, found = {}, {}, collections.Counter()
    for job, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        of_job, ended_of_job = calls_of(output)
        begun |= of_job
        ended |= ended_of_job
        found += (of_this := reports(output))
        state = {0: "finished", 124: "out of time", 137: "killed"}.get(code, f"exit code {code}")
        print(f"{options.tool} {job}: {state}, {len(ended_of_job)} calls, {sum(of_this.values())} reports")
        if not of_job:
            print("\n".join(output.splitlines()[-5:]))
    print(f"{options.tool}: {len(ended)} of {total} calls ended, {len(begun) - len(ended)} did not end")
    slowest = sorted(ended, key=ended.get, reverse=True)[:5]
    for title, calls in (("did not end", begun.keys() - ended.keys()), ("slow", slowest)):
        for call in calls:
            print(f"  {title}: {begun[call]}" + (f" ({ended[call]} s)" if call in ended else ""))
    for line in sorted({line for o in outputs for line in re.findall(r"^differs: .*$", o, re.M)}):
        print(f"  {line}")
    for text, times in found.most_common():
        print(f"  {times} x {text}")
    return len(ended) != total or total == 0 or any(codes) or bool(found)


if __name__ == "__main__":
    sys.exit(main())
