"""Let accelerate shard on CPUs, for tests of what it does under FSDP2; as a script, run another script so.

Accelerate 1.15 sets up FSDP2 where a process has an accelerator and DDP on CPUs. All that it does for FSDP2 works on
CPUs too, once it is told that this is what it is doing.
"""

import runpy
import sys

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType

__all__ = ["shard_on_cpus"]


def shard_on_cpus():
    made = Accelerator.__init__

    def make(self, *args, fsdp_plugin=None, **kwargs):
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    Accelerator.__init__ = make


if __name__ == "__main__":
    shard_on_cpus()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
