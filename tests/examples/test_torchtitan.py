"""torchtitan's recipe, where torchtitan is installed: its container over FSDP2, its schedule, its checkpoints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

FOLDER = Path(__file__).parents[2] / "examples" / "torchtitan"

# 6 steps, the state saved after 3 by the container's state_dict as torchtitan's DCP manager saves it, a fresh model
# and container loading it, steps 4 to 6 once more.
SCRIPT = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.llama3.config_registry import llama3_debugmodel
sys.path.insert(0, sys.argv[1])
from sel_optimizer import use_sel

dist.init_process_group("gloo")
config = llama3_debugmodel()
config.training.steps = 6
config.training.max_norm = 0.5
use_sel(config, lr=1e-2)
assert config.training.max_norm == float("inf") and config.optimizer.max_grad_norm == 0.5

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 17), nn.LayerNorm(17), nn.GELU(), nn.Linear(17, 6))
    if "--shard" in sys.argv:
        fully_shard(model[0])
        fully_shard(model)
    optimizers = config.optimizer.build(model_parts=[model])
    return model, optimizers, config.lr_scheduler.build(optimizers=optimizers, training_steps=6)

def step(model, optimizers, schedules, index):
    optimizers.zero_grad()
    batch = torch.randn(8, 12, generator=torch.Generator().manual_seed(index))
    loss = model(batch).square().mean()
    loss.backward()
    clip_grad_norm_(list(model.parameters()), config.training.max_norm, foreach=True)
    optimizers.step()
    schedules.step()
    norm = float(optimizers.optimizers[0].grad_norm)
    if dist.get_rank() == 0:
        print(f"step {index} loss {float(loss):.7f} norm {norm:.6f}")

run = build()
for index in range(3):
    step(*run, index)
state = {"model": get_model_state_dict(run[0]), "optimizer": run[1].state_dict(), "schedule": run[2].state_dict()}
dcp.save(state, checkpoint_id=sys.argv[2])
for index in range(3, 6):
    step(*run, index)
again = build()
state = {"model": get_model_state_dict(again[0]), "optimizer": again[1].state_dict(), "schedule": again[2].state_dict()}
dcp.load(state, checkpoint_id=sys.argv[2])
set_model_state_dict(again[0], state["model"])
again[1].load_state_dict(state["optimizer"])
again[2].load_state_dict(state["schedule"])
for index in range(3, 6):
    step(*again, index)
for one, other in zip(run[0].parameters(), again[0].parameters(), strict=True):
    assert torch.equal(*(p.to_local() if hasattr(p, "to_local") else p for p in (one, other)))
dist.barrier()
dist.destroy_process_group()
"""


def run(folder, *options, processes):
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(folder / "script.py"), str(FOLDER), str(folder / f"state-{processes}"), *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    pairs = re.findall(r"loss (\S+) norm (\S+)", done.stdout)
    return [(float(loss), float(norm)) for loss, norm in pairs]


@pytest.mark.distributed
@pytest.mark.slow
def test_the_container_trains_saves_and_resumes_sharded_as_whole(tmp_path):
    whole = run(tmp_path, processes=1)
    assert len(whole) == 9
    assert whole[3:6] == whole[6:]
    sharded = run(tmp_path, "--shard", processes=2)
    assert sharded[3:6] == sharded[6:]
    assert sum(sharded, ()) == pytest.approx(sum(whole, ()), rel=1e-4)
