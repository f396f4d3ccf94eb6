"""Tests that the CUDA emulator detects errors that would fail on a GPU, such as races."""

import shutil

import emulator
import pytest
import torch

from vil.kernels.cuda import source
from vil.kernels.cuda.source import I64, In, Out, Source

pytestmark = emulator.EMULATED
X_AND_Y = dict(x=In("float"), y=Out("float"))
PARAMETERS = {
    "barriers": X_AND_Y | dict(waits=I64),
    "copies": X_AND_Y | dict(waits=I64),
    "moves": X_AND_Y | {"from": I64, "to": I64},
    "moves_vector": X_AND_Y | {"from": I64, "to": I64},
    "fills": dict(bytes=I64),
    "parts": {},
    "last": dict(y=Out("float")),
}
KERNELS = """
extern "C" __global__ void barriers(PARAMETERS_barriers) {
    __shared__ float values[64];
    values[threadIdx.x] = x[threadIdx.x];
    if (waits) __syncthreads();
    y[threadIdx.x] = values[63 - threadIdx.x];
    if (waits) __syncthreads();
    values[threadIdx.x] = y[threadIdx.x];
    if (waits) __syncthreads();
    y[threadIdx.x] = values[63 - threadIdx.x] + blockIdx.x;
}
extern "C" __global__ void copies(PARAMETERS_copies) {
    extern __shared__ __align__(16) char shared[];
    float *values = reinterpret_cast<float *>(shared) + 4 * threadIdx.x;
    copy_async<4>(values, x + 4 * threadIdx.x, threadIdx.x < 60);
    commit_copies();
    if (waits) wait_for_copies<0>();
    store(y + 4 * threadIdx.x, load<4>(values));
}
extern "C" __global__ void moves(PARAMETERS_moves) { y[to] = x[from]; }
extern "C" __global__ void moves_vector(PARAMETERS_moves_vector) {
    store(y + to, load<4>(x + from));
}
extern "C" __global__ void fills(PARAMETERS_fills) {
    extern __shared__ __align__(16) char shared[];
    shared[bytes - 1] = 0;
}
extern "C" __global__ void parts(PARAMETERS_parts) {
    if (threadIdx.x < 16) __syncwarp();
    else __syncthreads();
}
extern "C" __global__ void last(PARAMETERS_last) { y[0] = blockIdx.x, y[1] = gridDim.x; }
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Return a function launch(kernel, *arguments) that launches the kernels defined above."""
    shutil.copytree(source.SOURCES / "cuda", tmp_path / "cuda")
    (tmp_path / "tests.cu").write_text('#include "cuda/types.cuh"\n' + KERNELS)
    monkeypatch.setattr(source, "SOURCES", tmp_path)
    tests = Source("tests", PARAMETERS)

    def launch(entry, *arguments, ctas=1, threads=64, shared_bytes=0, **kwargs):
        named = dict(zip(PARAMETERS[entry], arguments, strict=True))
        emulator.launch(tests, entry, {}, ctas, threads, named, shared_bytes, **kwargs)

    return launch


def test_threads_that_do_not_wait_for_each_other_read_something_else(launch):
    x, y = torch.randn(64), torch.empty(64)
    for _ in range(20):
        launch("barriers", x, y, 1, ctas=3)
        assert any(torch.equal(y, x + cta) for cta in range(3))  # the CTAs run in any order
        launch("barriers", x, y, 0)
        assert not torch.equal(y, x)


def test_asynchronous_copies_arrive_only_after_a_wait(launch):
    x, y = torch.randn(256), torch.empty(256)
    launch("copies", x, y, 1, shared_bytes=1024)
    assert torch.equal(y, torch.where(torch.arange(256) < 240, x, 0))
    launch("copies", x, y, 0, shared_bytes=1024)
    assert y.isnan().all()


def test_memory_before_tensors_is_nan_and_must_not_be_written(launch):
    x, y = torch.randn(64), torch.zeros(64)
    launch("moves", x[8:], y, -3, 63, threads=32)
    assert y[63] == x[5]  # outside the view but inside the tensor's storage, reads are valid
    for outside in (-1, -100):
        launch("moves", x, y, outside, 63, threads=32)
        assert y[63].isnan()
        with pytest.raises(RuntimeError, match=r"kernel moves writes beyond the memory of its arguments \[1\]"):
            launch("moves", x, y, 0, outside, threads=32)
        assert not y[:63].any()


def test_memory_behind_tensors_must_be_neither_read_nor_written(launch):
    x, y = torch.randn(64), torch.zeros(63)
    for behind in (64, 100):
        for places in ((behind, 62), (0, behind)):
            with pytest.raises(RuntimeError, match="moves: memory outside of the arguments is accessed"):
                launch("moves", x, y, *places, threads=32)
            assert not y.any()
    # A copy of 63 elements is aligned to 16 bytes, so that one NaN follows before the unreadable memory.
    with pytest.raises(RuntimeError, match=r"kernel moves writes beyond the memory of its arguments \[1\]"):
        launch("moves", x, y, 0, 63, threads=32)
    launch("moves", x, y, 0, 62, threads=32)  # a failed launch does not break the next launch
    assert y[62] == x[0]


def test_vector_accesses_must_be_aligned(launch):
    x, y = torch.randn(64), torch.zeros(64)
    launch("moves_vector", x, y, 4, 8, threads=32)
    assert torch.equal(y[8:12], x[4:8])
    for places in ((1, 8), (2, 8), (4, 7)):
        with pytest.raises(RuntimeError, match="moves_vector: misaligned address"):
            launch("moves_vector", x, y, *places, threads=32)


def test_a_cta_may_write_the_shared_memory_that_it_has(launch):
    launch("fills", 100, shared_bytes=100)
    for more in (101, 1000):
        with pytest.raises(RuntimeError, match="fills: more shared memory is written than the block has"):
            launch("fills", more, shared_bytes=100)


def test_threads_at_different_barriers_do_not_wait_forever(launch):
    with pytest.raises(RuntimeError, match="parts: threads wait at different barriers"):
        launch("parts")
    y = torch.zeros(2)
    launch("last", y)  # a failed launch does not break the next launch
    assert y.tolist() == [0, 1]


def test_some_of_the_last_ctas_run_of_a_grid_that_is_too_large_for_all(launch):
    y = torch.zeros(2)
    launch("last", y, ctas=2**31 - 1, blocks=1)
    assert y.long().tolist() == [2**31 - 2 + 2, 2**31]  # fp32 rounds 2^31 - 2 and 2^31 - 1 to 2^31
    launch("last", y, ctas=1, blocks=5)
    assert y.tolist() == [0, 1]


@pytest.mark.skipif(not emulator.has_sparse(), reason="needs memory that is not reserved")
def test_sparse_tensors_cannot_be_copied_by_mistake():
    with emulator.sparse_where_large():
        x = torch.empty(2**34)
        x[-1] = 1
        assert x[-3:].tolist() == [0, 0, 1]
        for copy in (x.clone, lambda: torch.zeros(2**31)):
            with pytest.raises(RuntimeError, match="memory"):
                copy()
        del x, copy
        assert torch.zeros(2**20).sum() == 0
    assert torch.empty(3).shape == (3,)
