"""Parameters that are alike, and how they take a step together: here with PyTorch's operations, for every map."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from symexplin.optim.entry import Entry, Leaf, Moments, clipped
from symexplin.routes import rate_of
from symexplin.spec import RawWeight

__all__ = ["ADAMW", "Batch", "FormulaBatch", "Pack", "Rule", "runs"]

ADAMW = ("exp_avg", "exp_avg_sq")  # its moments
_CHUNK = {"cpu": 2**18}  # numbers whose raw gradients exist at a time, at least one tensor's: a core's cache
_CHUNK_OF_DEVICE = 2**25  # with raw weights 256 MB
_MOST_BATCHES = 16  # of a pack


class Rule(NamedTuple):
    """What a batch needs to know of an optimizer's rule."""

    moments: Moments
    is_adamw: bool


class Pack:
    """Parameters of one group that are alike, with their numbers of steps in one tensor, of which states have views."""

    def __init__(self, entries: Sequence[Entry], rule: Rule) -> None:
        self.entries, self.rule = list(entries), rule
        self.batches: dict[tuple[int, ...], Batch] = {}  # by the places of their parameters
        self._steps = [float(entry.state["step"]) for entry in entries]
        self._counts = torch.tensor(self._steps, dtype=torch.float32, device="cpu")
        self._version = self._counts._version
        for i, entry in enumerate(entries):
            entry.state["step"] = self._counts[i]

    def steps(self) -> list[float]:
        """Return the number of steps of each parameter; views share the version of the tensor."""
        if self._version != self._counts._version:
            self._steps, self._version = self._counts.tolist(), self._counts._version
        return self._steps

    def advance(self, places: tuple[int, ...]) -> float:
        """Add 1 to the numbers of steps of the parameters at these places, which are equal, and return them."""
        steps = self.steps()
        if len(places) == len(steps):
            self._counts.add_(1.0)
            self._steps = [step + 1.0 for step in steps]
        else:
            self._counts[list(places)] += 1.0
            for place in places:
                steps[place] += 1.0
        self._version = self._counts._version
        return self._steps[places[0]]

    def of(self, active: set[int] | None) -> Iterator["Batch"]:
        """Yield batches of the active parameters (their ids; None: all) that have taken as many steps."""
        steps, places = self.steps(), range(len(self.entries))
        alike: dict[float, list[int]] = {}
        for i in places if active is None else [i for i in places if id(self.entries[i]) in active]:
            alike.setdefault(steps[i], []).append(i)
        for chosen in map(tuple, alike.values()):
            if chosen not in self.batches:
                if len(self.batches) == _MOST_BATCHES:  # other parameters have gradients in every step
                    self.batches.clear()
                self.batches[chosen] = self.batch(chosen)
            yield self.batches[chosen]

    def batch(self, places: tuple[int, ...]) -> "Batch":
        """Return a batch of the parameters at these places."""
        return FormulaBatch(self, places)


class Batch:
    """Parameters of a pack that step together."""

    def __init__(self, pack: Pack, places: tuple[int, ...]) -> None:
        self.pack, self.places, self.rule = pack, places, pack.rule
        self.entries = [pack.entries[place] for place in places]
        self.group = self.entries[0].group
        self.count = 0.0  # of steps, with this one

    def norm(self) -> Tensor:
        """Return the norm of the raw gradients, and of the scales' gradients unless these are partial sums."""
        raise NotImplementedError

    def advance(self) -> None:
        """Count the step."""
        self.count = self.pack.advance(self.places)

    def step(self, clip: Tensor | None) -> Iterator[list[Leaf]]:
        """Yield leaves for the rule: first learned scales, then weights, whose new values go to the model."""
        raise NotImplementedError

    @property
    def lr(self) -> float:
        """The learning rate of the weights."""
        return rate_of(self.group)

    @property
    def chunk(self) -> int:
        """The numbers of raw gradients that exist at a time."""
        device = self.entries[0].value.device.type
        return _CHUNK[device] * torch.get_num_threads() if device in _CHUNK else _CHUNK_OF_DEVICE

    def scale_leaves(self, clip: Tensor | None) -> list[Leaf]:
        """Return the learned scales of all parameters."""
        return [leaf for entry in self.entries for leaf in entry.scale_leaves(self.rule.moments, clip, self.count)]


class FormulaBatch(Batch):
    """Parameters of any kind, by PyTorch's operations on whole tensors."""

    def norm(self) -> Tensor:
        """See :meth:`Batch.norm`."""
        self._before: list[RawWeight | None] = []  # the maps with their old scales
        grads: list[Tensor] = []
        for entry in self.entries:
            gradient, curved = entry.gradient().to(entry.dtype), None
            if entry.is_stored:
                curved = entry.raw_weight()
                gradient, entry.grads = curved.pullback(gradient)
                curved = curved._replace(tensors={name: scale.clone() for name, scale in curved.tensors.items()})
                grads += [] if entry.shard.groups else entry.grads.values()
            elif entry.closed is not None:
                gradient = gradient * entry.closed.slope(entry.weight())
            self._before.append(curved)
            grads.append(torch.linalg.vector_norm(gradient))
        return torch.nn.utils.get_total_norm(grads)

    def step(self, clip: Tensor | None) -> Iterator[list[Leaf]]:
        """See :meth:`Batch.step`."""
        if clip is not None:  # once, not for each tensor
            clip = clip.to(self.entries[0].value.device, self.entries[0].dtype)
        if scales := self.scale_leaves(clip):
            yield scales
        sizes = [entry.value.numel() for entry in self.entries]
        for start, stop in runs(sizes, self.chunk):
            pulled = [self._pull(i, clip) for i in range(start, stop)]
            yield [leaf for leaf, _ in pulled]
            for entry, (leaf, before) in zip(self.entries[start:stop], pulled, strict=True):
                if leaf.lr != 0.0:
                    _write(entry, leaf.value, before)
        for entry in self.entries:
            entry.grads = {}
        del self._before

    def _pull(self, i: int, clip: Tensor | None) -> tuple[Leaf, Tensor | None]:
        """Return the leaf of a weight, and its raw weight before the step if that is not stored."""
        entry, curved = self.entries[i], self._before[i]
        grad, before = entry.gradient().to(entry.dtype), None
        if curved is not None:
            grad, value = grad * curved.slope(), entry.local_state("raw")
        elif entry.closed is not None:
            weight = entry.weight()
            grad, before = grad * entry.closed.slope(weight), entry.closed.raw(weight)
            value = before.clone()
        else:
            value = entry.weight()
        value = value.clone() if self.lr == 0.0 else value  # a rate of 0 changes moments alone
        return entry.weight_leaf(self.rule.moments, value, clipped(grad, clip), self.count), before


def _write(entry: Entry, value: Tensor, before: Tensor | None) -> None:
    """Write the weight of a new raw value, or of a new plain one, into the model."""
    if entry.is_stored:
        entry.value.copy_(entry.raw_weight().effective(entry.value.dtype))
        return
    if entry.closed is not None:
        assert before is not None
        value = entry.closed.move(entry.weight(), value - before)
    if "master" in entry.state:
        entry.local_state("master").copy_(value)
    entry.value.copy_(value)


def runs(sizes: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of runs of items, each of at most `room` numbers or of one item."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > room:
            yield start, i
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
