"""Tests of a run's measurements: epoch means and times, causes of GPU idle time, and peak memory."""

import math
import re
import statistics
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import in_processes

from vil import distributed
from vil.data.host.loader import Waits
from vil.training import meter as measuring
from vil.training.bottleneck import Bottleneck
from vil.training.meter import EpochMeter

LOSSES = torch.tensor([2.5, 0.1, 0.7]).tolist()  # losses rounded to fp32
NORMS = 1.0, float("inf"), 4.0


def note(meter, losses=LOSSES, norms=NORMS):
    for loss, norm in zip(losses, norms):
        meter.add(torch.tensor(loss), torch.tensor(norm))


class Clock:
    """Clock that advances only when a test advances it."""

    def __init__(self):
        self.now = 1000.0

    def perf_counter(self):
        return self.now

    def batches(self, count, seconds):
        for batch in range(count):
            self.now += seconds
            yield batch


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    return clock


def test_losses_and_norms_are_averaged_over_the_steps():
    meter = EpochMeter()
    note(meter)
    assert (meter.steps, meter.losses) == (3, [])  # `add` must not synchronize with the device
    meter.collect()
    note(meter, [1.5], [math.nan])
    assert meter.steps == 4
    meter.collect()
    meter.collect()
    assert meter.losses == [*LOSSES, 1.5]
    row = meter.summary(global_batch_size=16)
    assert row["train_loss"] == statistics.fmean([*LOSSES, 1.5])
    assert row["grad_norm"] == 2.5  # the mean excludes steps that the float16 gradient scaler skipped
    meter = EpochMeter()
    note(meter, [1.0], [math.inf])
    meter.collect()
    assert math.isnan(meter.summary(1)["grad_norm"])


def train(meter, clock, steps, wait, work, loss=1.0, norm=1.0):
    for _ in meter.timed(clock.batches(steps, seconds=wait)):
        clock.now += work
        note(meter, [loss], [norm])


def test_an_epochs_time_starts_with_loading_and_ends_with_the_last_step(clock):
    meter = EpochMeter()
    clock.now += 100  # the time before the first batch is requested does not count
    train(meter, clock, 5, wait=3.0, work=5)
    clock.now += 2  # the epoch's time includes the wait until the device finishes the last step
    meter.collect()
    clock.now += 1000  # seconds of evaluation, which the epoch's time excludes
    row = meter.summary(global_batch_size=12)
    assert row["images_per_second"] == pytest.approx(5 * 12 / (5 * (3 + 5) + 2))
    assert row["data_wait_percent"] == pytest.approx(100 * 15 / 42)


def test_pauses_do_not_count_as_training_time(clock):
    meter = EpochMeter()
    for _ in meter.timed(clock.batches(2, seconds=3.0)):
        clock.now += 1
        with meter.paused():
            clock.now += 1000
        clock.now += 4
        note(meter, [1.0], [1.0])
    assert meter.times.seconds == pytest.approx(2 * (3 + 1 + 4))
    assert meter.times.waited == pytest.approx(2 * 3)


def test_a_restored_meter_continues_the_epoch(clock):
    whole, first = EpochMeter(), EpochMeter()
    for meter in (whole, first):
        train(meter, clock, 3, wait=1.0, work=2, loss=0.3, norm=0.9)
        meter.collect()
        meter.times.waited_for_gpu = 2.0
    second = EpochMeter()
    second.load_state_dict(first.state_dict())
    clock.now += 1e6  # the time until a run resumes does not count
    for meter in (whole, second):
        train(meter, clock, 2, wait=4.0, work=1, loss=0.7, norm=1.1)
        meter.collect()
    assert (second.steps, second.losses, second.norms) == (5, whole.losses, whole.norms)
    rows = [meter.summary(8) for meter in (whole, second)]
    assert rows[0] == rows[1]
    assert rows[0]["images_per_second"] == pytest.approx(40 / (3 * 3 + 2 * 5))


def measure(rank):
    distributed.init_process_group("cpu")
    clock = measuring.time = Clock()
    meter = EpochMeter()
    train(meter, clock, 1, wait=(1.0, 3.0)[rank], work=(3.0, 1.0)[rank], loss=(0.1, 0.2)[rank], norm=(1.0, 4.0)[rank])
    meter.collect()
    bottleneck = Bottleneck(1)
    bottleneck.look(meter, SimpleNamespace(waits=Waits(for_model=float(rank))))
    row = meter.summary(global_batch_size=16) | dict(looked=astuple(bottleneck.times))
    distributed.destroy_process_group()
    return row


def test_means_are_computed_over_all_ranks():
    rows = [ended.value for ended in in_processes(2, measure)]
    for row in rows:
        assert row["train_loss"] == statistics.fmean(torch.tensor([0.1, 0.2]).tolist())
        assert row["grad_norm"] == 2.5
        assert row["images_per_second"] == 4.0  # counts the images of both ranks
        assert row["data_wait_percent"] == 50.0  # 4 of 8 seconds are spent waiting for data
        assert row["looked"] == (8.0, 4.0, 0.0, 0.0, 1.0, 0.0)


def looked(clock, steps, caplog):
    """Simulate epochs from each step's seconds of waiting and work, and return the logged warnings."""
    bottleneck, waits = Bottleneck(5), Waits()
    with caplog.at_level("WARNING"):
        for epoch in steps:
            meter = EpochMeter()
            for i, (data, model, preparation, host, gpu) in enumerate(epoch, start=1):
                meter.times.seconds += data + model + preparation + host + gpu
                meter.times.waited += data + model + preparation
                waits = Waits(waits.for_model + model, waits.for_preparation + preparation)
                meter.times.waited_for_gpu += gpu
                meter.losses.append(0.0)
                if i % 5 == 0:
                    meter.times.seconds += 1
                    meter.times.waited_for_gpu += 1
                    meter.times.waited_at_looks += 1
                loader = SimpleNamespace(description="3 workers", remedy="--workers 14", waits=waits)
                bottleneck.look(meter, loader)
    return caplog.messages


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ((5, 0, 1, 2, 0.1), r"waiting for images \(3 workers\) \(60%\): --workers 14"),
        ((1, 0, 1, 5, 0.0), r"launching work from the training process \(69%\): --cuda-graphs, .*"),
        (
            (1, 0, 4, 3, 0.0),
            r"preparing images \(3 workers\) \(49%\): files of fewer pixels",
        ),
        ((6, 0, 0, 2, 0.2), None),  # the host also waits for the GPU, so the GPU is busy
        ((4, 2, 0, 2, 0), None),  # the loader waits until the model frees memory, so the GPU is busy
        ((0, 0, 0, 0.1, 9), None),
    ],
)
def test_the_cause_of_gpu_idle_time_is_logged_once(clock, caplog, monkeypatch, step, said):
    start = [(50, 0, 0, 0, 0)] * 5  # first steps of an epoch, while workers start to load
    messages = looked(clock, [start, start + [step] * 10, start + [step] * 10], caplog)
    assert len(messages) == (said is not None)
    assert said is None or re.search(f"{said} may help$", messages[0])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")  # only rank 0 logs
    caplog.clear()
    assert not looked(clock, [start, start + [step] * 10], caplog)


def test_the_host_runs_at_most_four_steps_ahead_and_measures_its_waiting_time(clock, monkeypatch):
    waited_for = []

    class Event:
        def __init__(self, blocking):
            assert blocking  # a spinning host would take a CPU core from the loader
            self.number = len(events)
            events.append(self)

        def record(self):
            pass

        def synchronize(self):
            clock.now += 7
            waited_for.append(self.number)

    events = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    meter = EpochMeter()
    for step in range(7):
        clock.now += 1
        note(meter, [1.0], [1.0])
        assert waited_for == list(range(step - 3))
    assert astuple(meter.times) == (7 + 3 * 7, 0, 3 * 7, 0)
    meter.collect()
    assert waited_for == [0, 1, 2, 3, 4, 5, 6]
    assert astuple(meter.times) == (7 + 7 * 7, 0, 7 * 7, 4 * 7)
    assert meter.summary(8)["gpu_wait_percent"] == pytest.approx(100 * 49 / 56)


def fill_memory(rank):
    torch.ones(100 * 2**20 // 4)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    meter = EpochMeter()
    note(meter)
    meter.collect()
    return meter.summary(1)["peak_memory_gib"], int(status["VmHWM"].split()[0]) / 2**20


def test_peak_memory_equals_the_operating_systems_value():
    ((taken, truth),) = (ended.value for ended in in_processes(1, fill_memory))
    assert taken == pytest.approx(truth, rel=0.02)
