"""`python -m moe_fp8_ext` says what this build does on this machine, and checks and times it if asked."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from moe_fp8_ext.report import check, machine, speed

ON_A_CPU = (
    "A CPU emulates FP8, so --speed times nothing here: run it on a machine with a GPU that the build has code for."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a check failed. Bad arguments exit with 2."""
    parser = argparse.ArgumentParser(prog="python -m moe_fp8_ext", description="Shows what this build does here.")
    parser.add_argument("--check", action="store_true", help="call every op once and compare its bytes")
    parser.add_argument("--speed", action="store_true", help="time layers beside BF16, name the fastest recipe")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    options = parser.parse_args(arguments)
    found = {"machine": machine.machine()}
    lines = machine.text(found["machine"])
    gpus = found["machine"]["gpus"]
    device = "cuda" if gpus and gpus[0]["has_code"] else "cpu"
    if options.check:
        checks = found["check"] = check.check(device)
        where = "GPU 0" if device == "cuda" else "CPU, because the build has no code for a GPU here"
        failed = checks["failed"]
        lines.append(
            f"check: {checks['calls']} calls on the {where}, against {checks['against']}: {len(failed)} failed"
        )
        lines += [f"FAILED {failure}" for failure in failed]
    if options.speed and device == "cuda":
        found["speed"] = speed.speed()
        lines += speed.text(found["speed"])
    elif options.speed:
        found["speed"] = {"error": ON_A_CPU}
        lines.append(ON_A_CPU)
    print(json.dumps(found, indent=2) if options.json else "\n".join(lines))
    return int(bool(found.get("check", {}).get("failed")))


if __name__ == "__main__":
    sys.exit(main())
