# Sourced by the sbatch scripts: `launch COMMAND` runs it once per task, `cluster` holds the job's shape for dinomamba.

# The first node's address as SLURM knows it, which need not resolve as a name.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol show node "$first" -o | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
export MASTER_ADDR=${address:-$first}

cluster=(-c configs/cluster/slurm.yaml --trainer.num_nodes "$SLURM_JOB_NUM_NODES"
    --trainer.devices "${SLURM_NTASKS_PER_NODE:?sbatch wants --ntasks-per-node}")
# srun no longer takes these over from sbatch by itself
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
logs=${LOGS:-logs}
mkdir -p "$logs"
# a log for each rank, which a requeued job goes on writing; where one task fails the others are ended too
LAUNCH="srun --kill-on-bad-exit=1 --open-mode=append --output=$logs/$SLURM_JOB_NAME-$job-rank%t.log"
launch() { $LAUNCH "$@"; }
