"""Tests of channels: workers send tensors to the training process, in any order and with any number in transit."""

import gc
import multiprocessing
import os
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from vil.data.host.channel import SentTensor, open_channel, send, send_bytes

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memfd_create")
SHAPE = (5, 3, 7)


class Numbers(Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, index):
        return index


class Collate:
    def __init__(self, channel):
        self.channel = channel

    def __call__(self, numbers):
        (number,) = numbers
        image = torch.full(SHAPE, number % 251, dtype=torch.uint8)
        parts = [b"%d" % number, b"", bytes(100_000)]
        return send(image, self.channel), send_bytes(parts, self.channel)


def loader(workers=2, **options):
    collate = Collate(open_channel())
    return DataLoader(Numbers(), num_workers=workers, collate_fn=collate, persistent_workers=workers > 0, **options)


def check(loaded, first=0):
    for number, (image, content) in enumerate(loaded, start=first):
        assert torch.equal(image, torch.full(SHAPE, number % 251, dtype=torch.uint8))
        assert content.numpy().tobytes() == b"%d" % number + bytes(100_000)


# one spawned worker, because each spawned worker imports all modules again
@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("forkserver", 2), ("spawn", 1)])
def test_sent_tensors_equal_the_workers_tensors(method, workers):
    check(loader(workers, multiprocessing_context=multiprocessing.get_context(method)))


def test_tensors_are_kept_without_workers():
    check(loader(0))


def test_an_epoch_that_is_cut_off_does_not_change_the_next_epoch():
    loaded = loader()
    for _, _ in zip(range(5), loaded):
        pass
    check(loaded)


def test_sending_waits_while_the_training_process_is_busy():
    """Workers wait until the training process reads, also with 1,200 tensors, more than a socket's queue holds."""
    loaded = iter(loader(prefetch_factor=300))
    check([next(loaded)])
    threading.Event().wait(1)
    check(loaded, first=1)


def test_tensors_may_be_received_in_another_order_than_sent():
    channel = open_channel()
    files = {b"%d" % number: os.memfd_create("test") for number in range(4)}
    for name, file in files.items():
        os.write(file, name)
        channel.send(name, file)
        os.close(file)
    for name in (b"2", b"0", b"3", b"1"):
        received = channel.receive(name)
        assert os.pread(received, 10, 0) == name
        os.close(received)


def open_files():
    gc.collect()  # close files of objects that earlier tests or this test no longer use
    return len(os.listdir("/proc/self/fd"))


def test_no_files_stay_open():
    before = open_files()
    loaded = loader()
    check(loaded)
    kept = [batch for _, batch in zip(range(100), loaded)]
    with_loader = open_files()
    assert with_loader - before < 50  # tensors that are in use need no open files
    del loaded, kept
    gc.collect()
    assert open_files() == before


def test_a_tensor_that_is_not_sent_closes_its_file():
    before = open_files()
    channel = open_channel()
    sent = SentTensor([b"abc"], [3], channel)
    del sent, channel
    assert open_files() == before
