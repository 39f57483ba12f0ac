"""Where the runs of a comparison are executed: in this process, in processes beside it, or as jobs of Slurm.

A process or a job is `symexplin train` with its own configuration file. What a job unpickles needs no torch.
"""

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from symexplin.lab.files import read_json, replace_file, write_json
from symexplin.lab.folders import SUMMARY
from symexplin.lab.process import LAUNCHER, StopSignals
from symexplin.lab.settings import dump_toml, to_table

if TYPE_CHECKING:
    from symexplin.lab.compare.grid import ClusterConfig
    from symexplin.lab.config import RunConfig

__all__ = ["Task", "TrainJob", "Training", "check_slurm", "run_as_jobs", "run_here", "run_side_by_side"]

Echo = Callable[[str], None]

# Folders of a comparison: a configuration and a log per process; the files of submitit.
_PROCESSES, _CLUSTER = "processes", "cluster"

_TICK = 0.2  # seconds between looks at signals and lines
_GLANCE = 10.0  # seconds between questions to Slurm
_GLANCES = 3  # after which a job that has ended without its run's summary is taken for lost
_RESTARTS = 1000  # at the end of a job's time
_JOBS = "jobs.json"  # {name of a run's folder: number of its latest job}


class Task(Protocol):
    """One run to execute in its folder: a training run of the laboratory, or a command of the user's."""

    @property
    def label(self) -> str:
        """What names the run in the log."""

    @property
    def folder(self) -> Path:
        """The folder of the run."""

    @property
    def result(self) -> Path:
        """The file that the run writes when it has ended."""

    def command(self, place: Path, processes: int = 1) -> list[str]:
        """Return the command of the run; what it needs beside its folder is written into the folder `place`."""


class Training(NamedTuple):
    """A training run of the laboratory, new or to resume. It has ended, too, where a loss was not finite."""

    label: str
    config: "RunConfig"
    folder: Path

    @property
    def result(self) -> Path:
        """The summary of the run."""
        return self.folder / SUMMARY

    def command(self, place: Path, processes: int = 1) -> list[str]:
        """Return the command that trains the run, after writing its configuration into the folder `place`."""
        place.mkdir(exist_ok=True)
        file = place / f"{self.folder.name}.toml"
        replace_file(file, dump_toml(to_table(self.config)))
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        python = [sys.executable, *(several if processes > 1 else [])]
        return [*python, "-m", "symexplin", "train", str(file), "--out", str(self.folder.resolve()), "--resume"]


def run_here(tasks: Sequence[Training], echo: Echo, progress: bool) -> Iterator[int]:
    """Train one run after the other in this process, and yield the index of each task when it has ended."""
    from symexplin.lab.run import train
    from symexplin.lab.train import NonFiniteError

    bar = progress and sys.stderr.isatty()
    for index, (label, config, folder) in enumerate(tasks):
        with contextlib.suppress(NonFiniteError):  # the run's summary.json says so
            train(
                config, folder, resume=True, echo=(lambda _: None) if bar else echo, tell_config=False,
                progress=progress, label=label, verify=False,
            )  # fmt: skip
        yield index


def run_side_by_side(
    tasks: Sequence[Task], out: Path, jobs: int, echo: Echo, keep_going: bool = False
) -> Iterator[int]:
    """Execute `jobs` runs at a time, each in a process, and yield the index of each task when it has ended.

    `echo` takes the lines of progress; the whole output of a process is in its log below `out`. If a process fails,
    the others are saved and stopped, or with `keep_going` continue to the last one. A signal stops all.
    """
    left = deque(range(len(tasks)))
    running: dict[int, tuple[subprocess.Popen[bytes], TextIO]] = {}
    failures: list[str] = []
    stopping = False
    with StopSignals() as stop:
        try:
            while left or running:
                while left and len(running) < jobs:
                    index = left.popleft()
                    running[index] = _start(tasks[index], out / _PROCESSES)
                time.sleep(_TICK)
                for index, (process, log) in list(running.items()):
                    task, status = tasks[index], process.poll()  # before the lines, so that none is missed
                    for line in log:
                        if line.startswith("train: "):
                            echo(f"{task.label}{line.removeprefix('train').rstrip()}")
                    if status is None:
                        continue
                    del running[index]
                    log.close()
                    if task.result.exists():
                        yield index
                    elif not stopping and stop.signal is None:
                        failures.append(f"{task.label}: {_reason(Path(log.name), status, task.result.name)}")
                        if keep_going:
                            echo(f"failed: {failures[-1]}")
                if not stopping and (stop.signal is not None or (failures and not keep_going)):
                    stopping = True
                    left.clear()
                    for process, _ in running.values():
                        _signal(process, signal.SIGTERM)
        finally:  # nothing runs any more, unless a second Ctrl-C came
            for process, log in running.values():
                _signal(process, signal.SIGKILL)
                process.wait()
                log.close()
    if failures and (stop.signal is None or not keep_going):
        more = f"; {len(failures) - 1} more failed: see above" if len(failures) > 1 else ""
        raise ChildProcessError(failures[0] + more)
    if stop.signal is not None:
        rest = (
            "with all its runs; --resume starts again those that had not ended"
            if keep_going
            else "with all runs saved; --resume continues from there"
        )
        raise stop.stopped(rest)


def _start(task: Task, place: Path) -> tuple[subprocess.Popen[bytes], TextIO]:
    """Start the process of a run, and return it with its log."""
    command = task.command(place)
    place.mkdir(exist_ok=True)
    log = place / f"{task.folder.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, LAUNCHER: str(os.getpid())},
            start_new_session=True,  # a Ctrl-C reaches the comparison alone, which passes it on
            preexec_fn=_end_with_parent(),
        )
    return process, log.open(errors="replace")


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a run with all its processes: a shell or a launcher does not pass it on."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # its own group, by start_new_session
    else:
        process.send_signal(number)


def _end_with_parent() -> Callable[[], object] | None:
    """Return what a new process calls to get SIGTERM when this one is killed, which Linux alone offers."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, set_signal = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
    return lambda: prctl(set_signal, signal.SIGTERM)


def _reason(log: Path, status: int = 1, result: str = SUMMARY) -> str:
    """Return why a process ended: the last lines that it wrote, or the signal that killed it."""
    if status < 0:
        name = signal.Signals(-status).name
        return f"its process was ended by {name}, perhaps for lack of memory: --resume continues; try fewer --jobs"
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("symexplin: ").removeprefix("error: ") for line in said if line.startswith("symexplin: ")]
    last = ours[-1] if ours else " / ".join(said[-3:]) or "no output"
    return f"{last} (see {log})" if status else f"ended without {result}: {last} (see {log})"


# --- Slurm -----------------------------------------------------------------------------------------------------------


class TrainJob:
    """A run as submitit executes it: its command, and the file that shows that it has ended."""

    def __init__(self, command: Sequence[str], summary: Path) -> None:
        self._command, self._summary = list(command), summary

    def __call__(self) -> None:
        """Train the run to its end."""
        # Slurm sends submitit's signal to every process of the job.
        process = subprocess.Popen(self._command, preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN))
        self._number = process.pid
        status = process.wait()
        if status and not self._summary.exists():
            sys.exit(status)

    def checkpoint(self) -> Any:
        """Stop the run, which saves itself, before the job is preempted; return what the requeued job executes."""
        from submitit.helpers import DelayedSubmission

        os.kill(self._number, signal.SIGTERM)
        # The interrupted __call__ waits for the process, too, and keeps its status.
        os.waitid(os.P_PID, self._number, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(TrainJob(self._command, self._summary))


def check_slurm() -> None:
    """Raise ValueError unless this machine can submit jobs."""
    if importlib.util.find_spec("submitit") is None:
        raise ValueError("cluster 'slurm' needs submitit: pip install 'symexplin[cluster]'")
    if shutil.which("sbatch") is None:
        raise ValueError("cluster must be 'none' where Slurm is not installed, got 'slurm' without sbatch")


def run_as_jobs(tasks: Sequence[Task], out: Path, jobs: int, cluster: "ClusterConfig", echo: Echo) -> Iterator[int]:
    """Train each run as a job of Slurm, `jobs` at a time, and yield the index of each task when it has ended.

    A job that an earlier comparison in the folder `out` has left, and that waits or runs, is not submitted again. Jobs
    continue when another one fails, and when a signal comes.
    """
    if not tasks:
        return
    place = (out / _CLUSTER).resolve()
    place.mkdir(exist_ok=True)
    known: dict[str, str] = read_json(place / _JOBS) if (place / _JOBS).exists() else {}
    states = _states(known.values())
    if states is None:
        raise ConnectionError("Slurm does not say which jobs still run (squeue fails): --resume later")
    new = [task for task in tasks if known.get(task.folder.name) not in states]
    if new:
        known |= zip((task.folder.name for task in new), _submit(new, place, jobs, cluster), strict=True)
        write_json(place / _JOBS, known)
    echo(f"{len(new)} jobs submitted, {len(tasks) - len(new)} found, {jobs} at a time; logs in {place}")
    waiting = {index: known[task.folder.name] for index, task in enumerate(tasks)}
    told: dict[int, str] = {}
    lost: Counter[int] = Counter()
    with StopSignals() as stop:
        while waiting:
            states = _states(waiting.values())
            for index, job in list(waiting.items()):
                task = tasks[index]
                if task.result.exists():  # looked at after Slurm: a job writes this file before it ends
                    del waiting[index]
                    yield index
                elif states is not None:
                    lost[index] = 0 if job in states else lost[index] + 1
                    if lost[index] == _GLANCES:
                        raise ChildProcessError(f"{task.label}: {_loss(job, place)}; {_rest(waiting.values())}")
                    if (text := states.get(job)) and text != told.get(index):
                        told[index] = text
                        echo(f"{task.label}: job {job} {text}")
            deadline = time.monotonic() + _GLANCE
            while waiting and time.monotonic() < deadline:
                if stop.signal is not None:
                    raise stop.stopped(f"while {_rest(waiting.values())}")
                time.sleep(_TICK)


def _loss(job: str, place: Path) -> str:
    """Return the message about a job that has ended without its run."""
    logs = list(place.glob(f"{job}_*_log.err"))
    reason = _reason(logs[0]) if logs else f"it left no log in {place}"
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return f"job {job} {f'ended as {state}' if state else 'has gone'}: {reason}; --resume submits it again"


def _rest(jobs: Collection[str]) -> str:
    arrays = " ".join(dict.fromkeys(job.partition("_")[0] for job in jobs))
    return f"jobs continue: --resume waits for them, 'scancel {arrays}' ends them"


def _states(jobs: Collection[str]) -> dict[str, str] | None:
    """Return {job: what to tell of it} for jobs that have not ended, or None if Slurm's controller does not answer.

    Accounting (sacct) is not needed.
    """
    arrays = sorted({job.partition("_")[0] for job in jobs})
    if not arrays:
        return {}
    form = ",".join(f"{name}:|" for name in ("JobArrayID", "State", "RestartCnt", "NodeList"))
    command = ["squeue", "--noheader", "--array", f"--jobs={','.join(arrays)}", f"--Format={form}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {} if "Invalid job id" in done.stderr else None
    found = {}
    for line in done.stdout.splitlines():
        job, state, restarts, nodes, *_ = line.strip().split("|")
        texts = {"RUNNING": f"runs on {nodes}", "PENDING": "was requeued" if restarts != "0" else ""}
        found[job] = texts.get(state, "")
    return found


def _submit(tasks: Sequence[Task], place: Path, jobs: int, cluster: "ClusterConfig") -> list[str]:
    """Submit runs as one array of jobs, and return the jobs' numbers."""
    import submitit

    executor = submitit.SlurmExecutor(place, max_num_timeout=_RESTARTS)
    executor.update_parameters(
        job_name="symexplin",
        partition=cluster.partition,
        account=cluster.account,
        time=cluster.walltime,
        cpus_per_task=cluster.cpus,
        gpus_per_node=cluster.gpus or None,
        mem=None if cluster.memory is None else f"{cluster.memory}G",
        array_parallelism=jobs,
        srun_args=[f"--cpus-per-task={cluster.cpus}"],  # srun does not take it from sbatch
        additional_parameters={"requeue": True, **cluster.sbatch},
    )
    work = [TrainJob(task.command(place, cluster.gpus), task.result.resolve()) for task in tasks]
    try:
        return [job.job_id for job in executor.submit_array(work)]
    except submitit.core.utils.FailedJobError as error:
        raise ValueError(f"[cluster] must suit the cluster, but {' '.join(str(error).split())}") from None
