# `make test` and `make bench` set up everything they need. VENV=path uses an existing environment that has
# torch, and adds only what is missing; without it, .venv is made from requirements/.

# PYTHON creates .venv (the pins need 3.11 or newer); WORKERS is the number of test processes.
PYTHON ?= python3
WORKERS ?= 2
PINS := requirements/test.txt requirements/bench.txt
CSRC := $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)

ifdef VENV
ENV := $(VENV)
else
ENV := .venv
endif
RUN := $(ENV)/bin/python
STAMP := $(ENV)/.attnbias-setup

# An environment shared by two checkouts holds the one that was set up last, named in the stamp.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
STALE := stale
endif

.PHONY: help setup test test-all test-cudnn sanitize bench bench-gate static static-gate docs lint format clean stale
help:
	@echo "make setup | test | test-all | test-cudnn | sanitize | bench | bench-gate | static | static-gate | docs | lint | format | clean"
	@echo "     [VENV=an/environment]"

setup: $(STAMP)

$(STAMP): setup.py pyproject.toml $(wildcard requirements/*) $(CSRC) $(STALE)
ifdef VENV
	@$(RUN) -c "import torch" || { echo "VENV=$(VENV): torch does not import there; install it first"; exit 1; }
	missing=$$($(RUN) requirements/missing.py $(PINS)) && { test -z "$$missing" || $(RUN) -m pip install $$missing; }
	$(RUN) -m pip install --no-deps -e .
else
	test -x $(RUN) || $(PYTHON) -m venv $(ENV)
	$(RUN) -m pip install -r requirements/torch.txt $(PINS:%=-r %)
	$(RUN) -m pip install --no-deps --no-build-isolation -e .
endif
	@echo "$(CURDIR)" > $@

# One thread per worker: on two cores, two workers with two threads each took up to 100 times as long.
test: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) -p no:benchmark -m "not slow" $(ARGS)

test-all: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) -p no:benchmark $(ARGS)

# Compile NVIDIA's kernels as the backend cudnn calls them, and emulate those of its plan; needs no GPU. The
# environment borrows everything but NVIDIA's packages, some 400 MB, from the one above.
CUDNN := build/cudnn
test-cudnn: setup
	test -x $(CUDNN)/bin/python || $(RUN) -m venv $(CUDNN)
	$(CUDNN)/bin/python -m pip install -q --no-deps -r requirements/cudnn.txt
	$(RUN) -c "import sysconfig; path = sysconfig.get_path('purelib'); print(f'import site; site.addsitedir({path!r})')" \
	  > $$($(CUDNN)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth
	OMP_NUM_THREADS=1 $(CUDNN)/bin/python -m pytest -p no:benchmark -m "" tests/backends/test_cudnn_programs.py $(ARGS)

# Test the C++ kernels under the address and undefined-behaviour sanitizers, with fresh memory full of NaN.
SANITIZED := build/sanitized
sanitize: setup
	CXXFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -DAB_POISON" \
	  $(RUN) setup.py -q build_ext --force --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	OMP_NUM_THREADS=1 ATTNBIAS_CPU_LIBRARY=$(SANITIZED)/attnbias/libattnbias.so \
	  LD_PRELOAD=$$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \
	  $(RUN) -m pytest -n $(WORKERS) -p no:benchmark -m "not slow" tests/backends/cpu \
	  tests/op/test_dropout.py tests/layouts/test_native.py $(ARGS)

bench: setup
	$(RUN) -m attnbias bench $(ARGS)

bench-gate: setup
	$(RUN) -m attnbias bench gate $(ARGS)

# Count compiled GPU code, ours and FlexAttention's; needs no GPU. ARGS: --store, --rebuild, --gate.
static: setup
	$(RUN) -m attnbias.benchmarks.static $(ARGS)

static-gate: setup
	$(RUN) -m attnbias.benchmarks.static --gate $(ARGS)

# Build the site into build/site, in an environment of its own without torch; a warning or a dead link is an error.
DOCS := build/docs-env
docs:
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

lint: setup
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(if $(CSRC),$(ENV)/bin/clang-format --dry-run --Werror $(CSRC))

format: setup
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format
	$(if $(CSRC),$(ENV)/bin/clang-format -i $(CSRC))

# Does not touch an environment named by VENV.
clean:
	rm -rf .venv build dist results *.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
