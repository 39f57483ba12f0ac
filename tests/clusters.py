"""A Slurm of one node on loopback, without accounting, for tests of what runs on a cluster."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time

__all__ = ["MISSING", "slurm"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]

# cred_expire: seconds that a requeued job waits, 120 by default and below 5.
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=200000
PreemptType=preempt/none
JobRequeue=1
KillWait=5
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=60 State=UP
"""


@contextlib.contextmanager
def slurm(folder, cpus=2):
    """Start the daemons in a folder, and yield the environment in which Slurm's commands reach them."""
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    folder.chmod(0o755)  # munged wants to be the only one who writes there
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    facts = {"folder": folder, "host": host, "user": getpass.getuser(), "cpus": cpus}
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(**facts, controller=_port(), node=_port()))
    environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(config)}
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    with contextlib.ExitStack() as stack:
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", host]):
            with (folder / f"{command[0]}.out").open("w") as output:
                process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            time.sleep(0.5)

        def said(command):
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

        deadline = time.monotonic() + 20
        while "idle" not in said(["sinfo", "--noheader", "--format=%T"]):
            if time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-2000:] for path in sorted(folder.glob("*.out"))}
                raise RuntimeError(f"Slurm did not start: {logs}")
            time.sleep(0.2)
        try:
            yield environment
        finally:
            subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=environment, check=False)
            while said(["squeue", "--noheader"]) and time.monotonic() < deadline + 600:
                time.sleep(0.2)


def _port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
