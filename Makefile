# Two commands: `make demo` and `make test` (`make test-all`: slow tests as well). They set up what they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= 2

.PHONY: demo test test-slow test-all coverage lint reference docs gallery bench claims clean

.venv/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Unsilent needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	touch $@

.venv/core: .venv/pip pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/test: .venv/core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

.venv/docs: .venv/core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

demo: .venv/core
	@mkdir -p build && rm -f build/demo.sqlite
	$(BIN)/unsilent pvf digits-cnn --trials 500 --flips 1,8,64 --jobs $(JOBS) --fit-per-bit 1e-6 --store build/demo.sqlite

# Compiled test modules are kept, even where Python is told not to: a third of the time of a run.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(JOBS) --dist loadfile

test: .venv/test
	$(PYTEST)

# One more at a time than there are processors: slow tests wait for processes of theirs.
test-slow: JOBS := $(shell expr $(JOBS) + 1)
test-slow: .venv/test
	$(PYTEST) -m "slow and not claim"

test-all: test test-slow

# Which test runs which line; workers of campaigns count as well. For tests/mutants.py.
coverage: .venv/test
	$(PYTEST) --cov --cov-context=test --cov-report=term:skip-covered -m "$(or $(TIER),not claim and not slow)"

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/docstring_openings.py src tools

# The pages of docs/reference that are made from the code.
reference: .venv/core
	$(BIN)/python tools/reference_pages.py docs

# Runs the campaigns of the gallery and draws its figures: minutes.
gallery: .venv/docs
	$(BIN)/python tools/gallery_page.py docs

# The site, in build/site; a dead link or any other warning is an error (with --quiet, warnings would not count).
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -d build/site

claims: .venv/test
	$(BIN)/pytest tests -m claim --override-ini addopts=--import-mode=importlib -q -s

build/peers: .venv/test
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ pytorchfi==0.6.0 MRFI==2.1.0

bench: build/peers
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build
