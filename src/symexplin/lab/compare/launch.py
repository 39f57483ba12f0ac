"""Runs as processes of this machine; :mod:`symexplin.lab.compare.cluster` has them as jobs of a cluster."""

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from symexplin.lab.compare.grid import PROCESSES, ClusterConfig
from symexplin.lab.files import write_json
from symexplin.lab.folders import FACTS, RESULT
from symexplin.lab.identity import of_command
from symexplin.lab.process import StopSignals, end_with_parent
from symexplin.lab.provenance import cores

__all__ = [
    *("EXAMPLE", "PATIENCE_OF_TORCHRUN", "Ended", "Task"),
    *("execute", "gpus_here", "has_ended", "last_lines", "process_file", "threads_each"),
]

Echo = Callable[[str], None]

EXAMPLE = '{"loss": 2.31, "curve": [[100, 3.02], [200, 2.31]]}'  # of result.json
_MINUTE = 60.0
_TICK = 0.2  # seconds between looks at signals and lines
# Seconds after SIGTERM in which a run may save itself, before it is killed; torchrun's own 30 are too few for a large
# checkpoint.
_PATIENCE = 300
PATIENCE_OF_TORCHRUN = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_PATIENCE)}


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

    `cluster` is what it asks for, `work` how long it takes relative to others, `resumes` whether it continues after it
    was stopped, and `cwd` the folder where a command of the user's own is executed.
    """

    label: str
    folder: Path
    command: list[str]
    cluster: ClusterConfig = ClusterConfig()
    work: float = 1.0
    resumes: bool = False
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
        """Remove what an earlier attempt has left and would count for this one, and :meth:`identify`.

        A run of the laboratory removes its own result, or is at its end.
        """
        self.file(".json").unlink(missing_ok=True)
        if self.cwd is not None:
            self.result.unlink(missing_ok=True)
        self.identify()

    def identify(self) -> None:
        """Write the identity of a run of a command; one of the laboratory does so itself."""
        if self.cwd is not None:
            write_json(self.folder / FACTS, of_command(self.command, Path(self.cwd), self.folder.resolve()))

    def has_result(self, status: int) -> bool:
        """Whether the run has ended with its result.

        A run of the laboratory writes it last, and has a status of its own if it diverged. A command may write it more
        than once, so its status counts.
        """
        return self.result.exists() and (self.cwd is None or not status)

    def record(self, began: float) -> None:
        """Write that the run has ended well, and how long it took, for runs that do not say it themselves."""
        write_json(self.file(".json"), {"seconds": round(time.monotonic() - began, 3)})


# A task whose run has ended, and why it failed, if it did.
Ended = tuple[Task, str | None]


def threads_each(jobs: int) -> int:
    """Return the threads of a run that does not choose them itself, beside `jobs` - 1 others on this machine."""
    return max(1, cores() // jobs)


def gpus_here() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    words = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


def execute(queue: deque[Task], jobs: int, timeout: float | None, echo: Echo) -> Generator[Ended, None, None]:
    """Execute `jobs` runs at a time, each in a process, and yield each when it has ended.

    The caller may add tasks to the queue meanwhile, and may close the generator, which ends all runs. `echo` takes the
    lines of progress; the whole output of a process is in its log. A signal stops all, as does the end of the
    generator: with SIGTERM, so that they can save themselves, and after a while with SIGKILL. So does the `timeout` of
    a run, in minutes.
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
        self.gpus = gpus[: task.places] if max(jobs, task.places) > 1 else []
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
                env={**PATIENCE_OF_TORCHRUN, **threads, **os.environ, **chosen},
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
            return f"it took longer than --timeout {timeout:g} minutes, and was stopped"
        if status < 0:
            return f"signal {-status} killed its process, perhaps for lack of memory (try fewer --jobs)"
        said = last_lines(self._log_path)
        if not status:
            return f"it ended without {str(self.task.result)!r}, such as {EXAMPLE}: {said}"
        return f"its command failed with status {status}: {said}"


def last_lines(log: Path) -> str:
    """Return the error in a log, or its last lines, and where it is."""
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("symexplin: ").removeprefix("error: ") for line in said if line.startswith("symexplin: ")]
    return f"{ours[-1] if ours else ' / '.join(said[-3:]) or 'no output'} (see {log})"
