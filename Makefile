PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
READY := .venv/.installed

.PHONY: demo test test-slow lint verify coverage bench bench-moves bench-step gpu docs release-check clean

demo: $(READY)
	$(BIN)/python examples/train_gpt.py

test: lint
	$(BIN)/python -m pytest tests shardwise --doctest-modules -n $(WORKERS) --dist loadgroup

test-slow: lint
	$(BIN)/python -m pytest tests shardwise --doctest-modules -n $(WORKERS) --dist loadgroup --slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

verify: $(READY)
	$(BIN)/python -m shardwise verify --workers $(WORKERS)

coverage: $(READY)
	$(BIN)/python -m shardwise verify --coverage docs/coverage.md --workers $(WORKERS)

bench: $(READY)
	$(BIN)/python benchmarks/dispatch.py

bench-moves: $(READY)
	$(BIN)/python benchmarks/redistribute.py plan
	$(BIN)/python benchmarks/redistribute.py run --ranks 4
	$(BIN)/python benchmarks/redistribute.py run --ranks 8

bench-step: $(READY)
	$(BIN)/python benchmarks/step.py

# Where a GPU is, its machine brings the torch that fits it: GPU_PYTHON names the Python that has it.
GPU_PYTHON ?= python3
gpu:
	PYTHONPATH=. $(GPU_PYTHON) benchmarks/gpu.py

# Installs the wheel into clean environments with each torch (in .release, some 5 GB each where pip gives CUDA builds).
release-check: $(READY)
	$(BIN)/python tools/release_check.py $(RELEASE)

# The variable silences a notice that mkdocs-material prints about its future, which is no warning about these pages.
docs: $(READY)
	$(BIN)/python docs/pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .release dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
