# Every target sets up what it needs in a fresh clone: a virtual environment in .venv with the versions of
# constraints.txt. Needs Python 3.10-3.12 with venv, and make.
#
#   make demo             sentence embeddings with every Linear through fw.gemm
#   make test             all tests but the slow ones
#   make test-slow        the slow ones only
#   make test-exhaustive  what takes very long beside them
#   make test-all         all three
#   make witness          the simulator's matrix instructions against Triton's kernels: compiles and runs them all, writes the records
#   make lint             ruff (rules and formatting) and mypy
#   make format           let ruff rewrite what `make lint` would complain about
#   make env              the virtual environment only
#   make system-packages  Debian packages (as root) that link and disassemble code objects in some tests
#   make clean            remove .venv and caches

PYTHON ?= python3
PYTEST_ARGS ?= -n 2 --dist worksteal
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
STAMP := $(VENV)/.installed
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
# A network that is gone for a minute fails nothing.
export PIP_RETRIES := 10
export PIP_DEFAULT_TIMEOUT := 60
APT_GET := DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5 -o DPkg::Lock::Timeout=120

.PHONY: demo test test-slow test-exhaustive test-all witness lint format env system-packages clean

demo: $(STAMP)
	$(BIN)/fourwave demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not exhaustive" $(PYTEST_ARGS)

test-exhaustive: $(STAMP)
	$(BIN)/python -m pytest -m exhaustive $(PYTEST_ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Triton in an environment of its own: it brings its own compiler, and compiles without a GPU and without torch.
WITNESS := $(VENV)/triton
witness: $(STAMP) $(WITNESS)/.installed
	$(BIN)/python tests/sim/witness/record.py --triton $(WITNESS)/bin/python

$(WITNESS)/.installed: | $(STAMP)
	$(BIN)/python -m venv $(WITNESS)
	$(WITNESS)/bin/python -m pip --disable-pip-version-check --no-input install triton==3.9.0
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

env: $(STAMP)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else \
	  "fourwave: $(PYTHON) is Python %d.%d; FlyDSL has wheels for 3.10, 3.11 and 3.12 only: make PYTHON=python3.11 ..." % v)'
	$(PYTHON) -m venv $(VENV)

# torch alone and first, at the exact pin: left to the resolver, an unpinned torch can bring gigabytes of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install torch==2.13.0
	$(PIP) install -e '.[amd,demo,dev]'
	@command -v cc >/dev/null || command -v gcc >/dev/null || command -v clang >/dev/null || \
	  { echo "no C compiler found: the simulator's native core will be built by the ziglang package's"; $(PIP) install ziglang; }
	touch $@

# A linker that knows gfx942 and gfx950 (FlyDSL's wheel has none), and llvm-mc/llvm-objdump. Tests that need them skip,
# and say so, where they are absent.
system-packages:
	$(APT_GET) update
	$(APT_GET) install -y --no-install-recommends lld-22 llvm-22

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
