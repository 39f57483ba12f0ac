"""Kill -9 a run at random moments, checkpoint writes included, and resume: the bits of an uninterrupted run."""

import json
import os
import subprocess
import sys

import pytest

from corpora import prepared

# One process imports torch, and forks a run for every kill: starting Python twenty times would take minutes.
_CODE = """if True:
    import json, os, random, signal, sys, time
    from pathlib import Path
    import torch.utils.tensorboard
    from symexplin.lab.run import train
    from symexplin.lab.config import RunConfig
    from symexplin.lab.settings import build

    folder, kills, table = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    config = build(RunConfig, table)

    def start(out):
        pid = os.fork()
        if pid == 0:
            try:
                train(config, out, resume=True)
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        return pid

    def finish(out):
        assert os.waitstatus_to_exitcode(os.waitpid(start(out), 0)[1]) == 0

    def half_written(out):
        return any(Path(out, "checkpoints").glob("*.tmp"))

    finish(folder / "whole")
    dice, killed, within = random.Random(int(sys.argv[4])), 0, 0
    while killed < kills:
        pid = start(folder / "killed")
        deadline = time.monotonic() + dice.uniform(0.05, 0.5)
        aimed = dice.random() < 0.5  # at a checkpoint half-written
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
    finish(folder / "killed")
    print(json.dumps({"killed": killed, "within": within}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("home", ["none", "optimizer", "module"])
def test_twenty_kills_change_no_bit(tmp_path, home):
    table = {
        "data": prepared(tmp_path / "data"),
        "model": {"width": 32, "depth": 1, "heads": 2, "context": 16},
        "train": {"steps": 150, "batch_size": 4, "warmup_steps": 5, "eval_every": 10, "eval_batches": 2},
        "sel": {"home": home, "preset": "paper"},
        "log": {"checkpoint_every": 3},
    }
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(tmp_path), "20", json.dumps(table), "0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["killed"] == 20
    assert counts["within"] > 0  # some kills hit a checkpoint half-written
    ended = [tmp_path / "killed", *tmp_path.glob("finished-*")]
    for folder in ended:
        for name in ("metrics.jsonl", "model.safetensors"):
            assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (folder, name)
