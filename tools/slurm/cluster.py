"""Slurm cluster on one machine: a controller and nodes, each with its own network, host name and processes.

The cluster needs root, Debian's packages slurm-wlm, munge and iproute2, and a Python that was started by

    unshare --mount --net --uts --pid --fork --kill-child --mount-proc python ...

so that the cluster cannot affect the machine itself and ends with that Python.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

# Credentials expire after 5 seconds, because a requeued job waits until its earlier credentials have expired.
CONFIG = """
ClusterName=test
SlurmctldHost=head(10.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=15
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[0-{last}] CPUs={cpus} Gres=gpu:1
PartitionName=normal Nodes=ALL PriorityTier=1 Default=YES
PartitionName=graceful Nodes=ALL PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


def wait_until(condition: Callable, seconds: float, what: str):
    """Wait until `condition` returns a true value, and return this value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not in {seconds} s: {what}"
        time.sleep(0.1)
    return value


def command(*words: str | os.PathLike) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


class Cluster:
    """Emulated Slurm cluster of `nodes` nodes (node0, node1, ...), each with all CPU cores and one fake GPU.

    Args:
        folder: Folder for the cluster's files; a deep folder would exceed the length limit of socket names.
    """

    def __init__(self, folder: Path, nodes: int = 2):
        assert os.listdir("/sys/class/net") == ["lo"] or os.getpid() < 10, "start this by unshare, as cluster.py says"
        self.folder, self.daemons, self.nodes = folder, [], {}
        command("hostname", "head")
        command("mount", "-t", "tmpfs", "tmpfs", "/run")  # the command `ip netns` needs a writable /run
        (folder / "state").mkdir()
        hosts = folder / "hosts"
        addresses = {"localhost": "127.0.0.1", "head": "10.0.0.1"} | {f"node{i}": f"10.0.0.1{i}" for i in range(nodes)}
        hosts.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
        command("mount", "--bind", hosts, "/etc/hosts")
        command("ip", "link", "set", "lo", "up")
        command("ip", "link", "add", "switch", "type", "bridge")
        command("ip", "addr", "add", "10.0.0.1/24", "dev", "switch")
        command("ip", "link", "set", "switch", "up")

        configuration = CONFIG.format(folder=folder, last=nodes - 1, cpus=os.cpu_count())
        (folder / "slurm.conf").write_text(configuration)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        files = {"key-file": "key", "socket": "munge", "pid-file": "munge.pid"}
        files |= {"log-file": "munge.log", "seed-file": "munge.seed"}
        self._start("munged", "--foreground", "--force", *(f"--{k}={folder / v}" for k, v in files.items()))
        wait_until((folder / "munge").exists, 10, "munged listens")
        self._start("slurmctld", "-D")
        for node in range(nodes):
            self.start_node(node)

    def _start(self, *words: str) -> subprocess.Popen:
        log = (self.folder / "daemons.log").open("a")
        self.daemons.append(subprocess.Popen(words, stdout=log, stderr=log))
        return self.daemons[-1]

    def start_node(self, node: int) -> None:
        name = f"node{node}"
        inside = "nsenter", f"--net=/run/netns/{name}"
        command("ip", "netns", "add", name)
        command("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        command("ip", "link", "set", name, "master", "switch", "up")
        command(*inside, "ip", "addr", "add", f"10.0.0.1{node}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            command(*inside, "ip", "link", "set", device, "up")
        (self.folder / name).mkdir(exist_ok=True)
        machine = "unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c"
        self.nodes[node] = self._start(*inside, *machine, f"hostname {name}; slurmd -D; exit")
        ready = "idle", "allocated", "mixed"
        wait_until(lambda: self.state_of(node) in ready, 60, f"{name} is up: {self.folder}/{name}.log")

    def state_of(self, node: int) -> str:
        listed = subprocess.run(
            ["sinfo", "-hN", "-n", f"node{node}", "-p", "normal", "-o", "%T"], capture_output=True, text=True
        )
        return listed.stdout.strip()

    def fail_node(self, node: int) -> None:
        """Simulate a power failure of a node, which then sends no packets, not even to close its connections."""
        command("ip", "link", "delete", f"node{node}")
        self.nodes[node].kill()
        self.nodes[node].wait()
        command("ip", "netns", "delete", f"node{node}")

    def processes(self, node: int, words: str) -> list[int]:
        """Return the ids of the processes on a node whose command lines contain `words`."""
        network = os.stat(f"/run/netns/node{node}").st_ino
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if words in line and (process / "ns/net").stat().st_ino == network:
                    found.append(int(process.name))
            except OSError:  # reading /proc fails if the process has just ended
                continue
        return found

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGKILL)
            daemon.wait()


class Job:
    """Job that is submitted by `sbatch` with the arguments `words`."""

    def __init__(self, log: Path, *words: str | os.PathLike):
        self.log = log
        self.number = command("sbatch", "--parsable", f"--output={log}", *words).strip()

    def show(self) -> dict[str, str]:
        """Return the fields of Slurm's record of the job, such as JobState and Restarts."""
        words = command("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait(self, *states: str, seconds: float = 900) -> dict[str, str]:
        """Wait until the job is in one of `states` or in a final state, and return Slurm's record of the job."""
        final = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", *states}

        def ended():
            shown = self.show()
            return shown if shown["JobState"] in final else None

        return wait_until(ended, seconds, f"job {self.number} is {states}: {self.log}")

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""
