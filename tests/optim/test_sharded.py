"""SEL optimizers over several processes, whole, sharded and saved, against one process."""

import re

import pytest
import torch

import sharded
from processes import run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_ROUNDING = 2.0**-24  # of float32
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
# Number of processes, how they share the model, and the run. Shards are uneven, and some are empty.
CASES = [
    *((2, *case) for case in (("ddp", "paper", F64), ("columns", "muon", F64), ("fsdp", "muon layers", F64))),
    *((4, "fsdp", name, F64) for name in ("default", "offset", "layers")),
    *((4, "tensor", name, F64) for name in ("offset", "sums", "default layers", "muon layers")),
    *((4, "columns", "offset", F64), (4, "hsdp", "paper", F64)),
    *((4, *case, F32) for case in (("fsdp", "paper"), ("fsdp", "default"), ("tensor", "numbers"))),
    (4, "fsdp", "muon mixed", F32),
]


def name_of(case):
    return "-".join(str(part).replace("torch.", "") for part in case)


@pytest.fixture(scope="module")
def whole():
    """The same trajectories in one process."""
    return {case: sharded.trajectory("whole", *case) for case in {case[2:] for case in CASES}}


def differing(a, b):
    """The names of tensors that have not the same bits."""
    assert a.keys() == b.keys()
    return [key for key in b if not torch.equal(a[key], b[key])]


def distances(a, b):
    """Per tensor ||a - b|| / ||b||."""
    assert a.keys() == b.keys()
    return {key: float((a[key].double() - b[key]).norm() / b[key].double().norm().clamp(min=1e-30)) for key in b}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_processes_follow_the_trajectory_of_one(said, whole, case):
    """Float64 to 1e-9; float32 to ten times what one ulp at the start becomes, losses to 1e-4."""
    first, *others = said[case]
    assert not any(differing(other[i], first[i]) for other in others for i in (0, 1))
    weights, state, losses, figures = first
    expected, expected_state, expected_losses, expected_figures = whole[case[2:]]
    assert losses[-1] < 0.99 * losses[0]  # of the same batch
    if case[3] == F64:
        assert max(distances(weights, expected).values()) < 1e-9
        assert max(distances(state, expected_state).values()) < 1e-9
        assert losses == pytest.approx(expected_losses, abs=1e-9)
        assert figures == pytest.approx(expected_figures, rel=1e-9, abs=1e-10)  # a spread near 0 cancels
        return
    twin = sharded.trajectory("whole", *case[2:], one_ulp=True)
    noise = distances(twin[0], expected)
    for key, far in distances(weights, expected).items():
        # An ulp may be rounded away again, and its twin end with the same bits: it counts for one rounding at least.
        assert far <= 10 * max(noise[key], _ROUNDING), (key, far, noise[key])
    assert losses == pytest.approx(expected_losses, abs=1e-4)
    assert figures == pytest.approx(expected_figures, rel=1e-4)


# From how many processes to how many, how they are split, and how the state is saved.
MOVES = {
    "4 to 2": (("fsdp", 4), ("fsdp", 2), {}),
    "1 to 4": (("whole", 1), ("fsdp", 4), {}),
    "4 to 1, flat": (("fsdp", 4), ("whole", 1), {"flat": True}),
    "4 to 1, gathered": (("fsdp", 4), ("whole", 1), {"full_state": True}),
    "1 to 4, gathered": (("whole", 1), ("fsdp", 4), {"full_state": True}),
    "replicas to columns": (("hsdp", 4), ("columns", 2), {}),
    "2 x 2 to 2 x 2": (("tensor", 4), ("tensor", 4), {}),
    "2 x 2 to 4": (("tensor", 4), ("fsdp", 4), {}),
}
# Raw weights and scales of every shape, master copies, Muon's momentum and stacks of matrices.
MOVED = [(name, "sums", F32) for name in ("4 to 1, flat", "4 to 1, gathered", "1 to 4, gathered")]
MOVED += [("replicas to columns", "sums", F32), ("2 x 2 to 2 x 2", "sums", BF16), ("1 to 4", "default", BF16)]
MOVED += [("4 to 2", "muon", F32), ("2 x 2 to 4", "layers", F32)]
GIVEN = [("default", BF16), ("default", F32)]
DETAILS = {
    "collectives": ("collectives", ("fsdp",), {}),
    "written": ("written", ("fsdp",), {}),
    "mixed": ("trajectory", ("mixed", "paper"), {}),
    "missing": ("missing", ("fsdp",), {}),
    "refused": ("refused", (), {}),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What every process returned for each case; each number of processes is joined once."""
    folder, meetings = tmp_path_factory.mktemp("joined"), tmp_path_factory.mktemp("rendezvous")
    results = {}

    def moves(side, world):
        for move, name, dtype in MOVED:
            how, number = MOVES[move][side]
            if number == world:
                call = ("saved", "resumed")[side], (how, name, folder / f"{move}-{name}-{dtype}", dtype), MOVES[move][2]
                yield (side, move, name, dtype), call

    def together(world, *sides):
        calls = {case: ("trajectory", case[1:], {}) for case in CASES if case[0] == world}
        for blocks in (False, True) if world == 4 else (False,):
            calls |= {(world, blocks, *case): ("given", case, {"blocks": blocks}) for case in GIVEN}
        for side in sides:
            calls |= moves(side, world)
        calls |= DETAILS if world == 4 else {}
        answers = run(world, meetings, sharded.several, list(calls.values()), timeout=280)
        by_rank = [sharded.joined(answers[rank + 1 :] + answers[: rank + 1]) for rank in range(world)]
        results.update(zip(calls, map(list, zip(*by_rank, strict=True)), strict=True))

    def alone(side):
        for case, call in moves(side, 1):
            results[case] = sharded.several([call])

    alone(0)
    together(4, 0, 1)  # no move is from two processes to four or to one
    together(2, 0, 1)
    alone(1)
    return results


@pytest.mark.parametrize("case", MOVED, ids=name_of)
def test_a_run_moves_to_another_number_of_processes(said, case):
    ((weights, state), end), ((loaded_weights, loaded_state), resumed_end) = (said[side, *case][0] for side in (0, 1))
    assert not differing(loaded_weights, weights)
    assert not differing(loaded_state, state)
    assert {value.dtype for value in loaded_state.values()} == {F32}
    assert any(key.endswith(" master") for key in state) == (case[2] == BF16)
    if MOVES[case[0]][0] == MOVES[case[0]][1]:
        assert not differing(resumed_end[1], end[1])
        assert resumed_end[2] == end[2]
    elif case[2] == F32:
        assert resumed_end[2] == pytest.approx(end[2], abs=1e-4)
        assert max(distances(resumed_end[0], end[0]).values()) < 1e-3


@pytest.mark.parametrize(("name", "dtype"), GIVEN)
def test_shards_have_the_bits_of_the_whole(said, name, dtype):
    """Of steps with the same gradients, on 2 and 4 shards by rows and on 2 x 2 blocks."""
    expected = sharded.given(name, dtype)
    for shards in ((2, False), (4, False), (4, True)):
        for ours, right in zip(said[*shards, name, dtype][0], expected, strict=True):
            assert not differing(ours, right), shards


def test_a_step_takes_two_all_reduces(said):
    """Of which parameters have gradients, and of the gradients of scales with the norm."""
    assert said["collectives"] == [2] * 4


def test_a_gradient_that_one_process_lacks_is_zero_there_and_one_that_all_lack_lets_the_parameter_rest(said):
    for weights, state in said["missing"]:
        expected, expected_state = sharded.missing("whole")
        assert max(distances(weights, expected).values()) < 1e-9
        assert max(distances(state, expected_state).values()) < 1e-9
        assert float(state["5.weight step"]) == 3.0


def test_writes_into_all_processes_and_into_one_are_adopted(said):
    expected = sharded.written("whole")
    for weights in said["written"]:
        assert max(distances(weights, expected).values()) < 1e-9


def test_mixed_precision_keeps_everything_of_the_optimizer_in_fp32(said, whole):
    """Weights are cast to bfloat16 for the forward and backward passes alone."""
    weights, state, losses, _ = said["mixed"][0]
    assert {value.dtype for value in (*weights.values(), *state.values())} == {F32}
    expected = whole["paper", F32][2]
    assert losses[:5] == pytest.approx(expected[:5], rel=0.02)  # then the roundings of bfloat16 go their own way
    assert losses[:5] != pytest.approx(expected[:5], rel=1e-5)


def test_a_dimension_split_in_strides_is_refused(said):
    """test_checks refuses what FSDP1 and ZeroRedundancyOptimizer make of parameters and groups."""
    assert all(re.search(r"3\.weight .* strides of 2", answer) for answer in said["refused"])
