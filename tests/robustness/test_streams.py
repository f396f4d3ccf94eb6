"""Tests of stdout and stderr: a reader that blocks stops neither training nor checkpoints."""

import contextlib
import io
import os
import pty
import runpy
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from processes import ROOT, Forked, become, draw_nothing, run, train_command

from vil import checkpoint
from vil.fault_tolerance.streams import MOST_PENDING, PIECE, BackgroundStream
from vil.training.interruption import PREEMPTED


@pytest.fixture
def stuck_pipe(tmp_path):
    """Return the path of a full pipe that nobody reads, and a function that reads part of the pipe's content."""
    os.mkfifo(path := tmp_path / "pipe")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)

    def read_some():
        with contextlib.suppress(BlockingIOError):
            return os.read(reader, 2**20)
        return b""

    yield path, read_some
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_finishes_although_nobody_reads_its_output_pipe(image_folder, tmp_path, stuck_pipe, processes):
    broken = tmp_path / "images"
    for file in image_folder.rglob("*.png"):
        copy = broken / file.relative_to(image_folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        # a broken image makes workers print a warning
        copy.write_bytes(file.read_bytes() if file.name != "1.png" else b"broken")
    run(train_command(tmp_path, broken), processes, output=str(stuck_pipe[0]))
    assert len(checkpoint.Checkpoint(tmp_path / "run" / "last.pt").training_state()["history"]) == 2


def train_printing_to(command, path):
    become(0, 1, 0, path, path)
    draw_nothing()
    sys.argv = command[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_a_run_whose_output_blocks(image_folder, tmp_path, stuck_pipe, number):
    command = train_command(tmp_path, image_folder, epochs=1000, checkpoint_interval=None)
    process = Forked(target=train_printing_to, args=(command, str(stuck_pipe[0])))
    process.start()
    stop_after_an_epoch(process, tmp_path, number)


def test_a_signal_saves_a_run_whose_terminal_was_stopped_by_ctrl_s(image_folder, tmp_path):
    screen, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    command = train_command(tmp_path, image_folder, epochs=1000, checkpoint_interval=None)
    process = Forked(target=train_printing_to, args=(command, os.ttyname(terminal)))
    process.start()
    stop_after_an_epoch(process, tmp_path, signal.SIGTERM)
    os.close(terminal)
    os.close(screen)


def stop_after_an_epoch(process, folder, number):
    last = folder / "run" / "last.pt"
    while not last.exists():
        assert process.is_alive()
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.join(60)
    process.kill()
    assert process.exitcode == PREEMPTED
    checkpoint.Checkpoint(last).training_state()


def stream_to(path):
    return BackgroundStream(open(path, "w", buffering=1))


def test_lines_of_two_streams_keep_their_order(tmp_path):
    path = tmp_path / "log"
    path.touch()
    out, err = (BackgroundStream(open(path, "a", buffering=1)) for _ in range(2))  # noqa: SIM115
    for i in range(300):
        print("out", i, file=out)
        print("err", i, "é\udcff", file=err)
    out.write("no line")
    assert "no line" not in path.read_text()
    out.flush()
    lines = "".join(f"out {i}\nerr {i} é\\udcff\n" for i in range(300))
    assert path.read_text() == lines + "no line"


def test_a_blocked_stream_uses_little_memory_and_keeps_the_newest_lines(stuck_pipe):
    path, read_some = stuck_pipe
    stream = stream_to(path)
    for i in range(3 * MOST_PENDING):
        print(f"line {i}", file=stream)
    print("x" * (PIECE * MOST_PENDING * 2), file=stream)
    assert stream._pieces.qsize() <= MOST_PENDING
    print("the last line", file=stream)
    read = b""
    while b"the last line\n" not in read:
        read += read_some()
    assert read.count(b"x") <= PIECE * MOST_PENDING


def test_a_slow_reader_receives_all_output(tmp_path):
    os.mkfifo(path := tmp_path / "pipe")
    read = io.BytesIO()

    def read_slowly():
        with open(path, "rb", buffering=0) as reader:
            while piece := reader.read(1000):
                read.write(piece)
                time.sleep(0.001)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    stream = stream_to(path)
    text = "".join(f"line {i}\n" for i in range(MOST_PENDING // 2)) + "y" * 200_000
    for line in text.splitlines(keepends=True):
        stream.write(line)
    stream.finish(60)
    stream.stream.close()
    reader.join()
    assert read.getvalue().decode() == text


FOLDER = ROOT / "vil" / "fault_tolerance"
PROGRAM = """
import os, sys, threading
from streams import exit_at_once, outlive_output  # alone, which is quick
outlive_output()
print("first")
if os.fork() == 0:
    print("of a fork")
    sys.exit()
os.wait()
print("last words", file=sys.stderr, end="")
{end}
"""
ENDS = {"sys.exit(3)": 3, "exit_at_once(3)": 3, "raise SystemExit('why')": 1, "raise ValueError('why')": 1}


@pytest.mark.parametrize("end", ENDS)
def test_buffered_output_is_printed_however_the_process_exits(end):
    words = [sys.executable, "-c", PROGRAM.format(end=end)]
    ended = subprocess.run(words, cwd=FOLDER, capture_output=True, text=True, timeout=100)
    assert ended.returncode == ENDS[end]
    assert ended.stdout == "first\nof a fork\n"
    assert ended.stderr.startswith("last words")
    assert ("why" in ended.stderr) == ("why" in end)


def test_a_process_whose_output_blocks_exits(stuck_pipe):
    program = "import sys; from streams import outlive_output; outlive_output(); print('x'); sys.exit('why')"
    with open(stuck_pipe[0], "w") as pipe:
        ended = subprocess.run([sys.executable, "-c", program], cwd=FOLDER, stdout=pipe, stderr=pipe, timeout=100)
    assert ended.returncode == 1


def test_a_background_stream_of_a_terminal_is_a_tty(tmp_path):
    screen, terminal = pty.openpty()
    with open(os.ttyname(terminal), "w") as stream:
        assert BackgroundStream(stream).isatty()
        assert BackgroundStream(stream).fileno() == stream.fileno()
    assert not stream_to(Path(tmp_path / "file")).isatty()
    os.close(terminal)
    os.close(screen)
