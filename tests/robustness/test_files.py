"""Tests of a run's files, folder lock and output streams: other users, concurrent runs, crashes, lost terminals."""

import errno
import fcntl
import functools
import multiprocessing
import os
import pty
import runpy
import stat
import sys
import threading
from time import monotonic, sleep

import pytest
from faults import before
from processes import Forked, become, draw_nothing, in_processes, run, train_command

from vil import checkpoint
from vil.fault_tolerance import files, locks
from vil.fault_tolerance.files import write_atomically
from vil.fault_tolerance.locks import FolderInUseError, FolderLock
from vil.fault_tolerance.output import check_outputs
from vil.fault_tolerance.streams import BackgroundStream, outlive_output
from vil.training import trainer as training_loop


def test_a_file_is_written_atomically(tmp_path, monkeypatch):
    path, fsync, sizes, opened = tmp_path / "summary.csv", os.fsync, [], os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size) or fsync(file))
    write_atomically(path, "one")
    assert sizes[0] == 3  # the whole content is on the disk before the rename
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"

    def fail(file):
        file.write(b"half of ")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_bytes() == b"two"
    with pytest.raises(OSError, match=r"No space left on device: '.*summary\.csv'$"):  # I/O errors name the target file
        write_atomically(path, lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match=rf"^\[[^]]*\] [^']*: '{tmp_path}'$"):  # a folder cannot be replaced
        write_atomically(tmp_path, "four")
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.csv"]
    assert os.listdir("/proc/self/fd") == opened  # no descriptor leaks


def test_concurrent_readers_never_see_a_partially_written_file(tmp_path):
    path, contents = tmp_path / "file", {b"a" * 200_000, b"b" * 200_000}
    write_atomically(path, min(contents))
    writers = [
        threading.Thread(target=lambda content=content: [write_atomically(path, content) for _ in range(30)])
        for content in contents
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in contents
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_writing_replaces_links_instead_of_following_them(tmp_path, monkeypatch):
    """In a folder that other users may write to, such as /tmp, writing never changes the target of a link."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in ("last.pt", "last.pt.tmp", ".last.pt.tmp"):
        (folder / name).symlink_to(precious)
    names = set()
    for content in ("one", "two"):

        def write(file, content=content):
            names.add(file.name)
            file.write(content.encode())

        write_atomically(folder / "last.pt", write)
    assert precious.read_text() == "precious"
    assert not (folder / "last.pt").is_symlink()
    assert (folder / "last.pt").read_text() == "two"
    assert len(names) == 2  # temporary names are unpredictable
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "known")
    (folder / ".last.pt.known.vil.tmp").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_atomically(folder / "last.pt", "three")
    assert precious.read_text() == "precious"


def test_checking_output_paths_leaves_no_files(tmp_path):
    (before := tmp_path / "before.csv").write_text("of an earlier command")
    check_outputs([before, tmp_path / "new" / "er" / "out.json"])
    assert before.read_text() == "of an earlier command"
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"before.csv", "new", "new/er"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_get_the_users_usual_permissions(tmp_path, umask, mode):
    old = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", "content")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_a_folder_is_locked_by_one_run(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    lock = FolderLock(tmp_path / "run")
    message = rf"run is in use: process {os.getpid()} on here has trained here since 20\d\d-.*--experiment NAME"
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")  # the second run is on another host
    half = tmp_path / "run" / ".last.pt.0123456789abcdef.vil.tmp"
    half.write_text("half of a checkpoint")
    with pytest.raises(FolderInUseError, match=message):
        FolderLock(tmp_path / "run")
    assert half.exists()  # the process that holds the lock may still be writing the file
    FolderLock(tmp_path / "other").release()
    (tmp_path / "run" / ".holder").unlink()  # a process that just acquired the lock has not written .holder yet
    with pytest.raises(FolderInUseError, match="run is in use: another process. Stop that run first"):
        FolderLock(tmp_path / "run")
    lock.release()
    FolderLock(tmp_path / "run").release()  # a released lock can be acquired again


def leave_escape_codes(holder):
    holder.write_text("process \x1b]0;owned\x07 on\nhost \u202e" + "x" * 10**6)


def leave_bytes(holder):
    holder.write_bytes(b"process \xff\xfe on host")


@pytest.mark.parametrize("leave", [leave_escape_codes, leave_bytes, os.mkfifo, os.mkdir])
def test_the_holder_of_a_lock_is_named_in_one_printable_line_whatever_its_file_contains(leave, tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    lock = FolderLock(tmp_path)
    (tmp_path / ".holder").unlink()
    leave(tmp_path / ".holder")
    with pytest.raises(FolderInUseError, match="is in use: (process|another process)") as refused:
        FolderLock(tmp_path)
    lock.release()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 2000


LOCK_ERRORS = [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP]


@pytest.mark.parametrize("number", LOCK_ERRORS, ids=errno.errorcode.get)
def test_a_file_system_without_locks_causes_a_warning_and_no_stale_lock(number, tmp_path, monkeypatch, caplog):
    def failing_flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", failing_flock)
    for _ in range(2):  # the second lock finds the files of the first lock, which is not released
        lock = FolderLock(tmp_path)
    lock.release()
    assert f"{tmp_path} cannot be locked ({os.strerror(number)})" in caplog.text
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_system_without_folder_fsync_causes_one_warning_and_files_stay_complete(
    number, tmp_path, monkeypatch, caplog
):
    fsync = os.fsync

    def fsync_of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_of_files)
    for content in ("one", "two"):
        write_atomically(tmp_path / "file", content)
    assert (tmp_path / "file").read_text() == "two"
    assert len(caplog.messages) == 1
    assert "has no fsync" in caplog.text


def test_a_forked_copy_of_a_lock_does_not_release_the_runs_lock(tmp_path, monkeypatch):
    """A forked worker has a copy of the run's lock, and releasing the copy must not release the run's lock."""
    monkeypatch.setattr(locks, "PATIENCE", 0.1)
    lock = FolderLock(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=lock.release)
    child.start()
    child.join()
    with pytest.raises(FolderInUseError):
        FolderLock(tmp_path)
    lock.release()


def hold_and_crash(folder, ready):
    lock = FolderLock(folder)
    (folder / ".last.pt.0123456789abcdef.vil.tmp").write_text("half of a checkpoint")
    ready.set()
    threading.Event().wait()
    del lock


def test_a_lock_of_a_crashed_run_is_released_and_its_temporary_files_are_removed(tmp_path):
    context = multiprocessing.get_context("fork")
    holder = context.Process(target=hold_and_crash, args=(tmp_path, ready := context.Event()))
    holder.start()
    assert ready.wait(60)
    assert list(tmp_path.glob(".last.pt.*"))
    threading.Timer(0.3, holder.kill).start()  # as if a child process of the killed run still held the lock
    others = [tmp_path / name for name in (".notes.tmp", ".notes.vil.tmp", ".notes.0123456789abcdef.tmp")]
    for path in others:
        path.write_text("somebody's")
    others.append(tmp_path / ".notes.0123456789abcdef.vil.tmp")
    others[-1].mkdir()
    FolderLock(tmp_path).release()
    assert not list(tmp_path.glob(".last.pt.*"))
    assert all(path.exists() for path in others)
    assert f"process {os.getpid()} " in (tmp_path / ".holder").read_text()


@pytest.mark.parametrize("time", range(int(os.environ.get("TWO_RUNS", 1))))
def test_of_two_runs_in_one_folder_one_trains_and_the_other_fails_with_the_reason(start, tmp_path, time):
    runs = [start(1, functools.partial(hasten, tmp_path / "log.txt"), epochs=4) for _ in range(2)]
    codes = [run.wait()[0] for run in runs]
    assert sorted(codes) == [0, 1]
    log = runs[0].said()
    assert log.count("is in use: process") == 1
    assert "Traceback" not in log
    for name in ("last.pt", "previous.pt"):
        checkpoint.Checkpoint(runs[0].folder / name).training_state()
    assert len(checkpoint.Checkpoint(runs[0].folder / "last.pt").training_state()["history"]) == 4


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_continues_with_a_full_disk_or_a_broken_pipe_as_its_stdout(image_folder, tmp_path, processes):
    """Training continues if stdout and stderr are a full device, or a pipe whose reader exits like `head`."""
    os.mkfifo(fifo := tmp_path / "fifo")

    def read_a_little():
        with open(fifo, "rb", buffering=0) as reader:
            reader.read(1)

    threading.Thread(target=read_a_little, daemon=True).start()
    for output in ("/dev/full", str(fifo)):
        (folder := tmp_path / str(len(output))).mkdir()
        run(train_command(folder, image_folder), processes, output=output)
        assert len(checkpoint.Checkpoint(folder / "run" / "last.pt").training_state()["history"]) == 2
    with open(os.devnull, "w") as closed:
        pass
    print("more", file=BackgroundStream(closed), flush=True)


def close_and_go_on(rank):
    for number in (1, 2):
        os.close(number)
    sys.stdout = sys.stderr = None  # Python sets closed streams to None
    outlive_output()
    for stream in (sys.stdout, sys.stderr):
        print("nobody hears this", file=stream)
    return [os.get_inheritable(number) for number in (1, 2)]


def test_closed_standard_streams_are_reopened_and_inheritable():
    """Closed streams are reopened, because a new file would otherwise get descriptor 0, 1 or 2."""
    (ended,) = in_processes(1, close_and_go_on)
    assert ended.value == [True, True]


def print_a_name_that_is_no_text(rank):
    outlive_output("stderr")
    for stream in (sys.stdout, sys.stderr):
        print("caf\udce9", file=stream)


def test_file_names_that_are_not_utf_8_are_printed_escaped():
    assert [ended.errors for ended in in_processes(1, print_a_name_that_is_no_text)] == ["caf\\udce9\n" * 2]


def train_in_a_terminal(command, terminal):
    os.setsid()
    os.open(terminal, os.O_RDWR)  # the terminal becomes the controlling terminal of the session
    become(0, 1, 0, terminal, terminal)
    draw_nothing()
    sys.argv = command[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def test_a_run_continues_when_its_terminal_is_closed(image_folder, tmp_path):
    screen, terminal = pty.openpty()
    command = train_command(tmp_path, image_folder)
    process = Forked(target=train_in_a_terminal, args=(command, os.ttyname(terminal)))
    process.start()
    said = b""
    while b"micro-batches of" not in said:  # the run prints the size of its micro-batches before the first step
        said += os.read(screen, 1000)
    os.close(terminal)
    os.close(screen)  # closing the terminal sends SIGHUP, and writing to the terminal fails from now on
    process.join(100)
    assert process.exitcode == 0
    assert len(checkpoint.Checkpoint(tmp_path / "run" / "last.pt").training_state()["history"]) == 2


def hasten(log):
    """Make runs wait only 0.1 seconds for a lock, and train only after `log` has reported that a folder is in use."""
    locks.PATIENCE = 0.1
    before(training_loop.Trainer, "run", lambda: wait_for("is in use", log))


def wait_for(words, log):
    end = monotonic() + 60
    while words not in log.read_text() and monotonic() < end:
        sleep(0.01)
