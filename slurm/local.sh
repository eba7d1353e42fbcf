#!/usr/bin/env bash
# A SLURM of two nodes on this host, to try the scripts with: slurm/local.sh up DIR, slurm/local.sh down DIR.
# Everything it writes is in DIR; `export SLURM_CONF=DIR/slurm.conf` makes sbatch, squeue, … talk to it. PORT moves its
# ports (PORT to PORT + 2), CPUS the processors of a node. Needs Debian's packages slurm-wlm and munge.
set -euo pipefail
PATH=$PATH:/usr/sbin
command=${1:?up or down}
dir=$(realpath -m "${2:?a scratch folder}")
port=${PORT:-17000}

# The daemons are stopped by the pids they left, and only where these still are such daemons.
down() {
    for name in slurmd-n1 slurmd-n2 slurmctld munged; do
        file=$dir/$name.pid
        pid=$(cat "$file" 2>/dev/null) || continue
        if grep -q "^${name%%-*}" "/proc/$pid/comm" 2>/dev/null; then
            kill "$pid" 2>/dev/null || true
            for _ in $(seq 100); do
                test -e "/proc/$pid" || break
                sleep 0.1
            done
            kill -KILL "$pid" 2>/dev/null || true
        fi
        rm -f "$file"
    done
}

up() {
    for tool in munged slurmctld slurmd sbatch; do
        command -v $tool > /dev/null || { echo "error: no $tool; install slurm-wlm and munge" >&2; exit 1; }
    done
    down
    mkdir -p "$dir/state" "$dir/spool-n1" "$dir/spool-n2" "$dir/munge"
    chmod 755 "$dir"
    chmod 700 "$dir/munge"
    test -s "$dir/munge/key" || (umask 077 && head -c 128 /dev/urandom > "$dir/munge/key")
    cat > "$dir/slurm.conf" << CONF
ClusterName=dinomamba
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5
ReturnToService=2
KillWait=10
SlurmdParameters=config_overrides
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=${CPUS:-2}
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=${CPUS:-2}
PartitionName=local Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
    munged --force --socket="$dir/munge.socket" --key-file="$dir/munge/key" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munge/log" --seed-file="$dir/munge/seed" 2> "$dir/munged.err" ||
        { cat "$dir/munged.err" >&2; exit 1; }
    slurmctld -f "$dir/slurm.conf"
    slurmd -f "$dir/slurm.conf" -N n1
    slurmd -f "$dir/slurm.conf" -N n2
    for _ in $(seq 60); do
        test "$(SLURM_CONF=$dir/slurm.conf sinfo -h -t idle -o %D 2> /dev/null)" = 2 && return
        sleep 0.5
    done
    echo "error: the nodes did not come up; see $dir/*.log" >&2
    SLURM_CONF=$dir/slurm.conf sinfo >&2 || true
    down
    exit 1
}

case $command in
    up) up && echo "export SLURM_CONF=$dir/slurm.conf" ;;
    down) down ;;
    *) echo "error: $command is neither up nor down" >&2 && exit 1 ;;
esac
