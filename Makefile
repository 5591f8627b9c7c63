# make horovod installs Horovod, which the engine "horovod" and its tests need
# make demo    sets everything up and trains a small network with 2 processes (5 minutes)
# make lint    checks style and types, and that layers import downwards only
# make test-unit  sets everything up and runs the tests that start no jobs (2 minutes on 2 cores)
# make test    sets everything up and runs these, and a cover of all that users reach (10 minutes)
# make test-all  runs these, and what finds what they cannot: all that CI runs of these tests (20 minutes)
# make nightly  runs all cells of all tables, long searches, other programs, libraries and launchers (hours; as root)
# make durations  records how long tests take, in tests/durations.json
# make test-native  builds the communicator's C++ tests, plain and with sanitizers, and runs them (about 2 minutes;
#                   needs only g++ and Python)
# make docs    builds the documentation as a site in build/docs
# make wheel   builds a wheel for every supported TensorFlow, and the source distribution, in dist/ (4 minutes)
# make release VERSION=0.2.0  builds, checks and tags a version: CONTRIBUTING.md (10 minutes); WHEEL_SERIES=2.21 rehearses
# make bench   measures everything in docs/results/ (several hours; some parts need root)
# make faults  lets all go wrong that docs/faults.md tells of: in programs, with hosts and links, and ranks that are
#              killed at every moment, and start again (about 40 minutes; hosts need root)
# make long    trains for long, and shows that nothing grows: docs/results/long_runs.md (about 15 minutes)
# make paper   compares the paper's results with measurements and simulations: docs/results/paper.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
supported = $(shell $(PYTHON) -c "from runpy import run_path; print(run_path('tf_poseidon/supported.py')$(1))")
SERIES = $(call supported,['TENSORFLOW_SERIES'][-1])
KERAS = $(call supported,['KERAS'])

# Tests run in two processes, one file at a time in each, the longest first (tests/support/durations.py).
PYTEST := $(BIN)/python -m pytest --quiet --numprocesses=2 --dist=loadfile --no-loadscope-reorder

# Each from one release series, since another series reports other findings.
LINTERS := 'clang-format==23.*' 'ruff==0.17.*' 'import-linter==2.*' 'mypy==2.*' 'types-protobuf==7.*'

COMPUTED := poseidon,poseidon-ps,poseidon-sfb,horovod,horovod+enable,mwms,mwms+enable

.PHONY: setup horovod demo lint test-unit test test-rest test-all nightly durations test-native docs wheel release bench faults long paper clean

setup: $(VENV)/.installed
	$(BIN)/python setup.py --quiet build_ext --inplace

# --no-build-isolation: build against the installed TensorFlow, not against a second copy.
$(VENV)/.installed: pyproject.toml setup.py tf_poseidon/supported.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "setuptools>=77"
	$(BIN)/python -m pip install --quiet "tensorflow-cpu==$(SERIES).*" "mpich>=5" "$(KERAS)"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable ".[test,bench]"
	touch $@

horovod: setup
	scripts/install_horovod.sh $(BIN)/python

# Without TensorFlow's warnings, of which there are dozens in double precision.
demo: export TF_CPP_MIN_LOG_LEVEL := 2
demo: setup
	@mkdir -p build/demo
	@echo "Trains on handwritten digits, with 2 processes and with 1; their messages are in build/demo/messages.txt."
	@{ $(BIN)/mpiexec -n 2 $(BIN)/python examples/digits.py --quiet --save build/demo/two_processes.npz && \
	  $(BIN)/python examples/digits.py --quiet --compare build/demo/two_processes.npz; } \
	  2> build/demo/messages.txt || { cat build/demo/messages.txt; false; }
	@echo "Next: . $(BIN)/activate, docs/tutorial.md, and tf-poseidon explain: what would your model gain?"

lint: setup
	$(BIN)/python -m pip install --quiet $(LINTERS)
	$(BIN)/ruff check .
	git ls-files '*.cc' '*.h' | xargs $(BIN)/clang-format --dry-run --Werror
	$(BIN)/lint-imports
	$(BIN)/mypy

test-unit: setup
	$(PYTEST) --tier=unit

test: setup
	$(PYTEST) --tier=unit,test

# What `make test` leaves out of what CI runs.
test-rest: setup
	$(PYTEST) --tier=rest

# At once: files of both tiers start their jobs once, and workers wait for each other once.
test-all: setup
	$(PYTEST) --tier=unit,test,rest

# Of programs and test suites that others have published, only where their sources are: docs/results/published_programs.md.
nightly: horovod
	$(PYTEST) --full
	$(MAKE) --no-print-directory test-native faults long paper wheel
	scripts/check_wheel.sh dist/*.whl
	$(BIN)/python scripts/test_matrix.py --wheel dist/tf_poseidon-*.whl

durations: setup
	$(PYTEST) --record-durations

test-native:
	$(MAKE) --no-print-directory --directory=tests/native --jobs=$$(nproc) --output-sync PYTHON=$(PYTHON)

# Without the notice that Material for MkDocs is maintained until May 2027.
docs: export NO_MKDOCS_2_WARNING := 1
docs: setup
	$(BIN)/python -m mkdocs build
	@echo "build/docs/index.html; with search: $(BIN)/python -m http.server --directory build/docs"

wheel:
	scripts/build_wheel.sh $(PYTHON)

# What could refuse comes first, and the tag last.
release:
	$(PYTHON) scripts/release.py check "$(VERSION)"
	$(MAKE) --no-print-directory docs wheel
	scripts/check_wheel.sh dist/*.whl
	$(PYTHON) scripts/release.py tag "$(VERSION)"

bench: horovod
	mkdir -p docs/results
	for ranks in 2 4; do \
	  $(BIN)/mpiexec -n $$ranks $(BIN)/python -m evaluation.benchmarks.bench_sync --peers= \
	    --json docs/results/bench_sync_$$ranks.json || exit 1; done
	$(BIN)/mpiexec -n 4 $(BIN)/python -m evaluation.benchmarks.bench_sync \
	  --json docs/results/bench_sync_peers_4.json
	test $$(id -u) != 0 || $(BIN)/tf-poseidon emulate --hosts 2 --ranks_per_host 2 -- \
	  $(BIN)/python -m evaluation.benchmarks.bench_sync --peers= --json docs/results/bench_sync_2x2.json
	test $$(id -u) != 0 || $(BIN)/tf-poseidon emulate --hosts 2 --ranks_per_host 2 -- \
	  $(BIN)/python -m evaluation.benchmarks.bench_sync --peers= --ranks_per_node=1 \
	  --json docs/results/bench_sync_2x2_apart.json
	$(BIN)/mpiexec -n 2 $(BIN)/python -m evaluation.benchmarks.bench_partition --json docs/results/bench_partition.json
	for ranks in 2 4; do \
	  $(BIN)/mpiexec -n $$ranks $(BIN)/python -m evaluation.benchmarks.bench_slices \
	    --json docs/results/bench_slices_$$ranks.json || exit 1; done
	$(BIN)/mpiexec -n 4 $(BIN)/python scripts/benchmark.py --system $(COMPUTED) \
	  --json docs/results/benchmark_loopback.json
	test $$(id -u) != 0 || $(BIN)/tf-poseidon emulate --hosts 4 --gbps 1 -- \
	  $(BIN)/python scripts/benchmark.py --system $(COMPUTED) --json docs/results/benchmark_1gbps.json
	test $$(id -u) != 0 || $(BIN)/python -m evaluation.comparisons.bench_emulated --again
	$(BIN)/python -m evaluation.answers.answers
	test $$(id -u) != 0 || for part in overlap bytes heads servers; do $(BIN)/python -m evaluation.comparisons.bench_emulated --again \
	  --parts $$part --json docs/results/$$part.json || exit 1; done
	test $$(id -u) != 0 || $(BIN)/python -m evaluation.comparisons.bench_emulated --again --parts answers \
	  --json docs/results/answers_emulated.json
	$(BIN)/mpiexec -n 2 $(BIN)/python -m evaluation.benchmarks.bench_zeros --json docs/results/bench_zeros.json
	test $$(id -u) != 0 || $(BIN)/python -m evaluation.benchmarks.bench_input_and_shares \
	  --json docs/results/input_and_shares.json --markdown docs/results/input_and_shares.md
	$(BIN)/python -m evaluation.benchmarks.bench_head_memory --rounds 2 --json docs/results/head_memory.json
	$(BIN)/python -m evaluation.simulation.bench_staleness --json docs/results/staleness.json \
	  --plot docs/results/staleness.png
	$(BIN)/python -m evaluation.benchmarks.bench_overhead --json docs/results/bench_overhead.json
	$(BIN)/python -m evaluation.benchmarks.bench_first_step --json docs/results/bench_first_step.json
	$(BIN)/python -m evaluation.benchmarks.bench_threads --json docs/results/threads.json
	$(BIN)/python -m evaluation.benchmarks.bench_outer_product --json docs/results/bench_outer_product.json
	$(BIN)/python -m evaluation.benchmarks.bench_rewrite --json docs/results/bench_rewrite.json

faults: horovod
	$(BIN)/python -m evaluation.faults.faults --markdown docs/results/faults.md
	$(BIN)/python -m evaluation.faults.kills --markdown docs/results/kills.md

long: setup
	$(BIN)/mpiexec -n 2 $(BIN)/python -m evaluation.faults.long_runs --markdown docs/results/long_runs.md

paper: setup
	$(BIN)/python -m evaluation.paper.tables

clean:
	rm -rf build dist *.egg-info $(VENV)
	find tf_poseidon -name '*.so' -delete
