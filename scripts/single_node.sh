#!/usr/bin/env bash
# Train on all GPUs of this machine, or on N GPUs with GPUS=N. The script restarts training after a failure, and resumes
# an earlier run of the same experiment:
#
#     scripts/single_node.sh -c vil_tiny --data-dir /imagenet
#
# After Ctrl-C, SIGTERM or SIGUSR1, the run writes a checkpoint and exits with status 75.
#
# The rendezvous of torchrun uses a private file instead of a network store (docs/security.md).
set -euo pipefail
cd "$(dirname "$0")/.."

gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
# setsid runs torchrun in a separate session, so that signals of the terminal reach torchrun only through the trap
setsid torchrun --rdzv-backend=c10d --rdzv-conf=store_type=file --rdzv-id="$$" --local-addr=127.0.0.1 \
    --nproc-per-node="$gpus" --max-restarts="${MAX_RESTARTS:-3}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train_imagenet.py --resume auto "$@" &
run=$!
preempted=
trap 'preempted=yes; kill -TERM $run' TERM USR1 INT
wait $run && status=0 || status=$?
while kill -0 $run 2>/dev/null; do  # wait again if the trap interrupted the first wait
    wait $run && status=0 || status=$?
done
if [ $preempted ]; then
    exit 75
fi
exit $status
