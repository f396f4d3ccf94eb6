#!/usr/bin/env bash
# Trains on all GPUs of this machine (or on GPUS=N of them), starts again by itself after a failure, and goes on with
# the run if it has begun before:
#
#     scripts/single_node.sh -c configs/vil_tiny.yaml --data-dir /imagenet
#
# Ctrl-C, SIGTERM and SIGUSR1 make the run write a checkpoint; the exit status is 75 then.
#
# The launcher keeps what its processes agree on in a private file and not in a store on the network (docs/security.md).
set -euo pipefail
cd "$(dirname "$0")/.."

gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
# in a session of its own: what a terminal sends reaches it once, by the trap
setsid torchrun --rdzv-backend=c10d --rdzv-conf=store_type=file --rdzv-id="$$" --local-addr=127.0.0.1 \
    --nproc-per-node="$gpus" --max-restarts="${MAX_RESTARTS:-3}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train_imagenet.py --resume auto "$@" &
run=$!
preempted=
trap 'preempted=yes; kill -TERM $run' TERM USR1 INT
wait $run && status=0 || status=$?
while kill -0 $run 2>/dev/null; do  # the trap ended the wait
    wait $run && status=0 || status=$?
done
if [ $preempted ]; then
    exit 75
fi
exit $status
