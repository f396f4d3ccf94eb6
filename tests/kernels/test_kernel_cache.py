"""Tests of the kernel cache with other users of the machine, damaged files and unwritable folders."""

import multiprocessing
import os
import pwd
import resource
import stat
import time

import pytest

from vil.kernels import cache
from vil.kernels.block.step_proj_bwd import SOURCE
from vil.kernels.cuda import compiler

pytest.importorskip("cuda.bindings")
EVIL = b"what somebody else wants to be run"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Set VIL_CACHE_DIR to a folder that does not exist yet, and return the folder."""
    monkeypatch.setenv("VIL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Replace the compiler by a stub that returns new code in each call. The returned list records the code."""
    found = []

    def compile_cubin(*arguments):
        found.append(f"version {len(found) + 1}".encode() * 20_000)
        return found[-1]

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    return found


def code(rank=8):
    return compiler.cached_cubin(SOURCE, "sm_90", (("RANK", rank),))


def entry_of(folder):
    (entry,) = folder.glob("*.sealed")
    return entry


@pytest.fixture
def given_to_another(monkeypatch):
    """Return a function that gives a file or folder to another user. Without root, the other owner is simulated."""

    def give(path):
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
            return
        given, fstat = path.stat().st_ino, os.fstat

        def status(descriptor):
            found = fstat(descriptor)
            return os.stat_result([*found[:4], 12345, *found[5:]]) if found.st_ino == given else found

        monkeypatch.setattr(os, "fstat", status)

    return give


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_no_other_user_can_write_to_the_cache_or_its_created_folders(umask, folder, monkeypatch):
    monkeypatch.setenv("VIL_CACHE_DIR", str(folder / "below" / "it"))
    before = os.umask(umask)
    try:
        kept = code()
    finally:
        os.umask(before)
    made = [folder, folder / "below", folder / "below" / "it", entry_of(folder / "below" / "it")]
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made] == [0] * 4
    assert code() == kept


DAMAGES = {
    "empty": lambda content: b"",
    "half a digest": lambda content: content[:31],
    "a digest": lambda content: content[:32],
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "a bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "no digest": lambda content: content[32:],  # early versions of the package wrote entries without a digest
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_entry_is_recompiled_and_replaced(damage, folder, compiled):
    code()
    entry = entry_of(folder)
    entry.write_bytes(DAMAGES[damage](entry.read_bytes()))
    assert code() == code() == compiled[1]
    assert len(compiled) == 2


def test_a_cache_entry_renamed_to_another_key_is_recompiled(folder, compiled):
    code(8)
    eight = entry_of(folder)
    content = eight.read_bytes()
    eight.rename(folder / "moved")
    code(16)
    entry_of(folder).write_bytes(content)
    assert code(16) == compiled[2]


def planted(folder):
    """Write a cache entry with an attacker's code and the correct digest, as another user could."""
    folder.mkdir(exist_ok=True)
    keys, read = [], cache.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "read", lambda name, key: keys.append((name, key)) or read(name, key))
        patch.setattr(cache, "write", lambda *_: None)
        code()
    ((name, key),) = keys
    entry = folder / name
    entry.write_bytes(cache._digest(key, EVIL) + EVIL)
    return entry


def test_whoever_can_write_a_cache_entry_controls_the_code_that_runs(folder, monkeypatch):
    """A forged entry that belongs to this user or root is loaded, because its writer can compute a valid digest."""
    folder.mkdir(mode=0o700)
    planted(folder)
    assert code() == EVIL
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda place: os.stat_result([*fstat(place)[:4], 0, *fstat(place)[5:]]))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert code() == EVIL


@pytest.mark.parametrize("which", ["folder", "entry"])
@pytest.mark.parametrize("how", ["owner", 0o020, 0o002], ids=["another's", "for the group", "for all"])
def test_cache_entries_writable_by_others_are_not_run_and_warned_about_once(
    which, how, folder, compiled, given_to_another
):
    folder.mkdir(mode=0o755)
    entry = planted(folder)
    entry.chmod(0o644)
    path = folder if which == "folder" else entry
    if how == "owner":
        given_to_another(path)
    else:
        path.chmod(path.stat().st_mode | how)
    compiled.clear()
    names = sorted(os.listdir(folder))
    with pytest.warns(UserWarning, match=f"^{path} .*user.*VIL_CACHE_DIR") as warned:
        found = [code(8), code(8), code(16)]
    assert EVIL not in found
    assert len(warned) == 1
    if how != "owner":
        assert f"chmod go-w {path}" in str(warned[0].message)
    if which == "folder":
        assert len(compiled) == 3
        assert sorted(os.listdir(folder)) == names
    else:
        assert len(compiled) == 2  # the first call replaces the untrusted cache entry
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600
        assert code() == found[0]


def test_a_folder_of_ours_where_all_may_write_is_used_and_one_that_was_put_there_before_is_not(
    folder, compiled, given_to_another
):
    folder.parent.chmod(0o777)
    assert code() == code() == compiled[0]
    folder.rename(folder.parent / "moved away")
    planted(folder)
    folder.chmod(0o755)
    given_to_another(folder)
    with pytest.warns(UserWarning, match="another user"):
        assert code() == compiled[-1] != EVIL


def test_links_are_not_followed(folder, tmp_path, compiled):
    folder.mkdir(mode=0o700)
    entry = planted(folder)
    elsewhere = entry.rename(tmp_path / "elsewhere")
    before = elsewhere.read_bytes()
    entry.symlink_to(elsewhere)
    kept = code()
    assert kept == code() == compiled[-1]
    assert not entry.is_symlink()
    assert elsewhere.read_bytes() == before
    target = folder.rename(tmp_path / "target")
    folder.symlink_to(target)
    names = sorted(os.listdir(target))
    with pytest.warns(UserWarning, match=f"^{folder} is a symbolic link"):
        assert [code(8), code(16)] == compiled[-2:]
    assert sorted(os.listdir(target)) == names


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_cache_entries_that_are_not_regular_files_are_ignored(make, folder, compiled):
    folder.mkdir(mode=0o700)
    entry = planted(folder)
    entry.unlink()
    make(entry)
    assert code() == compiled[-1]
    assert [path for path in folder.iterdir() if path != entry] == []


def test_a_full_disk_leaves_nothing_behind(folder, compiled):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert code() == compiled[-1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(folder) == []
    assert code() == code() == compiled[1]


def _write_and_die():
    os.replace = lambda *_, **__: os._exit(9)
    code()


def test_old_temporary_files_of_killed_processes_are_removed(folder, compiled):
    process = multiprocessing.get_context("fork").Process(target=_write_and_die)
    process.start()
    process.join()
    assert process.exitcode == 9
    (left,) = folder.iterdir()
    for name in ("notes.txt", ".notes.tmp", "tmpnotes"):  # files that the cache did not create are kept
        (folder / name).touch()
        os.utime(folder / name, (0, 0))
    code(8)
    assert left.exists()  # a recent temporary file is kept, because another process may still be writing to it
    os.utime(left, (time.time() - 7200,) * 2)
    code(16)
    assert sorted(f.name for f in folder.iterdir() if f.suffix != ".sealed") == [".notes.tmp", "notes.txt", "tmpnotes"]


def test_files_removed_concurrently_by_another_process_are_no_error(folder, compiled, monkeypatch):
    folder.mkdir(mode=0o700)
    left, unlink = folder / ".scan.sealed.0123456789abcdef.tmp", os.unlink
    left.touch()
    os.utime(left, (0, 0))

    def too_late(*path, **where):
        unlink(*path, **where)
        raise FileNotFoundError

    monkeypatch.setattr(os, "unlink", too_late)
    assert code() == code() == compiled[0]


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="does not list what is open")
def test_nothing_is_left_open(folder):
    code(8)
    before = len(os.listdir("/dev/fd"))
    code(8)
    code(16)
    assert len(os.listdir("/dev/fd")) == before


def test_an_unusable_cache_folder_costs_only_time(folder, compiled, monkeypatch):
    for place in ("/dev/null", "/dev/null/below", "/proc/nothing/below"):
        monkeypatch.setenv("VIL_CACHE_DIR", place)
        compiled.clear()
        assert [code(), code()] == compiled


def test_a_read_only_cache_is_read(folder, compiled):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    code(8)
    folder.chmod(0o500)
    assert [code(8), code(16), code(16)] == compiled
    folder.chmod(0o700)


def test_a_user_without_a_home_compiles(folder, compiled, monkeypatch):
    for name in ("VIL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert [code(), code()] == compiled
