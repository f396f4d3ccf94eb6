# One GPU: learning rates of study 5 beside the GPU tests of the candidate, then host times, steps and training from files
mkdir -p output/g output
work=$HOME/cand; mkdir -p $work; tar xzf .e/cand.tgz -C $work
(cd $work; CUDA_MPS_PIPE_DIRECTORY=/tmp/no_mps PYTHONPATH=$work VIL_CACHE_DIR=/tmp/cand_cache timeout 300 python3 -m pytest -q -p no:randomly -p no:cacheprovider \
    -p no:benchmark -m gpu tests -n 8 --dist worksteal --ignore tests/data/sources/test_splits.py --ignore tests/test_urls.py) > output/g/tests.txt 2>&1 &
tests=$!
timeout 200 python3 -m research.longer --jobs 3 --minutes 3 --out output/longer.json &
longer=$!
# the study would go on with runs of 100 epochs; stop when the learning rates are chosen
for i in $(seq 180); do
    sleep 1
    kill -0 $longer 2>/dev/null || break
    [ "$(ls -d output/longer/rates-0.000375/*/ 2>/dev/null | wc -l)" = 0 ] && [ $i -gt 40 ] && kill $longer && break
done
wait $longer $tests
export CUDA_MPS_PIPE_DIRECTORY=/tmp/no_mps
for tree in $PWD $work; do
    PYTHONPATH=$tree timeout 40 python3 .e/host.py $(basename $tree) > output/g/host_$(basename $tree).txt 2>&1
done
for tree in $PWD $work; do
    for case in train,224,128 infer,224,256; do
    PYTHONPATH=$tree timeout 40 python3 $tree/benchmarks/throughput.py --modes graph --cases $case --models vil_small_pooled vil_tiny_pooled \
        > output/g/steps_$(basename $tree)_$case.txt 2>&1
    done
done
PYTHONPATH=$PWD timeout 150 python3 benchmarks/end_to_end.py --configs vil_small --images 122880 --distinct 2000 --validation-images 2000 \
    --model vil_small_pooled > output/g/jpeg_small.txt 2>&1
