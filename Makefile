# make help lists the targets. Targets chain commands; what they run is in experiments/, what they train in configs/.
PYTHON ?= python3.11
BIN = .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup test test-slow test-versions slurm-local slurm-local-down bench lint
.DELETE_ON_ERROR:

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: .venv/.ready ## a virtual environment in .venv with the project and its tools

.venv/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || python3 -m venv .venv
	$(BIN)/pip install --quiet --no-compile --config-settings editable_mode=compat -e '.[dev]'
	-$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1
	touch $@

TESTS ?= 2
test: setup ## the test suite, a file at a time by each of TESTS processes
	$(BIN)/python -m pytest -n $(TESTS) --dist loadfile

test-slow: setup ## the tests that take minutes: kills, faults, and a SLURM of two nodes on this host
	$(BIN)/python -m pytest -m slow -n $(TESTS) --dist loadfile tests/backbones
	$(BIN)/python -m pytest -m "slow or slurm" --ignore tests/backbones

test-versions: setup ## the lowest and the newest packages that pyproject allows, beside those installed
	$(BIN)/python -m tests.versions

SLURM_DIR ?= /tmp/dinomamba-slurm
slurm-local: ## a SLURM of two nodes on this host, in SLURM_DIR
	slurm/local.sh up $(SLURM_DIR)

slurm-local-down: ## takes it down
	slurm/local.sh down $(SLURM_DIR)

BENCHMARKS = input_pipeline dino_step ssd_cpu ssd_growth causal_conv binary_auc knn probe_heads kernel_registers scaling
bench: setup ## every benchmark that needs no GPU, into benchmarks/results (BENCHMARKS=ssd_cpu for one)
	$(BIN)/pip install --quiet --config-settings editable_mode=compat -e '.[bench]'
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# ---- experiments: what `python -m experiments --help` tells, of which a variable here is an option ------------------
# DATA=demo makes everything from embedded data; MODELS="a b" takes other models (overlays in configs/backbone),
# CHECKPOINT=path the weights of the one named; IMAGENET, IMAGENET_S, ROBUSTNESS, ADE20K and COCO are the folders of the
# data; ARGS adds flags to every run; LAUNCH starts it (srun), and has it resume what it finds; make -n prints the command,
# DRY=1 the runs.
EXPERIMENTS = demo paper study evaluate ranks512 states sizes claims
TARGETS = table1 table2 table3 table4 table5 table6 figure1 figure2 figure3 figure4 figure5 figure6 figure7 figure8 figure9 \
  figure10 figure11 figure12 figure13 ranks scoring
PARTS = figure4a figure4b figure4c figure4d figure4e figure4f
.PHONY: $(EXPERIMENTS) $(TARGETS) $(PARTS)
.NOTPARALLEL: # targets share runs; JOBS says how many runs at once
RUNS ?= $(RUN)

.DEFAULT: # a target that there is not
	@known="$$(sed -n 's/^\([a-z0-9-]*\):.*## .*/\1/p' $(MAKEFILE_LIST)) $(TARGETS) $(PARTS)"; \
	echo 'error: no target $@; there are' $$(echo $$known | sed 's/ /, /g') >&2; exit 2

demo: ## the main job on embedded data, on a CPU in minutes (SEED=1 for another seed)
paper: ## table1 … table6, figure1 … figure13, ranks, scoring, all; DATA=demo on embedded data
study: ## softmax, linear attention and Mamba of equal size, trained and not, five seeds, on embedded data
evaluate: ## a linear probe once more on a split held out: CHECKPOINT=probe.ckpt MODELS=its backbone

ranks512: ## ranks in blocks of 256 x 256, as eq. 17 has them; of models of Base size as they are initialised, too
states: ## Vim with a state of 16 to 256, on embedded data: ranks, Binary-AUC, probes, cost
sizes: ## the three mixers trained and measured at 48, 96 and 192 px, on embedded data: Binary-AUC, probes, cost
claims: ## AUC against probes by layer, head, register and model; lazy heads; norms of patches; distances of mixing

COST = $(if $(DRY),,$(or $(RUNS),runs/$1)/$1-cost.json)
states: $(call COST,states)
sizes: $(call COST,sizes)
%/states-cost.json: | .venv/.ready
	$(BIN)/python benchmarks/state_size.py --out $@
%/sizes-cost.json: | .venv/.ready
	$(BIN)/python benchmarks/image_sizes.py --out $@

$(EXPERIMENTS) $(TARGETS) $(PARTS): .venv/.ready
	@$(BIN)/python -m experiments $@ --data='$(DATA)' --models='$(MODELS)' --checkpoint='$(CHECKPOINT)' --runs='$(RUNS)' \
	--imagenet='$(IMAGENET)' --imagenet-s='$(IMAGENET_S)' --robustness='$(ROBUSTNESS)' --ade20k='$(ADE20K)' --coco='$(COCO)' --seed='$(SEED)' --args='$(subst ','\'',$(ARGS))' \
	--launch='$(LAUNCH)' --jobs='$(JOBS)' --threads='$(patsubst OMP_NUM_THREADS=%,%,$(THREADS))' $(if $(DRY),--dry-run)
