"""Runs as jobs of Slurm: a script that a person can read, and what has become of its jobs. Nothing here waits for them.

cluster/DIGEST/runs.txt    a line for each run: its folder and its command
cluster/DIGEST/array.sh    what sbatch takes: an array with a task for each line; 1.log, 2.log, ... are its own logs

The digest is of the runs and of what they ask for: other ones have a script of their own.
"""

import hashlib
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jinja2

from symexplin.lab.compare.launch import PATIENCE_OF_TORCHRUN, Task, has_ended, last_lines
from symexplin.lab.files import replace_file

__all__ = ["hand_over", "queued"]

Echo = Callable[[str], None]

_CLUSTER, _RUNS, _SCRIPT = "cluster", "runs.txt", "array.sh"
# squeue is asked for all states: without, it leaves out a job that is about to be queued again. Accounting (sacct) is
# not needed.
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_FIELDS = ("ArrayTaskID", "State", "Reason", "NodeList", "Command")


def queued(out: Path) -> dict[Path, str]:
    """Return {folder of a run: what its job does} for the jobs of the scripts in the folder `out` that have not ended.

    Raises:
        ValueError: Slurm does not say.
    """
    places = {script.parent for script in out.resolve().glob(f"{_CLUSTER}/*/{_SCRIPT}")}
    if not places:
        return {}
    form = ",".join(f"{name}:|" for name in _FIELDS)
    try:
        words = ["squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={form}"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", "") or error).strip()
        remedy = f"--resume where it does, or remove {str(out / _CLUSTER)!r} if no job is left"
        raise ValueError(f"Slurm does not report which jobs of {str(out)!r} still run ({why}): {remedy}") from None
    states = {}
    for line in done.stdout.splitlines():
        if len(fields := line.strip().removesuffix("|").split("|", len(_FIELDS) - 1)) < len(_FIELDS):
            continue  # the rest of a path with a line break
        index, state, reason, nodes, command = fields
        if state not in _ENDED and (place := Path(command).resolve().parent) in places:
            runs = (place / _RUNS).read_text().splitlines()
            if int(index) <= len(runs):  # else of an array that somebody has made longer
                run = runs[int(index) - 1].partition("\t")[0]
                states[out / run] = f"waits ({reason})" if state == "PENDING" else f"{state.lower()} on {nodes}"
    return states


def hand_over(
    tasks: Sequence[Task], jobs: Mapping[Path, str], out: Path, at_a_time: int | None, submit: bool, echo: Echo
) -> None:
    """Write the script of the runs that have no job, and submit it if asked to; tell what the others do.

    Args:
        tasks: the runs that have not ended when `jobs` were looked up.
        jobs: from :func:`queued`.
        out: the folder of the comparison or table.
        at_a_time: the most jobs of a script that run together; None: no limit.
        submit: whether to submit the script.
        echo: takes lines.

    Raises:
        ValueError: Slurm refuses what the runs ask for.
    """
    missing = [task for task in tasks if task.folder not in jobs and not has_ended(task.folder)]
    for text, number in Counter(jobs[task.folder] for task in tasks if task.folder in jobs).items():
        echo(f"{_runs(number)}: {text}")
    for task in missing:
        if (log := task.file(".log")).exists():
            echo(f"failed: {task.label}: {last_lines(log)}")
    groups: dict[str, list[Task]] = {}
    for task in missing:
        groups.setdefault(repr(task.cluster), []).append(task)
        task.file(".json").unlink(missing_ok=True)  # of a run whose result was deleted
        task.identify()
    for wishes, group in groups.items():
        runs = "".join(f"./{task.folder.resolve().relative_to(out.resolve())}\t{_shell(task)}\n" for task in group)
        digest = hashlib.sha256(f"{at_a_time} {wishes} {runs}".encode()).hexdigest()[:8]
        script = out / _CLUSTER / digest / _SCRIPT
        if not script.exists():  # a user may have edited it
            script.parent.mkdir(parents=True, exist_ok=True)
            replace_file(script.with_name(_RUNS), runs)
            replace_file(script, _script(group, script.parent.resolve(), out.resolve(), at_a_time))
        count, end = _runs(len(group)), "--resume collects what has ended"
        if submit:
            echo(f"{count} submitted as job {_submit(script.resolve())} ({script}); {end}")
        else:
            echo(f"{count} to submit: sbatch {shlex.quote(str(script))}; then {end}")


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count > 1)}"


def _script(tasks: Sequence[Task], place: Path, out: Path, at_a_time: int | None) -> str:
    """Return array.sh for runs that ask for the same."""
    cluster = tasks[0].cluster
    requeues = tasks[0].resumes if cluster.requeue is None else cluster.requeue
    limit = "" if at_a_time is None else f"%{at_a_time}"
    options = {
        "job-name": "symexplin",
        "array": f"1-{len(tasks)}{limit}",
        "time": cluster.walltime,
        "cpus-per-task": cluster.cpus,
        "gpus-per-node": cluster.gpus or None,
        "requeue" if requeues else "no-requeue": True,
        "open-mode": "append",
        "signal": "TERM@60",  # seconds before the end of its time, in which a run may save itself
        "output": f"{place}/%a.log",
        **cluster.sbatch,
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    identify = f"{shlex.quote(sys.executable)} -m symexplin.lab.identity"
    values = {
        "options": [name if value is True else f"{name}={_quoted(value)}" for name, value in options.items() if value],
        "out": shlex.quote(str(out)),
        "runs": shlex.quote(str(place / _RUNS)),
        "script": shlex.quote(str(place / _SCRIPT)),
        "identify": "" if tasks[0].cwd is None else identify,
        "environment": " ".join(f"{name}={value}" for name, value in PATIENCE_OF_TORCHRUN.items()),
        "cpus": cluster.cpus,
        "requeues": requeues,
    }
    return environment.get_template(f"{_SCRIPT}.jinja").render(values)


def _quoted(value: object) -> str:
    return f'"{value}"' if " " in str(value) else str(value)


def _shell(task: Task) -> str:
    """Return the command of a run as one line of a shell."""
    words = shlex.join(task.command).replace("\n", "'$'\\n''")  # what has a line break is quoted
    return words if task.cwd is None else f"cd {shlex.quote(task.cwd)} && {words}"


def _submit(script: Path) -> str:
    """Submit a script, and return the number of its job."""
    if shutil.which("sbatch") is None:
        raise ValueError(f"submit needs Slurm's sbatch, which is not installed: sbatch {script} where it is")
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"[cluster] must suit this cluster, but {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]
