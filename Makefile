# `make run` and `make test` set up what they need, on a machine with Python 3.11 and pip.
# `make cuda-wheel`, `make nightly` and `make weekly` do so too, in environments of several GB that they keep for the next time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CASES := transformer_batch or moe_batch or moe_seq
# The same three chunkings on inputs that show more, in float32 and on 6 ranks.
SIGHT := sight

# What plain `pip install torch` gives on Linux is a build for CUDA, also where no GPU is.
CUDA_TORCH := 2.14.1
OLDEST_TORCH := 2.11.0
NEWEST_TORCH := 2.15.0
# A case of each kind that the three are not: a mask that is compiled, a training loop that is not ours.
OTHER_KINDS := (experts_seq_flex and not regional and not marked) or loop_kept_gathered

LOCK_UV := uv

.PHONY: lock run cases every-case abroad wild chaos docs test test-fast test-slow check bench operators cuda-wheel cuda-lane cuda-lane-debug cuda-graphs cuda-indices cuda-wheel-lane cuda-kernels sum-orders long-cases published faults sensitivity fuzz soak nightly weekly abroad-cases abroad-blame lane-oldest lane-newest clean

run: $(VENV)/ready          ## the three cases, 20 steps on 8 ranks, and three that see more; the report goes to reports/latest
	$(BIN)/bitproof run -k '$(CASES) or $(SIGHT)'

cases: $(VENV)/ready        ## beside those, few cases that have each value of each setting, each of which must get its expected verdict
	names=$$($(BIN)/python .ci/cover.py) && $(BIN)/bitproof run -j 2 --control when-different $$names

every-case: $(VENV)/ready   ## all other cases but those that take minutes (`make long-cases`)
	$(BIN)/bitproof run -j 2 --control when-different -k 'not ($(CASES) or $(SIGHT) or $(LONG))' --report-dir reports/every-case

test: $(VENV)/ready         ## the test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-fast: $(VENV)/ready    ## what starts no processes and traces no whole step, in a minute; `make test` is the judge
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not ranks and not traces and not slow"

# SLOW says which: make test-slow SLOW=tests/test_docs.py.
SLOW :=

test-slow: $(VENV)/ready    ## every command that the documents show, and what else takes minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow $(SLOW)

check: $(VENV)/ready-dev    ## format, lint, types and tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

docs: $(VENV)/ready-docs    ## the documents as a site in build/site; a warning is an error, a minute of CPU the budget
	ulimit -t 60; NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build

bench: $(VENV)/ready        ## figures against their goals, tests/benchmarks/goals.toml; takes an hour and a half
	$(BIN)/python -m tests.nightly all --only bench --folder reports/bench

fuzz: $(VENV)/ready         ## programs with one wrong call and trainers with one defect for blame, rewrites and faults for the prover, corrupted and forged certificates, damaged files, layouts without a defect
	$(BIN)/python -m tests.nightly all --only fuzz --folder reports/fuzz

# Each day's scan makes other calls. One that was cut off goes on with its seed and file:
# make operators OPERATORS='--seed 20261126 --json reports/operators.json'.
OPERATORS := --seed $(shell date -u +%Y%m%d)

operators: $(VENV)/ready    ## every operator that a proof admits does what its schema and its fake say; takes half an hour
	$(BIN)/python tests/benchmarks/scan_operators.py $(OPERATORS)
	$(BIN)/python tests/benchmarks/scan_arguments.py

# The whole soak takes hours on two cores; SOAK says less: make soak SOAK='--runs 20 --session 40 --controls 1'.
SOAK :=

soak: $(VENV)/ready         ## hundreds of runs in one process: all EQUAL, memory flat, nothing left behind; takes hours
	$(BIN)/python tests/benchmarks/soak.py $(SOAK)

cuda-wheel: .venv-torch-$(CUDA_TORCH)/ready  ## the lane of a CUDA build of torch, on the CPU
	.venv-torch-$(CUDA_TORCH)/bin/python -c 'import torch; assert torch.version.cuda, torch.__version__ + " is no build for CUDA"'
	$(MAKE) lane-$(CUDA_TORCH)
	.venv-torch-$(CUDA_TORCH)/bin/python -m pytest tests/cuda_lane/test_driver.py

cuda-lane: $(VENV)/ready    ## every graph case but the debug models as CUDA would trace it, without a GPU; needs a C++ compiler
	$(BIN)/python tests/cuda_lane/run.py --every-case --jobs 3 --devices 0,7 --steps 1 --report-dir reports/cuda-lane

cuda-lane-debug: $(VENV)/ready ## the debug models in the same lane
	$(BIN)/python tests/cuda_lane/run.py -k debug --devices 0,7 --steps 1 --report-dir reports/cuda-lane-debug

cuda-graphs: $(VENV)/ready  ## which steps a CUDA graph could hold, and why not the others
	$(BIN)/python tests/cuda_lane/captures.py

cuda-indices: $(VENV)/ready ## each step of the lane traced for all eight device indices, which must be one trace
	$(BIN)/python tests/cuda_lane/indices.py --jobs 2

cuda-wheel-lane: .venv-torch-$(CUDA_TORCH)/ready  ## the same of some cases, on a CUDA build of torch
	.venv-torch-$(CUDA_TORCH)/bin/python tests/cuda_lane/run.py -k '$(CASES) or blocks_batch_offload' --devices 0,7 --steps 1 --report-dir reports/cuda-wheel-lane

cuda-kernels: $(VENV)/ready .triton/ready  ## what Inductor and Triton generate for GPUs, to machine code for three kinds of them
	PYTHONPATH=.triton $(BIN)/python tests/cuda_lane/kernels.py --cases regional_inductor,experts_seq_flex_regional,halves_flex_regional

# In a folder of its own: no run is to find Triton there, and no manifest to name it.
.triton/ready: constraints.txt
	$(BIN)/pip install --quiet --no-deps --target .triton -c constraints.txt triton
	touch $@

sum-orders: $(VENV)/ready   ## which cases see the order of sums over ranks; fails where one that must does not
	$(BIN)/python tests/benchmarks/sum_orders.py -k bucketing

# What takes minutes: the debug model of 33 million parameters in the three chunkings, both halves of a step compiled,
# modules compiled in C++, and a placed step compiled.
LONG := debug or joint_llama3_inductor or flex_marked or autoplace_llama3_inductor

long-cases: $(VENV)/ready   ## the cases that take minutes
	$(BIN)/bitproof run --control when-different -k '$(LONG)' --report-dir reports/long

published: $(VENV)/ready    ## a model of 16 billion parameters traced, rewritten, proved, placed and precompiled; at debug size ten steps over two nodes of torchrun
	$(BIN)/bitproof prove -k published
	$(BIN)/bitproof precompile experts_seq_16b --out reports/published/step
	nodes=; for node in 0 1; do \
		OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo $(BIN)/torchrun --nnodes 2 --node-rank $$node --master-port 29777 --nproc-per-node 2 \
			-m bitproof run -k experts_seq_nightly_debug --report-dir reports/published/node$$node & nodes="$$nodes $$!"; \
	done; for node in $$nodes; do wait $$node || exit 1; done

# What hides in the three cases as they are trained; each must be caught in every one of those that see.
HIDDEN := rotation-contracted reciprocal-root-in-two-steps experts-summed-from-the-other-end sigmoid-by-exp \
	router-in-float64 weights-scaled-before-they-are-normalized chunk-1-uses-chunk-0s-positions \
	gradient-averaged-after-the-sum tokens-counted-in-bfloat16 summed-from-the-last-rank

FAULTS :=

faults: $(VENV)/ready       ## every defect of the catalogue in a case that should see it: which are caught, and where they are found; FAULTS=--no-verify takes half as long
	$(BIN)/bitproof faults --device cpu --report-dir reports/faults $(FAULTS)
	$(BIN)/bitproof faults --device cpu $(FAULTS) -k '$(SIGHT)' $(HIDDEN:%=--fault %) --report-dir reports/hidden

CHAOS :=

chaos: $(VENV)/ready        ## torchrun on two and four machines, which are namespaces, of which one is killed, cut off, paused, late, other, full; root alone may
	$(BIN)/python -m pytest tests/test_chaos.py -n 2 -m slow $(CHAOS)

sensitivity: $(VENV)/ready  ## every call of the three cases' steps made wrong by one ULP: which would be seen; takes some minutes
	$(BIN)/bitproof sensitivity -k '$(CASES)' --limit 0 --steps 2 --report-dir reports/sensitivity
	$(BIN)/bitproof sensitivity -k '$(CASES) or $(SIGHT)' --steps 1 --observe '**' --report-dir reports/sensitivity
	$(BIN)/bitproof sensitivity -k '$(CASES)' --limit 0 --steps 1 --every-call --report-dir reports/sensitivity

# What they run, and what each target must reach: tests/benchmarks/goals.toml. After an interruption:
# make nightly NIGHT=--resume.
NIGHT :=

nightly: $(VENV)/ready      ## what takes too long for every submission, each target against its goal; under three hours
	$(BIN)/python -m tests.nightly night $(NIGHT)

weekly: $(VENV)/ready       ## what takes too long for a night
	$(BIN)/python -m tests.nightly week $(NIGHT)

abroad: abroad-cases abroad-blame  ## trainers of torchtitan, transformers, Accelerate, Lightning and torch's pipelines: verdicts, causes, planted defects

abroad-cases: .venv-abroad/ready
	.venv-abroad/bin/python tests/abroad/run.py

abroad-blame: .venv-abroad/ready
	.venv-abroad/bin/python -m tests.benchmarks.bench_blame --abroad --verify

wild: .venv-abroad/ready .wild/common/ready .venv-torch-$(CUDA_TORCH)/ready  ## bugs that were shipped, and the releases that mend them
	.venv-abroad/bin/python tests/wild/run.py

.wild/common/ready: tests/wild/requirements.txt .venv-abroad/ready
	PIP_CONSTRAINT=/dev/null .venv-abroad/bin/pip install --quiet --no-deps --upgrade --target .wild/common -r tests/wild/requirements.txt
	touch $@

# torchtitan wants triton, which builds of torch for the CPU do not bring.
.venv-abroad/ready: pyproject.toml tests/abroad/requirements.txt
	$(PYTHON) -m venv --clear .venv-abroad
	PIP_CONSTRAINT=/dev/null .venv-abroad/bin/pip install --quiet -r tests/abroad/requirements.txt -e '.[test]'
	touch $@

# `lane-oldest` and `lane-newest` are the supported ends.
lane-oldest: lane-$(OLDEST_TORCH)

lane-newest: lane-$(NEWEST_TORCH)

LANE :=

# The three cases go in one command: a process that has run one must still be able to run the next.
lane-%: .venv-torch-%/ready ## another torch: few steps of the three cases and of one of each other kind, and graph tests
	.venv-torch-$*/bin/bitproof run --device cpu -k '$(CASES)' --steps 2 --report-dir reports/torch-$*
	.venv-torch-$*/bin/bitproof run --device cpu -k '$(OTHER_KINDS)' --steps 2 --report-dir reports/torch-$*
	.venv-torch-$*/bin/python -m pytest -n 2 --dist worksteal tests/harness/graph $(LANE)

.PRECIOUS: .venv-torch-%/ready
# No constraints, neither ours nor the machine's own, which may pin another torch.
.venv-torch-%/ready: pyproject.toml
	$(PYTHON) -m venv --clear .venv-torch-$*
	PIP_CONSTRAINT=/dev/null .venv-torch-$*/bin/pip install --quiet torch==$* -e '.[test]'
	touch $@

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,oracle]'
	touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/ready-docs: $(VENV)/ready
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

# For every Python and platform at once; `uv` is a tool that the machine must have. No index and no folder is named.
lock:                       ## every dependency by version and hash, for the workflows: requirements.lock
	printf 'setuptools>=77\n' | $(LOCK_UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-emit-find-links --custom-compile-command 'make lock' \
		--extra test -c constraints.txt -o requirements.lock pyproject.toml -

clean:
	rm -rf $(VENV) .venv-abroad .venv-torch-* .triton .wild
