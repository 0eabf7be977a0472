"""The compiled part of the package. Importing it loads libmoe_fp8.so, which registers torch.ops.moe_fp8.

The library reaches torch through libtorch's stable ABI and uses no Python. So one file serves every interpreter, and
every torch from 2.11 on. It returns the tables that Python and C++ share as JSON: csrc/tables.cpp.
"""

import copy
import ctypes
import json
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).with_name("libmoe_fp8.so")


def _load() -> ctypes.PyDLL:
    try:
        torch.ops.load_library(str(LIBRARY))
        return ctypes.PyDLL(str(LIBRARY))  # the same library again. Its functions are short: they keep the GIL
    except OSError as error:
        if not LIBRARY.is_file():
            advice = "run `make build` in a source tree; an installed package is found outside of the source tree only"
            raise ImportError(f"moe_fp8_ext: there is no {LIBRARY}: {advice}") from error
        needs = "it needs torch 2.11 or newer, and the kind of machine that it was built for"
        reason = error.__cause__ or error  # load_library gives the loader's own words as the cause
        raise ImportError(f"moe_fp8_ext: {reason}, with torch {torch.__version__}: {needs}") from error


_library = _load()
_library.moe_fp8_tables.restype = ctypes.c_char_p
_library.moe_fp8_tables.argtypes = [ctypes.c_char_p]
_library.moe_fp8_validates.restype = ctypes.c_bool
_library.moe_fp8_validates.argtypes = []
_library.moe_fp8_count_validations.restype = None
_library.moe_fp8_count_validations.argtypes = [ctypes.c_int]

# What Python and C++ must agree on: "formats", "activations", "arguments", "limits". csrc/tables.cpp makes them.
TABLES: dict[str, Any] = json.loads(_library.moe_fp8_tables(torch.__config__.show().encode()))
if "error" in TABLES:
    raise ValueError(TABLES["error"])

# Whether the contents of offs and indices are checked too, which waits for the device. Every call asks, so it has no
# wrapper in Python.
validates = _library.moe_fp8_validates
# Adds to the number of contexts that validate: moe_fp8_ext/validation.py.
count_validations = _library.moe_fp8_count_validations


def build_info() -> dict[str, Any]:
    """Version, backend, architectures and toolkit of this build; its GEMMs in the order in which they are tried."""
    return copy.deepcopy(TABLES["build_info"])


def gemms() -> list[dict[str, Any]]:
    """The GEMMs of every build: csrc/ops/gemm_backends.h."""
    return copy.deepcopy(TABLES["gemms"])
