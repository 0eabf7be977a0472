# Each target makes what it needs: a virtual environment in .venv with torch in it, and the extension, built again where
# sources changed. It takes Python >= 3.10, make and a C++ compiler.
#
#   PYTHON=python3.12     another interpreter (or MOE_FP8_PYTHON in the environment)
#   SYSTEM_SITE=1         that interpreter as it is, with its own torch: no virtual environment, nothing is installed
#   ARGS="..."            further arguments for the program that the target runs
#   MAX_JOBS=2            compilers, and processes of tests, at a time
#   MOE_FP8_BACKEND=cuda  build for GPUs on a machine that has none; CONTRIBUTING.md lists the other variables

PYTHON ?= $(or $(MOE_FP8_PYTHON),python3)
VENV := .venv
ARGS ?=
RUFF := ruff==0.17.5

# In place, the extension is built for the GPUs of this machine, or for its CPU: other architectures take minutes.
export MOE_FP8_BACKEND := $(or $(MOE_FP8_BACKEND),native)

ifdef SYSTEM_SITE
PY := $(PYTHON)
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
packages = $(VENV)/.$(1)
endif
# Tests start dozens of processes, each of which would compile torch's modules again.
unexport PYTHONDONTWRITEBYTECODE
BUILD := $(PY) setup.py -q build_ext --inplace
# A system's Python may lack pytest-xdist, which spreads tests over processes.
WORKERS = $(shell $(PY) -c 'import xdist' 2>&- && printf '%s' '-n $(or $(MAX_JOBS),auto) --dist worksteal')
SAY := @printf 'moe_fp8_ext: %s\n'

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz bench report lint build wheel clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo && sed -n 's/^#   //p' $(MAKEFILE_LIST)

demo: $(call packages,demo) ## train a small MoE language model in BF16 and in FP8, side by side
	$(BUILD)
	$(PY) examples/train_moe_lm.py $(ARGS)

test: $(call packages,test) ## run the tests; without a GPU, on the CPU and on emulated GPUs
	$(BUILD)
	$(PY) -m pytest -q $(WORKERS) $(ARGS)

fuzz: $(call packages,test) ## call every op of a CPU build at random, under AddressSanitizer and UBSan
	$(PY) tests/toolchain/sanitized_fuzz.py $(ARGS)

bench: $(call packages,bench) ## time every op against the memory limit and the alternatives
	$(BUILD)
	$(PY) bench/run.py $(ARGS)

report: $(call packages,bench) ## try every kernel on a GPU that nobody has reported yet, and print what to attach
	$(BUILD)
	$(PY) tests/toolchain/first_run.py $(ARGS)

lint: $(call packages,lint) ## check the Python code
	$(PY) -m ruff check
	$(PY) -m ruff format --check

build: $(call packages,test) ## build the extension in place, with what the tests need
	$(BUILD)

wheel: export MOE_FP8_BACKEND :=
wheel: $(call packages,test) ## build a wheel in dist/ for all GPUs of the compiler that is found; takes minutes
	$(SAY) "building a wheel for all architectures, which takes 20 minutes on two cores"
	export MOE_FP8_CUDA_ARCHS="$${MOE_FP8_CUDA_ARCHS:-$(call archs,cuda)}" \
		MOE_FP8_ROCM_ARCHS="$${MOE_FP8_ROCM_ARCHS:-$(call archs,rocm)}"; \
		$(PY) -m pip wheel --no-deps --no-build-isolation -w dist .
archs = $(shell PYTHONPATH=build_backend $(PYTHON) -c 'import environment; print(environment.DEFAULT_ARCHS["$(1)"])')

clean: ## remove all that the targets above made
	rm -rf $(VENV) build dist *.egg-info moe_fp8_ext/*.so .pytest_cache .ruff_cache .hypothesis train_moe_lm.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "moe_fp8_ext: needs Python 3.10 or newer, and $(PYTHON) is not: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.lint: | $(VENV)/bin/python
	$(PY) -m pip install -q $(RUFF)
	@touch $@

# pip would build the extension without a word. It is built before, with its messages, and pip finds it done.
$(VENV)/.%: pyproject.toml setup.py build_backend/environment.py | $(VENV)/bin/python
	$(SAY) "installing torch and the build's tools where they are missing (pip downloads them: a minute or more)"
	needs=$$($(PY) build_backend/environment.py) && { [ -z "$$needs" ] || $(PY) -m pip install -q $$needs; }
	$(BUILD)
	$(SAY) "installing the packages of '$*' (pip downloads them: a minute or more)"
	$(PY) -m pip install -q --no-build-isolation -e '.[$*]'
	@touch $@
