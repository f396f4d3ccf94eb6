"""Tests of selecting a kernel variant and segment length: the cost model against measurements, and bounds."""

import itertools

import emulator
import pytest
import torch

from vil.kernels.cuda import hardware
from vil.kernels.cuda.elements import vector_width
from vil.kernels.scan import cuda_scan, heuristics
from vil.kernels.scan.heuristics import BACKWARD, FORWARD_MMA, FORWARD_SIMT, Backward, ForwardMma, ForwardSimt, Schedule

H200, A100 = 132, 108  # multiprocessors
RECURRENCES = pytest.mark.parametrize("recurrence", ["longhorn", "selective"])


# lanes of 4 channels with 16 states; cycles for one to three warps on a scheduler
LANES = ForwardSimt(16, 4, 4, (540, 910, 1365))
BACK = Backward(4, (670, 1035, 1400))  # 4 lanes for 4 channels; cycles for one to three CTAs of 4 warps
SCHEDULERS = 4 * H200


@pytest.mark.parametrize(
    ("variant", "channels", "N", "itemsize", "short", "cycles"),
    [
        # one warp on every scheduler, then two, then three, and a second wave of three
        (LANES, 128 * SCHEDULERS, 16, 2, 0, 3000 + 100 * 540),
        (LANES, 128 * SCHEDULERS + 1, 16, 2, 0, 3000 + 100 * 910),
        (LANES, 3 * 128 * SCHEDULERS + 1, 16, 2, 0, 2 * (3000 + 100 * 1365)),
        # A segment of few tokens adds a warp but no wave.
        (LANES, 3 * 128 * SCHEDULERS, 16, 2, 999, 3000 + 100 * 1365),
        # Wider inputs leave room for two CTAs, 4 states need one channel in a lane, and 64 states need half of a CTA's
        # warps.
        (BACK, 3 * 32 * SCHEDULERS, 16, 4, 0, 2 * (3000 + 100 * 1035)),
        (BACK, 32 * SCHEDULERS, 4, 2, 0, 3000 + 100 * 670),
        (Backward(2, (800, 1200)), 3 * 4 * SCHEDULERS, 64, 2, 0, 4 * (3000 + 100 * 800)),
        # CTAs of a multiprocessor run sequentially.
        (FORWARD_MMA[0], 96 * H200, 16, 2, 0, 19000 + 100 * 87),
        (FORWARD_MMA[0], 96 * H200 + 1, 16, 2, 0, 2 * (19000 + 100 * 87)),
    ],
)
def test_cycles_are_those_of_the_warps_that_fit_in_waves(variant, channels, N, itemsize, short, cycles):
    assert heuristics.cycles(variant, channels, N, itemsize, 100, H200, short) == cycles


CASES = list(itertools.product((1, 2, 16, 256), (1, 40, 768), (1, 64, 65, 197, 1025, 20000), (4, 16, 32, 64), (2, 4)))


@RECURRENCES
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_choice_covers_the_sequence_and_fits_a_cta(kind, recurrence):
    for sequences, D, L, N, itemsize in CASES:
        for multiprocessors, vectors, limit in (
            (H200, True, 227 * 1024),
            (A100, False, 163 * 1024),
            (1, True, 99 * 1024),
        ):
            arguments = sequences, D, L, N, itemsize, multiprocessors, vectors, limit
            variant, segment_chunks = heuristics.choose(kind, recurrence, *arguments)
            assert 1 <= segment_chunks <= -(-L // 64)
            assert isinstance(variant, Backward) == (kind == "backward")
            if isinstance(variant, ForwardMma):
                assert (recurrence, N, itemsize, vectors) == ("longhorn", 16, 2, True)
                assert variant.shared_bytes() <= limit


@RECURRENCES
def test_every_variant_is_the_best_for_some_inputs(recurrence):
    shapes = *CASES, (256, 384, 197, 16, 2), (256, 768, 197, 16, 2), (8, 768, 6085, 16, 2)
    chosen = {heuristics.choose(kind, recurrence, *s, H200)[0] for kind in ("forward", "backward") for s in shapes}
    every = {*FORWARD_SIMT[recurrence], *BACKWARD[recurrence]}
    assert chosen == every | set(FORWARD_MMA if recurrence == "longhorn" else [])


def test_two_tokens_at_a_time_are_for_longhorn_in_16_bits_and_a_cta_that_has_the_memory():
    def consumers(recurrence, N, itemsize, *rest):
        found = heuristics.forward_variants(recurrence, N, itemsize, *rest)
        assert found[: len(FORWARD_SIMT[recurrence])] == FORWARD_SIMT[recurrence]
        return [v.consumers for v in found[len(FORWARD_SIMT[recurrence]) :]]

    assert consumers("longhorn", 16, 2) == [6, 3]
    assert consumers("longhorn", 16, 2, False) == []
    assert consumers("longhorn", 16, 2, True, 99 * 1024) == [3]
    assert consumers("longhorn", 16, 2, True, FORWARD_MMA[0].shared_bytes()) == [6, 3]
    assert consumers("longhorn", 16, 2, True, FORWARD_MMA[0].shared_bytes() - 1) == [3]
    for recurrence, N, itemsize in ("longhorn", 16, 4), ("longhorn", 32, 2), ("longhorn", 8, 2), ("selective", 16, 2):
        assert consumers(recurrence, N, itemsize) == []


def test_three_tokens_at_a_time_are_for_the_gradients_of_longhorn_in_16_bits():
    every = itertools.product(("forward", "backward"), ("longhorn", "selective"), (4, 8, 16, 32, 64), (2, 4))
    triples = [case for case in every if heuristics.segment_variant(*case) is heuristics.SEGMENT_GRADIENTS_MMA]
    assert triples == [("backward", "longhorn", 16, 2)]


@pytest.mark.parametrize("N", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_ctas_of_backward_fit_a_multiprocessor_and_use_it(N, itemsize):
    for variant in heuristics.backward_variants("longhorn", N) + heuristics.backward_variants("selective", N):
        for channels in {1, variant.lane_channels(N)}:
            warps, shared_bytes, resident = variant.cta(N, itemsize, channels)
            assert warps in (1, 2, 4)
            assert shared_bytes <= 99 * 1024
            # the number of warps is halved only if shared memory requires it
            of_keys = 4 * 64 * (2 * N + 1)
            assert warps == 4 or of_keys + 2 * (shared_bytes - of_keys) > 99 * 1024
            assert 1024 <= resident * (shared_bytes + 1024) <= 228 * 1024
            # registers suffice for 12 warps with 16-bit inputs and long keys, and for 8 warps otherwise
            most = (3 if itemsize == 2 and N in (16, 32) else 2) * 4 // warps
            assert resident == most or (resident + 1) * (shared_bytes + 1024) > 228 * 1024


def test_a_large_batch_is_not_cut_and_one_long_image_is(monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, H200)
    for recurrence in ("longhorn", "selective"):
        for kind in ("forward", "backward"):
            for (B, L), cut in (((128, 197), False), ((1, 6085), True)):
                x = torch.empty(2, B, L, 768, device="meta", dtype=torch.bfloat16)
                assert (cuda_scan._choose(kind, recurrence, x, 16, vectors=True).segments(L) > 1) == cut


def test_the_tensor_cores_scan_needs_vectors_and_the_smaller_one_less_shared_memory(monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, H200)
    x = torch.empty(2, 8, 6085, 768, device="meta", dtype=torch.bfloat16)
    assert isinstance(cuda_scan._choose("forward", "longhorn", x, 16, vectors=False).variant, ForwardSimt)
    assert cuda_scan._choose("forward", "longhorn", x, 16, vectors=True).variant == FORWARD_MMA[0]
    monkeypatch.setattr(hardware, "shared_bytes", lambda device: 99 * 1024)
    assert cuda_scan._choose("forward", "longhorn", x, 16, vectors=True).variant == FORWARD_MMA[1]


def test_the_step_is_projected_by_the_scan_of_long_sequences_and_of_few(monkeypatch):
    emulator.as_if_on_a_gpu(monkeypatch, H200)

    def projects(B, L, D=768, recurrence="longhorn", R=24, N=16, dtype=torch.bfloat16):
        x = torch.empty(2, B, L, D, device="meta", dtype=dtype)
        return cuda_scan.forward_schedule(recurrence, x, N, R).projects_step(L, R)

    assert projects(8, 6085)
    assert projects(8, 6085, R=48)
    others = dict(R=12), dict(D=764), dict(recurrence="selective"), dict(N=32), dict(dtype=torch.float32)
    assert not any(projects(8, 6085, **other) for other in others)
    assert not projects(128, 197)
    assert projects(1, 197)  # although the scan alone would be faster from logits
    # Divided sequences are not projected, either.
    monkeypatch.setattr(heuristics, "choose", lambda *args: Schedule(FORWARD_MMA[0], 4))
    assert [projects(1, L) for L in (256, 257)] == [True, False]


@pytest.mark.parametrize("dimensions", [3, 4])
@pytest.mark.parametrize("limit", [4, 8])
def test_vectors_are_as_wide_as_every_row_of_every_tensor_allows(limit, dimensions):
    g = torch.Generator().manual_seed(0)

    def view(multiple):
        """Return a view with strides that are multiples of `multiple`; most of its rows start at such a multiple."""
        start, *strides, n = (int(i) * multiple for i in torch.randint(1, 5, (5,), generator=g))
        sizes = (2, 3) if dimensions == 3 else (2, 2, 3)
        start += int(torch.randint(4, (), generator=g) == 0)
        return torch.zeros(4096, dtype=torch.bfloat16).as_strided((*sizes, n), (*strides[: len(sizes)], 1), start)

    seen = set()
    for i in range(200):
        tensors = [view(2 ** (i % 4)) for _ in range(2)]
        rows = [t[place] for t in tensors for place in itertools.product(*map(range, t.shape[:-1]))]
        starts = [row.data_ptr() // 2 for row in rows] + [len(row) for row in rows]
        widest = next(w for w in (8, 4, 2, 1) if w <= limit and all(start % w == 0 for start in starts))
        assert vector_width(limit, *tensors) == widest
        seen.add(widest)
    assert seen == {w for w in (1, 2, 4, 8) if w <= limit}
