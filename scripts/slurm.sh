#!/usr/bin/env bash
# Train on whole nodes of a Slurm cluster, with one torchrun on each node:
#
#     sbatch --nodes=2 scripts/slurm.sh -c vil_tiny --data-dir /imagenet
#
# Five minutes before the time limit, or when the job is preempted, the run writes a checkpoint and the job is requeued.
# The requeued job resumes the run. OUTPUT must be on a disk that all nodes share, or on a disk that at least the first
# node keeps.
#SBATCH --job-name=vil
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this with sbatch from the repository}"

# `head` would close the pipe early, which pipefail treats as an error. `sed` reads all lines.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export OMP_NUM_THREADS=1
gpus=${SLURM_GPUS_ON_NODE:?ask for GPUs: sbatch --gpus-per-node=N}
# The rendezvous is static, because the c10d rendezvous unpickles data that any machine on the network may write
# (docs/security.md). --cpus-per-task is repeated, because since Slurm 22.05, srun does not inherit the option from the
# job.
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    bash -c 'exec torchrun --node-rank="$SLURM_NODEID" "$@"' torchrun \
    --nnodes="$SLURM_NNODES" --nproc-per-node="$gpus" \
    --master-addr="$first" --master-port="$((20000 + SLURM_JOB_ID % 10000))" --max-restarts=3 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train_imagenet.py --resume auto "$@" &
step=$!
preempted=
trap 'preempted=yes; kill -USR1 $step' TERM USR1  # srun forwards the signal to the torchrun of every node
wait $step && status=0 || status=$?
while kill -0 $step 2>/dev/null; do  # wait again if the trap interrupted the first wait
    wait $step && status=0 || status=$?
done
# The job is requeued after a signal or a preemption, unless the job was cancelled, which ends the state RUNNING. With a
# grace time for preemption, Slurm signals only the step, so this script must also check PreemptTime.
job=$(scontrol show --oneliner job "$SLURM_JOB_ID")
if [ $status != 0 ] && [[ $job == *" JobState=RUNNING "* && ( $preempted || $job == *" PreemptTime=2"* ) ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
