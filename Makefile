# make help lists the targets. Targets chain commands; what they train is in configs/.
PYTHON ?= python3.11
SEED ?= 0
RUN ?= runs/demo$(if $(filter-out 0,$(SEED)),-$(SEED))
BIN = .venv/bin
DEMO = data/demo/_info.json

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow slurm-local slurm-local-down bench lint
.DELETE_ON_ERROR:

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: .venv/.ready ## a virtual environment in .venv with the project and its tools

.venv/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || python3 -m venv .venv
	$(BIN)/pip install --quiet --no-compile -e '.[dev]'
	-$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1
	touch $@

test: setup ## the test suite
	$(BIN)/python -m pytest

test-slow: setup ## the tests that take minutes: kills, faults, and a SLURM of two nodes on this host
	$(BIN)/python -m pytest -m "slow or slurm"

SLURM_DIR ?= /tmp/dinomamba-slurm
slurm-local: ## a SLURM of two nodes on this host, in SLURM_DIR
	slurm/local.sh up $(SLURM_DIR)

slurm-local-down: ## takes it down
	slurm/local.sh down $(SLURM_DIR)

BENCHMARKS = input_pipeline dino_step ssd_cpu ssd_growth causal_conv binary_auc knn probe_heads kernel_registers scaling
bench: setup ## every benchmark that needs no GPU, into benchmarks/results (BENCHMARKS=ssd_cpu for one)
	$(BIN)/pip install --quiet -e '.[bench]'
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# ---- demo: pretrain, then probe, k-NN and Binary-AUC of the same backbone untrained and pretrained ----------------
BASE = -c configs/base.yaml
VIM = -c configs/backbone/vim_demo.yaml --seed_everything $(SEED) --trainer.logger.init_args.save_dir $(RUN)
WEIGHTS = --model.init_args.backbone_weights $(RUN)/pretrain/checkpoints/last.ckpt
PRETRAINED = $(RUN)/pretrain/.done
EVALUATIONS = $(foreach m,untrained pretrained,$(foreach e,probe knn auc,$(RUN)/$(m)-$(e)/.done))

demo: $(PRETRAINED) ## the main job on embedded data, on a CPU in minutes (SEED=1 for another seed)
	@$(MAKE) --no-print-directory -j2 $(RUN)/report.html
	@$(BIN)/python -m analysis.report $(RUN)

$(DEMO): .venv/.ready datamodules/demo.py
	$(BIN)/python -m datamodules.prepare demo --out $(@D) --overwrite true

$(PRETRAINED): $(DEMO)
	$(BIN)/dinomamba fit $(BASE) -c configs/task/dino.yaml -c configs/data/demo.yaml $(VIM) -c configs/task/dino_demo.yaml \
		--trainer.logger.init_args.name pretrain
	touch $@

# The evaluations run two at a time, one thread each, and write what they say into the run folder.
$(RUN)/untrained-%/.done: $(DEMO)
	@$(call evaluate,$(call how,$*) $(VIM) --trainer.logger.init_args.name untrained-$*)

$(RUN)/pretrained-%/.done: $(PRETRAINED)
	@$(call evaluate,$(call how,$*) $(VIM) --trainer.logger.init_args.name pretrained-$* $(WEIGHTS))

define evaluate
echo "$(@D)/log.txt: dinomamba $(1)"; mkdir -p $(@D); \
OMP_NUM_THREADS=1 $(BIN)/dinomamba $(1) > $(@D)/log.txt 2>&1 || { tail -n 30 $(@D)/log.txt; exit 1; }; touch $@
endef

how = $(how-$(1))
how-probe = fit $(BASE) -c configs/task/linear_probe.yaml -c configs/data/demo.yaml -c configs/task/linear_probe_demo.yaml
how-knn = validate $(BASE) -c configs/task/knn.yaml -c configs/data/demo.yaml -c configs/task/knn_demo.yaml
how-auc = validate $(BASE) -c configs/task/binary_auc.yaml -c configs/data/demo_s.yaml -c configs/task/binary_auc_demo.yaml

$(RUN)/report.html: $(PRETRAINED) $(EVALUATIONS)
	$(BIN)/python -m analysis.report $(RUN) > /dev/null

# ---- the paper's tables and figures (analysis/paper.yaml) -----------------------------------------------------------
# A run is a folder $(RUNS)/MODEL-TASK. DATA=demo makes everything from embedded data; MODELS="a b" takes other models
# (overlays in configs/backbone), CHECKPOINT=path their checkpoint; IMAGENET, IMAGENET_S and ROBUSTNESS are the folders of
# the data; ARGS adds flags to every run; LAUNCH starts it (srun), and has it resume what it finds.
TARGETS = table1 table4 table5 table6 figure1 figure4 figure5 figure6 figure7 figure8 figure9 figure10 figure11 figure12 ranks
PARTS = figure4a figure4b figure4c figure4d figure4e figure4f
.PHONY: paper study $(TARGETS) $(PARTS)
DATA ?= imagenet
OVERLAYS ?= $(DATA)
RUNS ?= runs/paper-$(DATA)
JOBS ?= $(if $(filter demo,$(DATA)),2,1)
THREADS ?= $(if $(filter demo,$(DATA)),OMP_NUM_THREADS=1)
IMAGENET ?=
IMAGENET_S ?=
ROBUSTNESS ?=
MODELS ?=
CHECKPOINT ?=
ARGS ?=
LAUNCH ?=
PAPER = $(BIN)/python -m analysis.paper

ifeq ($(MAKELEVEL),0)
.NOTPARALLEL: # targets share runs; JOBS says how many runs at once
endif

$(TARGETS) $(PARTS): .venv/.ready
	@$(MAKE) --no-print-directory $(SET_OUT) && $(call make_runs,$@); made=$$?; \
	$(PAPER) draw $@ --data $(DATA) --models $(MODELS) --runs $(RUNS) && exit $$made

paper: .venv/.ready ## table1 table4 table5 table6 figure1 figure4 … figure12 ranks, all; DATA=demo on embedded data
	@$(MAKE) --no-print-directory $(SET_OUT) && $(call make_runs,$(TARGETS)); made=$$?; \
	$(PAPER) draw $(TARGETS) --data $(DATA) --models $(MODELS) --runs $(RUNS) && exit $$made

SET_OUT = $(if $(filter demo,$(DATA)),$(DEMO) data/demo/robustness/real.json,.venv/.ready)
make_runs = $(MAKE) --no-print-directory -k -j$(JOBS) \
	$$($(PAPER) runs $(1) --data $(DATA) --models $(MODELS) | tr ' ' '\n' | sed 's|.*|$(RUNS)/&/.done|')

@%: # one run by its name, as slurm/table.sbatch asks for it
	@$(MAKE) --no-print-directory $(SET_OUT) && $(MAKE) --no-print-directory $(RUNS)/$*/.done

data/demo/robustness/real.json: $(DEMO)
	rm -rf $(@D)
	$(BIN)/python -m datamodules.prepare demo_robustness --out $(@D)

model = $(firstword $(subst -, ,$(1)))
task = $(lastword $(subst -, ,$(1)))
trained = $(filter pretrain,$(call task,$(1)))
supervised = $(filter %_supervised,$(call model,$(1)))

# task -> its YAML, verb and data
yaml-table1 = linear_probe
yaml-table4 = robustness
yaml-table5 = linear_probe
yaml-table6 = linear_probe
yaml-registers = linear_probe
yaml-probe = linear_probe
yaml-knn = knn
yaml-auc = binary_auc
yaml-ranks = ranks
yaml = $(if $(call trained,$(1)),$(if $(call supervised,$(1)),supervised,dino),$(yaml-$(call task,$(1))))
verb = $(if $(filter linear_probe dino supervised,$(call yaml,$(1))),fit,validate)
data-robustness = $(if $(filter demo,$(DATA)),demo_robustness,robustness)
data-binary_auc = $(if $(filter demo,$(DATA)),demo_s,imagenet_s)
root-imagenet = $(IMAGENET)
root-imagenet_s = $(IMAGENET_S)
root-robustness = $(ROBUSTNESS)
data = $(or $(data-$(call yaml,$(1))),$(DATA))

overlay = configs/backbone/$(patsubst %_supervised,%,$(call model,$(1))).yaml
published = $(wildcard configs/paper/$(DATA)/$(call model,$(1))-weights.yaml)
pretrained = $(RUNS)/$(call model,$(1))-pretrain
probe = $(RUNS)/$(call model,$(1))-table1
files = configs/base.yaml configs/task/$(call yaml,$(1)).yaml configs/data/$(call data,$(1)).yaml $(call overlay,$(1)) \
	$(if $(filter demo,$(DATA)),configs/task/$(call yaml,$(1))_demo.yaml) \
	$(wildcard $(foreach f,$(call task,$(1)) $(1),configs/paper/$(OVERLAYS)/$(if $(call supervised,$(1)),$(f:pretrain=supervised),$(f)).yaml)) \
	$(call published,$(1))
weights = $(if $(call trained,$(1)),,$(or $(CHECKPOINT),$(if $(filter demo,$(DATA)),$(call pretrained,$(1))/checkpoints/last.ckpt)))
# ---- study: three mixers of equal size, the demo's recipe, three seeds ---------------------------------------------
STUDY = vim_demo vit_demo linear_vit_demo
SEEDS = 0 1 2
STUDY_RUNS = $(foreach t,probe knn auc ranks,$(STUDY:%=%-$(t)))

study: .venv/.ready ## softmax, linear attention and Mamba of equal size, three seeds, on embedded data
	@$(MAKE) --no-print-directory $(DEMO) $(foreach s,$(SEEDS),&& $(MAKE) --no-print-directory -j2 DATA=demo OVERLAYS=study \
	SEED=$(s) RUNS=runs/study/seed$(s) $(STUDY_RUNS:%=runs/study/seed$(s)/%/.done))
	$(BIN)/python -m analysis.study runs/study

# The demo's models are pretrained here, and Table 4 takes Table 1's probe.
.SECONDEXPANSION:
.PRECIOUS: $(RUNS)/%/.done $(RUNS)/%-pretrain/.done
$(RUNS)/%-pretrain/.done: $(DEMO)
	@$(call run,$*-pretrain)

$(filter $(RUNS)/%-table4/.done,$(MAKECMDGOALS)): $(RUNS)/%-table4/.done: $(RUNS)/%-table1/.done

$(RUNS)/%/.done: $$(if $$(filter demo,$$(DATA)),$$(if $$(CHECKPOINT),,$$(call pretrained,$$*)/.done))
	@$(call run,$*)

define run
mkdir -p $(@D); echo "$(@D)/log.txt"; \
test -n "$(call trained,$(1))$(call weights,$(1))$(call published,$(1))" || \
grep -qs 'pretrained: true' $(call overlay,$(1)) || \
{ echo "error: no weights for $(call model,$(1)): give CHECKPOINT=path with MODELS=$(call model,$(1)), or write \
configs/paper/$(DATA)/$(call model,$(1))-weights.yaml"; exit 1; }; \
$(THREADS) $(LAUNCH) $(BIN)/dinomamba $(call verb,$(1)) $(foreach f,$(call files,$(1)),-c $(f)) --seed_everything $(SEED) \
--trainer.logger.init_args.save_dir $(RUNS) --trainer.logger.init_args.name $(1) \
$(if $(root-$(call data,$(1))),--data.init_args.root $(root-$(call data,$(1)))) \
$(if $(call weights,$(1)),--model.init_args.backbone_weights $(call weights,$(1))) \
$(if $(filter table4,$(call task,$(1))),--model.init_args.probe $(call probe,$(1))/checkpoints/last.ckpt) $(ARGS) \
$(if $(LAUNCH),$(if $(filter fit,$(call verb,$(1))),--ckpt_path auto)) \
> $(@D)/log.txt 2>&1 || { tail -n 5 $(@D)/log.txt; exit 1; }; touch $@
endef
