# Each target makes what it needs: a virtual environment in .venv with torch in it, and the extension, rebuilt where
# sources changed. It takes Python >= 3.10, make and a C++ compiler; nvcc or ROCm are used where they are found.
#
#   PYTHON=python3.12   another interpreter (or MOE_FP8_PYTHON in the environment)
#   SYSTEM_SITE=1       that interpreter as it is, with its own torch: no virtual environment, nothing is installed
#   ARGS="..."          further arguments for the program that the target runs
#   MAX_JOBS=2          compilers, and processes of tests, at a time; MOE_FP8_BACKEND and the like: see CONTRIBUTING.md

PYTHON ?= $(or $(MOE_FP8_PYTHON),python3)
VENV := .venv
ARGS ?=
RUFF := ruff==0.17.5

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
# A system's Python may not have what spreads tests over processes.
WORKERS = $(shell $(PY) -c 'import xdist' 2>&- && printf '%s' '-n $(or $(MAX_JOBS),auto) --dist worksteal')

.DEFAULT_GOAL := help
.PHONY: help demo test bench report lint build clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo && sed -n 's/^#   //p' $(MAKEFILE_LIST)

# On a machine without a GPU the demo needs none of the GPU's kernels, which take minutes.
demo: export MOE_FP8_BACKEND := $(or $(MOE_FP8_BACKEND),native)
demo: $(call packages,demo) ## train a small MoE language model in BF16 and in FP8, side by side
	$(BUILD)
	$(PY) examples/train_moe_lm.py $(ARGS)

test: $(call packages,test) ## run the tests; those that need a GPU are left out where there is none
	$(BUILD)
	$(PY) -m pytest -q $(WORKERS) $(ARGS)

bench: $(call packages,bench) ## time every op against the memory limit and the alternatives
	$(BUILD)
	$(PY) bench/run.py $(ARGS)

report: $(call packages,bench) ## try every kernel on the GPU that is here: what to attach where nobody had one before
	$(BUILD)
	$(PY) tests/toolchain/first_run.py $(ARGS)

lint: $(call packages,lint) ## check the Python code
	$(PY) -m ruff check
	$(PY) -m ruff format --check

build: $(call packages,test) ## build the extension in place, with what the tests need
	$(BUILD)

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

# pip builds too, and says nothing meanwhile: what takes long is done before.
$(VENV)/.%: pyproject.toml setup.py build_backend/environment.py | $(VENV)/bin/python
	needs=$$($(PY) build_backend/environment.py) && { [ -z "$$needs" ] || $(PY) -m pip install -q $$needs; }
	$(BUILD)
	$(PY) -m pip install -q --no-build-isolation -e '.[$*]'
	@touch $@
