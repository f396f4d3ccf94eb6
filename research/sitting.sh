#!/usr/bin/env bash
# A sitting of a study on a machine that is lent for half an hour: it starts bare, has no network, and takes and gives
# back 64 MiB a call. Each line is a call, from the root of the copy of this checkout that it brings along:
#
#     research/sitting.sh unpack           # data/tiny_parts/*.tar.gz, as many times as there are parts
#     research/sitting.sh start COMMAND    # tries the package on every GPU, then leaves the command running
#     research/sitting.sh wait SECONDS     # so long or until it has ended; results go to $OUT every half minute
#
# A start that fails starts nothing, and every wait behind it fails at once: no minutes go by with nothing done. Calls
# follow each other without a pause, as the machine is taken back soon. The weights need not travel.
set -euo pipefail
place=$HOME/sitting  # each call brings the checkout anew, so the study runs in a copy

save() {  # whatever is there: tar complains of files that change or go while it reads them
    (cd "$place" && find output -name '*.json' -o -name '*.csv*' -o -name '*.txt' -o -name '*.jsonl') |
        tar czf "$place/results" -C "$place" -T - || true
    cp "$place/results" "$OUT/writing" && mv "$OUT/writing" "$OUT/results.tar.gz" || true
}

case $1 in
unpack)
    mkdir -p "$place/data/tiny_imagenet"
    for part in data/tiny_parts/*.tar.gz; do
        tar xzf "$part" -C "$place/data/tiny_imagenet"
    done
    ;;
start)
    mkdir -p "$place/output"
    tar c --exclude ./data --exclude ./output . | tar x -C "$place"
    cd "$place"
    # if git came along: weights that stayed behind would have the commit called dirty
    [ ! -e .git ] || git ls-files -z 'weights/*.safetensors' | xargs -0 git update-index --skip-worktree
    python3 -m pip install --quiet --no-build-isolation --no-deps --editable .  # not in a venv: it would not see PyTorch
    python3 - <<'PROGRAM'
import torch
import timm
import vil

for device in [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]:
    for name in ("vil_tiny", "vim_tiny", "vil_tiny_pooled"):
        model = timm.create_model(name, img_size=64, patch_size=4).to(device)
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            model(torch.randn(2, 3, 64, 64, device=device)).float().square().mean().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters()), name
    print(device, torch.cuda.get_device_name(device) if device != "cpu" else "", flush=True)
PROGRAM
    shift
    setsid nohup "$@" > output/log.txt 2>&1 < /dev/null &
    echo $! > process
    ;;
wait)
    read -r process < "$place/process"
    for ((second = 0; second < $2; second++)); do
        kill -0 "$process" 2>/dev/null || break
        sleep 1
        ((second % 30)) || save
    done
    save
    tail -n 20 "$place/output/log.txt"
    find "$place/output" -name summary.csv -exec wc -l {} +
    kill -0 "$process" 2>/dev/null || { echo "it has ended"; exit 1; }
    ;;
esac
