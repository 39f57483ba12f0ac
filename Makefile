# `make demo` and `make test` are all a new machine needs: Python 3.11+, make, and a package index.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# What has been installed: the laboratory, which is all that a demo needs, and the rest.
LAB    := $(VENV)/.lab
STAMP  := $(VENV)/.installed
# Python compiles what is imported, once; pip would compile all of torch and transformers, for most of a minute.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Many tests start processes, so bytecode is kept.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test check docs notebooks sanitize dist format setup clean

demo: $(LAB)
	$(BIN)/symexplin demo

test: $(STAMP)
	# One thread a worker: two workers with two threads each fight over two cores. A file stays with one worker, so that
	# what its tests share is made once (loadgroup groups nothing under pytest 9.2: pytest-xdist issue 1386). Files come
	# in the order of tests/conftest.py, the slow ones first.
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/docs/index.html

# Their output is kept in the repository; the tests say when it is older than its source.
notebooks: $(STAMP)
	$(BIN)/python docs/run_notebooks.py

# The C kernels under gcc's sanitizers (Linux): an access outside of an array and undefined behavior end the process. The
# flags come last, so -O1 replaces -O3, which takes twice as long to compile here. Python must load libasan first.
SANITIZED ?= tests/kernels/test_kernels.py tests/optim/test_packs.py
SANITIZER := build/sanitize
sanitize: $(STAMP)
	rm -rf $(SANITIZER)
	CC=gcc CFLAGS="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all" \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target $(SANITIZER) .
	PYTHONPATH="$(CURDIR)/$(SANITIZER)" OMP_NUM_THREADS=1 \
		ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" \
		$(BIN)/pytest -q --capture=sys -m "not process_state" -k "not triton and not DEFAULT" $(SANITIZED)

# Wheel and sdist, checked, and the wheel tried in an empty environment.
dist: $(STAMP)
	$(PIP) -e '.[release]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	bash .ci/wheel dist/*.whl

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(STAMP)

$(LAB): pyproject.toml constraints.txt hatch_build.py src/symexplin/kernels/cpu.c
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "symexplin needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[lab]'
	touch $@

$(STAMP): $(LAB)
	$(PIP) -e '.[hf,dev,docs]'
	# timm asks for torchvision, which must be of the same build as torch: one for CUDA beside a torch for CPUs breaks
	# Lightning and transformers. The tests need neither its images nor its operators (tests/test_recipes.py).
	$(PIP) --no-deps timm
	touch $@

clean:
	rm -rf $(VENV) .venv-versions runs build dist .mypy_cache .ruff_cache .pytest_cache
