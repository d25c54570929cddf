# `make demo` and `make test` each set up all that they need in .venv, on a bare machine with Python and pip.
#
#   make demo     train the small MoE language model and write its loss curve to out/
#   make test     lint, types, documentation and tests (tests that need a GPU skip and say so)
#   make docs     the documentation, into out/site; a warning is an error
#   make lint | format | types | bench | clean
#
# Variables: PYTHON (which Python makes the venv), TORCH (its version), EXTRAS (of pyproject.toml), ARGS (to the demo),
# WORKERS (processes that run tests).

PYTHON ?= python3
TORCH ?= 2.13.0
EXTRAS ?= dev,examples,docs,cuda,blackwell
ARGS ?=
WORKERS ?= auto

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
READY := $(VENV)/.ready
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup demo test check docs lint format types bench clean

setup: $(READY)

# torch comes first and pinned, so that nothing later can pull in another build. Where there is no NVIDIA driver, the
# CPU build is looked for: with pip's own settings, then on PyTorch's index; else whatever pip finds.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV), once: a minute or two"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	if command -v nvidia-smi >/dev/null; then $(PIP) install -qq torch==$(TORCH); else \
	    $(PIP) install -qq torch==$(TORCH)+cpu 2>/dev/null \
	    || $(PIP) install -qq --retries 0 --index-url $(TORCH_CPU_INDEX) torch==$(TORCH) 2>/dev/null \
	    || $(PIP) install -qq torch==$(TORCH); fi
	$(PIP) install -qq -c constraints.txt -e ".[$(EXTRAS)]"
	touch $(READY)

demo: $(READY)
	$(PY) examples/train_moe_lm.py $(ARGS)

test: lint types docs check

check: $(READY)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(READY)
	$(PY) -m mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: $(READY)
	for f in tests/bench/bench_*.py; do echo "== $$f"; PYTHONPATH=. $(PY) $$f || exit 1; done

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find cute_kernels patterns fusible_ops tests examples -name __pycache__ -prune -exec rm -rf {} +
