"""Where the runs of a comparison are executed: in processes of this machine, or as jobs of Slurm.

Submitit runs only the Slurm jobs. Its local processes outlive a killed comparison, which cannot find them again; they
ignore SIGTERM, so that they could not save a run; and all of them start at once.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from symexplin.lab.compare.grid import ClusterConfig, GridConfig
from symexplin.lab.files import read_json, write_json
from symexplin.lab.process import StopSignals, end_with_parent
from symexplin.lab.provenance import cores

__all__ = [
    *("PROCESSES", "Ended", "SlurmJob", "Task"),
    *("check_executor", "execute", "run_as_jobs", "run_side_by_side", "threads_each"),
]

Echo = Callable[[str], None]
# The number of a task whose run has ended, and why it failed, if it did.
Ended = tuple[int, str | None]

# Folders of a comparison: files of each process; those of submitit.
PROCESSES, _CLUSTER = "processes", "cluster"

_TICK = 0.2  # seconds between looks at signals and lines
_GLANCE = 10.0  # seconds between questions to Slurm
_GLANCES = 3  # after which a job that has ended without its result is taken for lost
_RESTARTS = 1000  # at the end of a job's time
_JOBS = "jobs.json"  # {name of a run's folder: number of its latest job}


class Task(NamedTuple):
    """A run to execute by a command; it has ended when the file `result` is in its folder."""

    label: str
    folder: Path
    result: str
    command: list[str]

    @property
    def ended(self) -> bool:
        """Whether the result is there."""
        return (self.folder / self.result).exists()


def check_executor(grid: GridConfig) -> None:
    """Raise ValueError unless this machine can execute the runs where the grid says."""
    if not grid.on_cluster:
        if grid.jobs > cores():
            raise ValueError(f"jobs must be at most {cores()}, the cores that this process may use, got {grid.jobs}")
    elif importlib.util.find_spec("submitit") is None:
        raise ValueError("cluster 'slurm' needs submitit: pip install 'symexplin[cluster]'")
    elif shutil.which("sbatch") is None:
        raise ValueError("cluster must be 'none' where Slurm is not installed, got 'slurm' without sbatch")


def threads_each(jobs: int) -> int:
    """Return the threads of a run that does not choose them itself, beside `jobs` - 1 others on this machine."""
    return max(1, cores() // jobs)


def execute(tasks: Sequence[Task], out: Path, grid: GridConfig, cluster: ClusterConfig, echo: Echo) -> Iterator[Ended]:
    """Execute runs in processes of their own, or as jobs of the cluster, and yield each when it has ended."""
    if grid.on_cluster:
        return run_as_jobs(tasks, out, grid.jobs, cluster, echo)
    return run_side_by_side(tasks, out, grid.jobs, echo)


# --- Processes -------------------------------------------------------------------------------------------------------


def run_side_by_side(tasks: Sequence[Task], out: Path, jobs: int, echo: Echo) -> Iterator[Ended]:
    """Execute `jobs` runs at a time, each in a process, and yield each when it has ended.

    `echo` takes the lines of progress; the whole output of a process is in its log below `out`. A signal stops all.
    """
    threads = {"OMP_NUM_THREADS": str(threads_each(jobs))} if jobs > 1 else {}
    left = deque(enumerate(tasks))
    running: dict[int, _Process] = {}
    told = False
    with StopSignals() as stop:
        try:
            while running or (left and stop.signal is None):
                while left and len(running) < jobs and stop.signal is None:
                    index, task = left.popleft()
                    running[index] = _Process(task, out / PROCESSES, {**threads, **os.environ})
                time.sleep(_TICK)
                for index, process in list(running.items()):
                    status = process.poll()  # before the lines, so that none is missed
                    process.tell(echo)
                    if status is None:
                        continue
                    del running[index]
                    process.close()
                    if tasks[index].ended:
                        yield index, None
                    elif stop.signal is None:
                        yield index, process.reason(status)
                if stop.signal is not None and not told:
                    told = True
                    for process in running.values():
                        process.send(signal.SIGTERM)
        finally:  # nothing runs anymore, unless a second Ctrl-C came
            for process in running.values():
                process.send(signal.SIGKILL)
                process.close()
    if stop.signal is not None:
        raise stop.stopped("with all its runs; --resume continues")


class _Process:
    """A run in a process with its own group, and its log."""

    def __init__(self, task: Task, place: Path, environment: Mapping[str, str]) -> None:
        place.mkdir(exist_ok=True)
        self._task, self._path = task, place / f"{task.folder.name}.log"
        with self._path.open("w") as file:
            self._process = subprocess.Popen(
                task.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C reaches the comparison alone, which passes it on
                preexec_fn=end_with_parent if os.name == "posix" else None,
            )
        self._log = self._path.open(errors="replace")

    def poll(self) -> int | None:
        """Return the status of the process, None while it runs."""
        return self._process.poll()

    def tell(self, echo: Echo) -> None:
        """Tell the new lines of progress."""
        for line in self._log:
            if line.startswith("train: "):
                echo(f"{self._task.label}{line.removeprefix('train').rstrip()}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the run with all its processes: a shell or a launcher does not pass it on."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)  # its own group, by start_new_session
        else:
            self._process.send_signal(number)

    def close(self) -> None:
        """Wait for the end of the process."""
        self._process.wait()
        self._log.close()

    def reason(self, status: int) -> str:
        """Return why the process ended with a status and without the result."""
        if status < 0:
            name = signal.Signals(-status).name
            return f"its process was ended by {name}, perhaps for lack of memory: --resume continues; try fewer --jobs"
        return f"{'' if status else f'ended without {self._task.result}: '}{_last_lines(self._path)}"


def _last_lines(log: Path) -> str:
    """Return the error in a log, or its last lines."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("symexplin: ").removeprefix("error: ") for line in said if line.startswith("symexplin: ")]
    return f"{ours[-1] if ours else ' / '.join(said[-3:]) or 'no output'} (see {log})"


# --- Slurm -----------------------------------------------------------------------------------------------------------


class SlurmJob:
    """A run as submitit executes it: its command, and the file that shows that it has ended."""

    def __init__(self, command: Sequence[str], result: Path) -> None:
        self._command, self._result = list(command), result

    def __call__(self) -> None:
        """Execute the run to its end."""
        # Slurm sends submitit's signal to every process of the job.
        process = subprocess.Popen(self._command, preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN))
        self._number = process.pid
        status = process.wait()
        if status and not self._result.exists():
            sys.exit(status)

    def checkpoint(self) -> Any:
        """Stop the run, which saves itself, before the job is preempted; return what the requeued job executes."""
        from submitit.helpers import DelayedSubmission

        os.kill(self._number, signal.SIGTERM)
        # The interrupted __call__ waits for the process, too, and keeps its status.
        os.waitid(os.P_PID, self._number, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(SlurmJob(self._command, self._result))


def run_as_jobs(tasks: Sequence[Task], out: Path, jobs: int, cluster: ClusterConfig, echo: Echo) -> Iterator[Ended]:
    """Execute each run as a job of Slurm, `jobs` at a time, and yield each when it has ended.

    A job that an earlier comparison in the folder `out` has left, and that waits or runs, is not submitted again. Jobs
    continue when a signal comes.
    """
    if not tasks:
        return
    place = (out / _CLUSTER).resolve()
    numbers = _submit_missing(tasks, place, jobs, cluster, echo)
    waiting = dict(enumerate(numbers))
    told: dict[int, str] = {}
    lost: Counter[int] = Counter()
    with StopSignals() as stop:
        while waiting:
            states = _states(waiting.values())
            for index, job in list(waiting.items()):
                if tasks[index].ended:  # looked at after Slurm: a job writes this file before it ends
                    del waiting[index]
                    yield index, None
                elif states is not None:
                    lost[index] = 0 if job in states else lost[index] + 1
                    if lost[index] == _GLANCES:
                        del waiting[index]
                        yield index, _loss(job, place)
                    elif (text := states.get(job)) and text != told.get(index):
                        told[index] = text
                        echo(f"{tasks[index].label}: job {job} {text}")
            deadline = time.monotonic() + _GLANCE
            while waiting and time.monotonic() < deadline:
                if stop.signal is not None:
                    arrays = " ".join(_arrays(waiting.values()))
                    raise stop.stopped(
                        f"while jobs continue: --resume waits for them, 'scancel {arrays}' ends them",
                    )
                time.sleep(_TICK)


def _submit_missing(tasks: Sequence[Task], place: Path, jobs: int, cluster: ClusterConfig, echo: Echo) -> list[str]:
    """Submit the runs that have no job yet, and return the number of each run's job."""
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
    return [known[task.folder.name] for task in tasks]


def _submit(tasks: Sequence[Task], place: Path, jobs: int, cluster: ClusterConfig) -> list[str]:
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
    try:
        work = [SlurmJob(task.command, (task.folder / task.result).resolve()) for task in tasks]
        return [job.job_id for job in executor.submit_array(work)]
    except submitit.core.utils.FailedJobError as error:
        raise ValueError(f"[cluster] must suit the cluster, but {' '.join(str(error).split())}") from None


def _states(jobs: Collection[str]) -> dict[str, str] | None:
    """Return {job: what to tell of it} for jobs that have not ended, or None if Slurm's controller does not answer.

    Accounting (sacct) is not needed.
    """
    if not jobs:
        return {}
    form = ",".join(f"{name}:|" for name in ("JobArrayID", "State", "RestartCnt", "NodeList"))
    command = ["squeue", "--noheader", "--array", f"--jobs={','.join(_arrays(jobs))}", f"--Format={form}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {} if "Invalid job id" in done.stderr else None
    found = {}
    for line in done.stdout.splitlines():
        job, state, restarts, nodes, *_ = line.strip().split("|")
        texts = {"RUNNING": f"runs on {nodes}", "PENDING": "was requeued" if restarts != "0" else ""}
        found[job] = texts.get(state, "")
    return found


def _arrays(jobs: Collection[str]) -> list[str]:
    """Return the numbers of the arrays that jobs belong to."""
    return list(dict.fromkeys(job.partition("_")[0] for job in jobs))


def _loss(job: str, place: Path) -> str:
    """Return the message about a job that has ended without its run."""
    logs = list(place.glob(f"{job}_*_log.err"))
    said = _last_lines(logs[0]) if logs else f"it left no log in {place}"
    return f"job {job} ended without its result: {said}; --resume submits it again"
