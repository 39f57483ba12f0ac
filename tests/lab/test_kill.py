"""Kill -9 `train` and `prepare` at random moments, also while a file is half-written: they go on to the same bits."""

import json
import os
import subprocess
import sys

import pytest

from corpora import TEXTS, prepared

HOMES = ["none", "optimizer", "module"]

# One process imports torch and forks what is to be killed: to start Python for each kill would take minutes.
_CODE = """if True:
    import json, os, random, signal, sys, time
    from pathlib import Path
    sys.modules["datasets"] = sys.modules["pyarrow"] = None  # prepared tokens and files need neither
    import torch._dynamo  # which the first step imports: kills would mostly come within that
    from symexplin.lab.config import RunConfig
    from symexplin.lab.data import prepare, tokenizer
    from symexplin.lab.run import train
    from symexplin.lab.settings import from_table

    tokenizer._PIECE, dice = 100, random.Random(0)

    def start(function, *arguments, **options):
        pid = os.fork()
        if pid == 0:
            try:
                function(*arguments, **options)
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        return pid

    def finish(*job, **options):
        assert os.waitstatus_to_exitcode(os.waitpid(start(*job, **options), 0)[1]) == 0

    def kill(pid, when, wait):
        '''Kill the process a while after when() is true; return whether it was still there.'''
        while not when():
            if os.waitpid(pid, os.WNOHANG)[0]:
                return False
        time.sleep(dice.uniform(0, wait))
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0

    def kill_training(folder, table):
        config, out, half = from_table(RunConfig, table), folder / "killed", []
        finish(train, config, folder / "whole", resume=True)
        for when, wait in (
            (lambda: True, 0.3),
            (lambda: any(out.glob("checkpoints/*.tmp")), 0),
            (lambda: any(out.glob("checkpoints/step-*9")), 0.05),
        ):
            kill(start(train, config, out, resume=True), when, wait)
            half.append(any(out.glob("checkpoints/*.tmp")))
        finish(train, config, out, resume=True)
        return sum(half)

    def kill_preparing(folder, source):
        config, out, half = prepare.PrepareConfig((source,), vocab_size=400), folder / "killed", 0
        finish(prepare.prepare, config, folder / "whole")
        for name in (".lock", ".unfinished", "tokenizer.json", "train.npy", "valid.npy"):
            places = out / name, out / ".unfinished" / name
            if not kill(start(prepare.prepare, config, out), lambda: any(p.exists() for p in places), 0.002):
                out.rename(folder / f"finished-{name}")
            half += (out / ".unfinished").exists()
        finish(prepare.prepare, config, out)
        return half

    folder = Path(sys.argv[1])
    half = {home: kill_training(folder / home, table) for home, table in json.loads(sys.argv[2]).items()}
    print(json.dumps(half | {"prepare": kill_preparing(folder / "prepare", sys.argv[3])}))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Where the results are, whole and killed, and how often a kill left something half-written."""
    folder = tmp_path_factory.mktemp("kill")
    tables = {
        home: {
            "data": prepared(folder / home / "data"),
            "model": {"width": 32, "depth": 1, "heads": 2, "context": 16},
            "train": {"steps": 40, "batch_size": 4, "warmup_steps": 5, "eval_every": 10, "eval_batches": 2},
            "sel": {"home": home, **({} if home == "none" else {"preset": "paper"})},
            "log": {"checkpoint_every": 3, "tensorboard": False},
        }
        for home in HOMES
    }
    (folder / "text").write_bytes("\0".join(TEXTS * 3).encode())
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(folder), json.dumps(tables), str(folder / "text")],
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
@pytest.mark.parametrize("what", [*HOMES, "prepare"])
def test_kills_change_no_bit(killed, what):
    folder = killed[0] / what
    half = [killed[1][home] for home in (["prepare"] if what == "prepare" else HOMES)]
    assert sum(half) > 0  # some kills came while a file was half-written
    names = ["dataset.json", "tokenizer.json", "train.npy", "valid.npy"]
    for ended in (folder / "killed", *folder.glob("finished-*")):
        for name in names if what == "prepare" else ["metrics.jsonl", "model.safetensors"]:
            assert (ended / name).read_bytes() == (folder / "whole" / name).read_bytes(), (ended, name)
        assert not [*ended.rglob("*.tmp"), *ended.rglob(".unfinished")]
