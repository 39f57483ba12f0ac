"""Kill -9 a run at random moments, checkpoint writes included, and resume: the bits of an uninterrupted run."""

import json
import os
import subprocess
import sys

import pytest

from corpora import prepared

HOMES = ["none", "optimizer", "module"]
KILLS = 4

# One process imports torch, and forks a run for every kill: starting Python for each would take minutes.
_CODE = """if True:
    import json, os, random, signal, sys, time
    from pathlib import Path
    import torch._dynamo  # which the first step imports: kills would mostly come within that
    import torch.utils.tensorboard
    from symexplin.lab.run import train
    from symexplin.lab.config import RunConfig
    from symexplin.lab.settings import from_table

    def start(config, out):
        pid = os.fork()
        if pid == 0:
            try:
                train(config, out, resume=True)
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        return pid

    def finish(config, out):
        assert os.waitstatus_to_exitcode(os.waitpid(start(config, out), 0)[1]) == 0

    def half_written(out):
        return any(Path(out, "checkpoints").glob("*.tmp"))

    def kill_often(folder, kills, config):
        finish(config, folder / "whole")
        dice, killed, within = random.Random(0), 0, 0
        while killed < kills:
            pid = start(config, folder / "killed")
            deadline = time.monotonic() + dice.uniform(0.05, 0.5)
            aimed = killed % 2 == 1  # at a checkpoint half-written
            while time.monotonic() < deadline or aimed:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    pid = None
                    break
                if aimed and half_written(folder / "killed"):
                    break
            if pid is None:  # it finished first: another run
                Path(folder, "killed").rename(folder / f"finished-{killed}")
                continue
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            killed, within = killed + 1, within + half_written(folder / "killed")
        finish(config, folder / "killed")
        return {"killed": killed, "within": within}

    print(json.dumps({
        home: kill_often(Path(sys.argv[1], home), int(sys.argv[2]), from_table(RunConfig, table))
        for home, table in json.loads(sys.argv[3]).items()
    }))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Where the runs of each home are, killed and whole, and how often they were killed."""
    folder = tmp_path_factory.mktemp("kill")
    tables = {
        home: {
            "data": prepared(folder / home / "data"),
            "model": {"width": 32, "depth": 1, "heads": 2, "context": 16},
            "train": {"steps": 80, "batch_size": 4, "warmup_steps": 5, "eval_every": 10, "eval_batches": 2},
            "sel": {"home": home, "preset": "paper"},
            "log": {"checkpoint_every": 3},
        }
        for home in HOMES
    }
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(folder), str(KILLS), json.dumps(tables)],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("home", HOMES)
def test_kills_change_no_bit(killed, home):
    folder, counts = killed[0] / home, killed[1][home]
    assert counts["killed"] == KILLS
    assert counts["within"] > 0  # some kills hit a checkpoint half-written
    for ended in (folder / "killed", *folder.glob("finished-*")):
        for name in ("metrics.jsonl", "model.safetensors"):
            assert (ended / name).read_bytes() == (folder / "whole" / name).read_bytes(), (ended, name)
