# `make demo` and `make test` set everything up in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# torch's CPU build is a tenth of its CUDA build: where there is no NVIDIA driver on Linux, and pip has not been told
# where to look, take it from the index that PyTorch publishes it on
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(shell test "$$(uname)" = Linux && ! test -e /proc/driver/nvidia/version \
	&& ! $(PYTHON) -m pip config list 2>/dev/null | grep -qE 'index-url|find-links' && echo --extra-index-url $(CPU_INDEX))

# tests start hundreds of processes: without bytecode each would compile the package anew
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test rest thorough gpu gpu-bench check-compile check-compile-amd docs clean

demo: $(READY)
	$(BIN)/sublight explain examples/unfused_attention.py --html demo/this-machine.html
	$(BIN)/sublight explain examples/recorded/h200/host_sync.json.gz \
		--limits examples/recorded/h200/limits.json --html demo/h200.html
	@echo
	@echo 'Two reports to open in a browser:'
	@echo '  demo/this-machine.html   examples/unfused_attention.py, run on this machine just now'
	@echo '  demo/h200.html           a trace of examples/host_sync.py from an H200, which comes with the repository'

# What fails is run once more by itself when all others are done, and only what fails twice fails the run: many tests
# draw random numbers by a rule with a small chance of a false alarm, and the machine may be busy. Both runs are printed.
PYTEST = $(BIN)/python -m pytest -q -m 'not alone'
define tests
$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder $(1) || { \
	test $$? = 1 && echo 'what failed, once more by itself:' && $(PYTEST) -p no:xdist --lf --lfnf=none && \
	echo 'that passed by itself: chance, load or another test made it fail above; look into it'; }
endef

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy >.mypy.txt 2>&1 & types=$$!; \
	$(call tests); tests=$$?; \
	wait $$types || { cat .mypy.txt; exit 1; }; tail -n 1 .mypy.txt; exit $$tests
	$(BIN)/python -m pytest -q -m alone $$(grep -rl 'mark\.alone' --include='*_test.py' sublight examples benchmarks)

# Every test of the ops on the CPU, of which `test` draws some, others at each commit: ten minutes on two cores.
thorough: $(READY)
	SUBLIGHT_CASES=all $(BIN)/python -m pytest -n 2 -q sublight/ops

# Those that `test` left out at this commit.
rest: $(READY)
	export SUBLIGHT_CASES=rest; $(call tests,-rs)

# On a machine with a GPU, with the Python that is there: installs nothing.
define needs_gpu
	@$(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || \
		{ echo 'make $@: no GPU that torch can use here; `$(PYTHON) -m sublight doctor` says why' >&2; exit 2; }
endef

# The tests that run on a GPU, several at once; those that time it alone. SUBLIGHT_CASES=all: every case of them.
gpu:
	$(needs_gpu)
	$(PYTHON) -m benchmarks.gpu_tests

# The figures that docs and predictions are made of: what this GPU can do, then every op and the end-to-end runs.
gpu-bench:
	$(needs_gpu)
	$(PYTHON) -m sublight limits
	key=$$($(PYTHON) -c 'from sublight import gpus; print(gpus.detect().key)') && \
	$(PYTHON) -m sublight bench --against compile,liger,quack --json benchmarks/$$key.json && \
	PYTHONPATH=. $(PYTHON) benchmarks/end_to_end.py --json benchmarks/end_to_end_$$key.json && \
	PYTHONPATH=. $(PYTHON) benchmarks/cuda_ladders.py --json benchmarks/cuda_ladders_$$key.json && \
	PYTHONPATH=. $(PYTHON) benchmarks/ways_to_ship.py --json benchmarks/ways_to_ship_$$key.json
	$(PYTHON) -m sublight demo --all --json sublight/extensions/demos/recorded.json

# Every kernel for every GPU that it declares; needs no GPU.
check-compile:
	$(PYTHON) -m sublight.xray.compile --all-targets

# The same for AMD's GPUs, with the back end in Triton's wheel: whether it compiles and fits, no more.
check-compile-amd:
	$(PYTHON) -m sublight.xray.amd

# The pictures and tables of the docs, from the last full benchmark.
RUN ?= benchmarks/h200.json
LADDERS ?= benchmarks/cuda_ladders_h200.json
docs: $(READY)
	$(BIN)/python -m sublight.report.pictures $(RUN) docs
	$(BIN)/python -m sublight.report.ladders docs $(LADDERS)
	$(BIN)/python -m sublight.report.demo docs
	$(BIN)/python examples/debugging/page.py docs/debugging.md

clean:
	rm -rf $(VENV) build *.egg-info

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'sublight needs Python 3.11 or later; found' "$$($(PYTHON) --version 2>&1)": make PYTHON=python3.12 $(MAKECMDGOALS) >&2; exit 2; }
	@echo 'setting up $(VENV): torch 2.13, triton 3.9 and the tools, 0.5 GB to fetch, 2.3 GB on disk (more where torch comes with CUDA)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH_INDEX) --editable '.[torch,dev]'
	@touch $(READY)
	@echo 'ready:' "$$(du -sh $(VENV) | cut -f1)" in $(VENV)
