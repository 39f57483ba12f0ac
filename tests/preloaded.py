"""What a forkserver of `processes` imports before it forks."""

from forked import preload

preload(
    [
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict",
        "torch._dynamo",  # the first step of an optimizer of torch imports it
        "symexplin.optim",
        "symexplin.lab.run",
        "symexplin.lab.data.prepare",
    ]
)
