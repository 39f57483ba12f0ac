"""A Slurm of its own for tests: a controller and one node on this machine, two partitions of which one preempts."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time

import pytest

__all__ = ["NEEDS_SLURM", "slurm", "wait_for"]

_SBIN = f"{os.environ['PATH']}:/usr/sbin"
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NEEDS_SLURM = pytest.mark.skipif(
    not all(shutil.which(name, path=_SBIN) for name in _PROGRAMS),
    reason="needs Slurm (Debian: slurmctld slurmd slurm-client munge), see .ci/slurm",
)
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=60 PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes={host} MaxTime=60 PriorityTier=10 PreemptMode=OFF
"""


def _free_ports():
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def wait_for(condition, seconds=60):
    """Return what a function returns as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Start Slurm for the tests of a file."""
    place = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state", "spool"):
        (place / name).mkdir(mode=0o700)
    (place / "munge" / "key").write_bytes(os.urandom(1024))
    (place / "munge" / "key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    file = place / "slurm.conf"
    file.write_text(_CONFIG.format(host=host, user=getpass.getuser(), place=place, ports=_free_ports()))
    munge = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(file))
        patch.setenv("PATH", _SBIN)
        subprocess.run(
            ["munged", "--force", *(f"--{key}={place}/munge/{name}" for key, name in munge.items())], check=True
        )
        subprocess.run(["slurmctld"], check=True)
        subprocess.run(["slurmd"], check=True)
        try:
            wait_for(lambda: "idle" in _said("sinfo", "--noheader", "--format=%t"), 20)
            yield
        finally:
            subprocess.run(["scancel", f"--user={getpass.getuser()}"], check=False)
            for pid in (place / "slurmd.pid", place / "slurmctld.pid", place / "munge" / "pid"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.kill(int(pid.read_text()), 15)


def _said(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout
