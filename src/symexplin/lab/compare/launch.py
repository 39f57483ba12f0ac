"""Where runs are executed: each is a command, in a process of this machine or as a job of Slurm.

Submitit runs only the Slurm jobs. Its local processes outlive a killed comparison, which cannot find them again; they
ignore SIGTERM, so that they could not save a run; and all of them start at once.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from symexplin.lab.compare.grid import PROCESSES, ClusterConfig, GridConfig
from symexplin.lab.files import read_json, replace_file, write_json
from symexplin.lab.folders import FACTS, RESULT
from symexplin.lab.identity import of_command
from symexplin.lab.process import StopSignals, end_with_parent, signal_name
from symexplin.lab.provenance import cores

__all__ = [
    *("EXAMPLE", "Ended", "SlurmJob", "Task"),
    *("check_executor", "execute", "gpus_here", "has_ended", "process_file", "threads_each"),
]

Echo = Callable[[str], None]

EXAMPLE = '{"loss": 2.31, "curve": [[100, 3.02], [200, 2.31]]}'  # of result.json
_CLUSTER = "cluster"  # folder for the files of submitit
_MINUTE = 60.0
_TICK = 0.2  # seconds between looks at signals and lines
_GLANCE = 10.0  # seconds between questions to Slurm
_GLANCES = 3  # after which a job that has ended without its result is taken for lost
_RESTARTS = 1000  # at the end of a job's time
# Seconds after SIGTERM in which a run may save itself, before it is killed; torchrun's own 30 are too few for a large
# checkpoint.
_PATIENCE = 300
_PATIENCE_OF_TORCHRUN = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_PATIENCE)}


def process_file(run: Path, ending: str) -> Path:
    """Return the file with an ending, such as ".log", that belongs to the process of the run in a folder."""
    return run.parent.parent / PROCESSES / f"{run.name}{ending}"


def has_ended(run: Path) -> bool:
    """Return whether the run in a folder has its result.json, and its process or job has ended well.

    A program may write that file more than once, and be stopped or fail after that.
    """
    return (run / RESULT).exists() and process_file(run, ".json").exists()


class Task(NamedTuple):
    """A run to execute.

    `cluster` is what it asks for, `on_gpu` whether a process of this machine may have a GPU of its own, `work` how long
    it takes relative to others, and `cwd` the folder where a command of the user's own is executed.
    """

    label: str
    folder: Path
    command: list[str]
    cluster: ClusterConfig = ClusterConfig()
    on_gpu: bool = False
    work: float = 1.0
    cwd: str | None = None

    @property
    def places(self) -> int:
        """How many of the runs at a time it counts for: one for each of its GPUs."""
        return self.cluster.gpus or 1

    @property
    def result(self) -> Path:
        """The file that the run writes at its end."""
        return self.folder / RESULT

    def file(self, ending: str) -> Path:
        """Return the :func:`process_file` of this run, in a folder that is created."""
        path = process_file(self.folder, ending)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def begin(self) -> None:
        """Remove what an earlier attempt has left and would count for this one, and write a command's identity.

        A run of the laboratory removes its own result, or is at its end.
        """
        self.file(".json").unlink(missing_ok=True)
        if self.cwd is not None:
            self.result.unlink(missing_ok=True)
            write_json(self.folder / FACTS, of_command(self.command, Path(self.cwd), self.folder.resolve()))

    def has_result(self, status: int) -> bool:
        """Whether the run has written its result, and has ended well or written an error that is its result."""
        return self.result.exists() and (not status or _names_error(self.result))

    def record(self, began: float) -> None:
        """Write that the run has ended well, and how long it took, for runs that do not say it themselves."""
        write_json(self.file(".json"), {"seconds": round(time.monotonic() - began, 3)})


def _names_error(result: Path) -> bool:
    try:
        return "error" in read_json(result)
    except ValueError:
        return False


# A task whose run has ended, and why it failed, if it did.
Ended = tuple[Task, str | None]


def check_executor(grid: GridConfig) -> None:
    """Raise ValueError unless this machine can execute the runs where the grid says."""
    if not grid.on_cluster:
        if (grid.jobs or 1) > cores():
            raise ValueError(f"jobs must be at most {cores()}, the cores available to this process, got {grid.jobs}")
    elif importlib.util.find_spec("submitit") is None:
        raise ValueError("cluster 'slurm' needs submitit: pip install 'symexplin[cluster]'")
    elif shutil.which("sbatch") is None:
        raise ValueError("cluster must be 'none' on a machine without Slurm, got 'slurm', and sbatch is not installed")


def threads_each(jobs: int) -> int:
    """Return the threads of a run that does not choose them itself, beside `jobs` - 1 others on this machine."""
    return max(1, cores() // jobs)


def gpus_here() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    names = re.findall(r"UUID: ([\w-]+)", listed)
    parts = [name for name in names if name.startswith("MIG-")]  # a GPU in parts cannot be used whole
    return parts or names


def execute(queue: deque[Task], out: Path, grid: GridConfig, echo: Echo) -> Generator[Ended, None, None]:
    """Execute runs in processes of their own, or as jobs of the cluster, and yield each when it has ended.

    The caller may add tasks to the queue meanwhile, and may close the generator, which ends all runs.
    """
    if grid.on_cluster:
        return _run_as_jobs(queue, out, grid.jobs, echo)
    return _run_here(queue, grid.jobs or 1, grid.timeout, echo)


# --- Processes -------------------------------------------------------------------------------------------------------


def _run_here(queue: deque[Task], jobs: int, timeout: float | None, echo: Echo) -> Generator[Ended, None, None]:
    """Execute `jobs` runs at a time, each in a process, and yield each when it has ended.

    `echo` takes the lines of progress; the whole output of a process is in its log. A signal stops all, as does the end
    of the generator: with SIGTERM, so that they can save themselves, and after a while with SIGKILL. So does the
    `timeout` of a run, in minutes.
    """
    running: list[_Process] = []
    gpus = gpus_here()
    with StopSignals() as stop:
        try:
            while running or (queue and stop.signal is None):
                while queue and stop.signal is None:
                    if running and sum(process.task.places for process in running) + queue[0].places > jobs:
                        break
                    used = Counter(name for process in running for name in process.gpus)
                    running.append(_Process(queue.popleft(), jobs, sorted(gpus, key=lambda name: used[name])))
                time.sleep(_TICK)
                for process in list(running):
                    status = process.popen.poll()  # before the lines, so that none is missed
                    process.tell(echo)
                    if status is None:
                        process.stop_if(stop.signal is not None, timeout)
                        continue
                    running.remove(process)
                    process.close()
                    if process.stopped is None and process.task.has_result(status):
                        process.task.record(process.began)
                        yield process.task, None
                    elif stop.signal is None:
                        yield process.task, process.reason(status, timeout)
            if stop.signal is not None:
                raise stop.stopped("with all its runs; --resume continues")
        except KeyboardInterrupt:  # a second Ctrl-C
            for process in running:
                process.send(signal.SIGKILL)
            raise
        finally:
            while running:
                for process in list(running):
                    if process.popen.poll() is None:
                        process.stop_if(True, None)
                    else:
                        running.remove(process)
                        process.close()
                time.sleep(_TICK)


class _Process:
    """A run in a process with its own group, and its log. It gets the first of the `gpus` unless it may use all."""

    def __init__(self, task: Task, jobs: int, gpus: Sequence[str]) -> None:
        self.task, self.began = task, time.monotonic()
        self.stopped: float | None = None  # when SIGTERM was sent
        self.gpus = gpus[: task.places] if task.on_gpu and max(jobs, task.places) > 1 else []
        self._log_path = task.file(".log")
        task.begin()
        threads = {"OMP_NUM_THREADS": str(threads_each(jobs))} if jobs > 1 else {}
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        with self._log_path.open("w") as file:
            self.popen = subprocess.Popen(
                task.command,
                cwd=task.cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**_PATIENCE_OF_TORCHRUN, **threads, **os.environ, **chosen},
                start_new_session=True,  # a Ctrl-C reaches the comparison alone, which passes it on
                preexec_fn=end_with_parent if os.name == "posix" else None,
            )
        self._log = self._log_path.open(errors="replace")

    def tell(self, echo: Echo) -> None:
        for line in self._log:
            if line.startswith("train: "):
                echo(f"{self.task.label}{line.removeprefix('train').rstrip()}")

    def stop_if(self, told: bool, timeout: float | None) -> None:
        """Stop the run if it is told to, or takes longer than its time; kill it if it goes on after that."""
        late = timeout is not None and time.monotonic() - self.began > timeout * _MINUTE
        if self.stopped is None and (told or late):
            self.stopped = time.monotonic()
            self.send(signal.SIGTERM)
        elif self.stopped is not None and time.monotonic() - self.stopped > _PATIENCE:
            self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the run with all its processes: a shell or a launcher does not pass it on."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, number)  # its own group, by start_new_session
        else:
            self.popen.send_signal(number)

    def close(self) -> None:
        self.popen.wait()
        self._log.close()

    def reason(self, status: int, timeout: float | None) -> str:
        """Return why the process with a status has not ended well."""
        if self.stopped is not None:
            killed = f"; it ignored SIGTERM, and was killed {_PATIENCE / _MINUTE:g} minutes later"
            late = f"it took longer than --timeout {timeout:g} minutes, and was stopped"
            return late + (killed if status == -signal.SIGKILL else "")
        if status < 0:
            return f"{signal_name(-status)} killed its process, perhaps for lack of memory (try fewer --jobs)"
        said = _last_lines(self._log_path)
        if not status:
            return f"it ended without {str(self.task.result)!r}, such as {EXAMPLE}: {said}"
        wrote = f" after it wrote {RESULT}" if self.task.result.exists() else ""
        return f"its command failed with status {status}{wrote}: {said}"


def _last_lines(log: Path) -> str:
    """Return the error in a log, or its last lines."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("symexplin: ").removeprefix("error: ") for line in said if line.startswith("symexplin: ")]
    return f"{ours[-1] if ours else ' / '.join(said[-3:]) or 'no output'} (see {log})"


# --- Slurm -----------------------------------------------------------------------------------------------------------


class SlurmJob:
    """A run as submitit executes it: its command, and its files as absolute paths."""

    def __init__(self, task: Task) -> None:
        self._task = task._replace(folder=task.folder.resolve())

    def __call__(self) -> None:
        """Execute the run to its end."""
        began = time.monotonic()
        self._task.begin()
        process = subprocess.Popen(
            self._task.command,
            cwd=self._task.cwd,
            env={**_PATIENCE_OF_TORCHRUN, **os.environ},
            # Slurm sends submitit's signal to every process of the job.
            preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        )
        self._number = process.pid
        status = process.wait()
        if self._task.has_result(status):
            self._task.record(began)
        elif status:
            sys.exit(status)

    def checkpoint(self) -> Any:
        """Stop the run, which saves itself, before the job is preempted; return what the requeued job executes."""
        from submitit.helpers import DelayedSubmission

        os.kill(self._number, signal.SIGTERM)
        # The interrupted __call__ waits for the process, too, and keeps its status.
        os.waitid(os.P_PID, self._number, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(self)


def _run_as_jobs(queue: deque[Task], out: Path, jobs: int | None, echo: Echo) -> Generator[Ended, None, None]:
    """Execute each run as a job of Slurm, at most `jobs` at a time, and yield each when it has ended.

    A job that an earlier comparison has left, and that waits or runs, is not submitted again. Jobs continue when a
    signal comes; the end of the generator cancels them.
    """
    place = (out / _CLUSTER).resolve()
    waiting: dict[str, Task] = {}
    told: dict[str, str] = {}
    lost: Counter[str] = Counter()
    with StopSignals() as stop:
        while waiting or queue:
            if queue:
                waiting |= _submit_missing(queue, place, jobs, echo)
                queue.clear()
            states = _states(waiting)
            for job, task in list(waiting.items()):
                reason = None
                if not has_ended(task.folder):  # looked at after Slurm: a job writes its files before it ends
                    if states is None:
                        continue
                    lost[job] = 0 if job in states else lost[job] + 1
                    if lost[job] < _GLANCES:
                        if (text := states.get(job)) and text != told.get(job):
                            told[job] = text
                            echo(f"{task.label}: job {job} {text}")
                        continue
                    log = next(place.glob(f"{job}_*_log.err"), None)
                    said = _last_lines(log) if log else f"it left no log in {place}"
                    reason = f"job {job} ended without its result: {said}"
                del waiting[job]
                try:
                    yield task, reason
                except GeneratorExit:
                    if waiting:
                        subprocess.run(["scancel", *waiting], check=False)
                    raise
            deadline = time.monotonic() + _GLANCE
            while waiting and not queue and time.monotonic() < deadline:
                if stop.signal is not None:
                    arrays = " ".join(_arrays(waiting))
                    raise stop.stopped(f"while jobs continue: --resume waits for them, 'scancel {arrays}' ends them")
                time.sleep(_TICK)


def _submit_missing(tasks: Collection[Task], place: Path, jobs: int | None, echo: Echo) -> dict[str, Task]:
    """Submit the runs that have no job yet, an array for all that ask for the same; return {job: run}."""
    place.mkdir(parents=True, exist_ok=True)
    earlier = {task.file(".job").read_text(): task for task in tasks if task.file(".job").exists()}
    states = _states(earlier)
    if states is None:
        raise ConnectionError("Slurm does not report which jobs still run (squeue failed): try --resume later")
    known = {job: task for job, task in earlier.items() if job in states}
    new = [task for task in tasks if task not in known.values()]
    by_wish: dict[str, list[Task]] = {}
    for task in new:
        by_wish.setdefault(repr(task.cluster), []).append(task)
    for group in by_wish.values():
        for job, task in zip(_submit(group, place, jobs), group, strict=True):
            replace_file(task.file(".job"), job)
            known[job] = task
    limit = "" if jobs is None else f", {jobs} at a time"
    echo(f"{len(new)} jobs submitted, {len(tasks) - len(new)} already there{limit}; logs in {place}")
    return known


def _submit(tasks: Sequence[Task], place: Path, jobs: int | None) -> list[str]:
    """Submit runs that ask for the same as one array of jobs, and return the jobs' numbers."""
    import submitit

    cluster = tasks[0].cluster
    executor = submitit.SlurmExecutor(place, max_num_timeout=_RESTARTS)
    executor.update_parameters(
        job_name="symexplin",
        partition=cluster.partition,
        account=cluster.account,
        time=cluster.walltime,
        cpus_per_task=cluster.cpus,
        gpus_per_node=cluster.gpus or None,
        mem=None if cluster.memory is None else f"{cluster.memory}G",
        array_parallelism=jobs or len(tasks),
        srun_args=[f"--cpus-per-task={cluster.cpus}"],  # srun does not take it from sbatch
        additional_parameters={"requeue": True, **cluster.sbatch},
    )
    try:
        return [job.job_id for job in executor.submit_array([SlurmJob(task) for task in tasks])]
    except submitit.core.utils.FailedJobError as error:
        raise ValueError(f"[cluster] must suit this cluster, but {' '.join(str(error).split())}") from None


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
    states = {}
    for line in done.stdout.splitlines():
        job, state, restarts, nodes, *_ = line.strip().split("|")
        texts = {"RUNNING": f"runs on {nodes}", "PENDING": "was requeued" if restarts != "0" else ""}
        states[job] = texts.get(state, "")
    return states


def _arrays(jobs: Collection[str]) -> list[str]:
    return list(dict.fromkeys(job.partition("_")[0] for job in jobs))
