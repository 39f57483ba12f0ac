"""SELAdamW over several processes, whole, sharded and saved, against one process."""

import logging
import re

import pytest
import torch

import sharded
import symexplin as sel
from networks import ELEMENTWISE
from processes import run

logger = logging.getLogger(__name__)  # figures: pytest -o log_cli=true -o log_cli_level=INFO

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

PAPER, OFFSET = sel.preset("paper"), sel.preset("paper+offset")
# The run is hot enough to be clipped at first, cool enough not to amplify a rounding error.
SETTINGS = {"lr": 3e-3}
_ROUNDING = 2.0**-24  # of float32
TRAJECTORIES = {
    2: [
        ("ddp", PAPER, torch.float64),
        ("fsdp", OFFSET, torch.float64),
        ("fsdp", ELEMENTWISE, torch.float64),
        ("columns", ELEMENTWISE, torch.float64),
        ("fsdp", PAPER, torch.float32),
    ],
    3: [("fsdp", OFFSET, torch.float64), ("ddp", PAPER, torch.float64)],
    4: [
        ("ddp", OFFSET, torch.float64),
        ("fsdp", PAPER, torch.float64),
        ("columns", OFFSET, torch.float64),
        ("hsdp", PAPER, torch.float64),
        ("tensor", OFFSET, torch.float64),
        ("tensor", ELEMENTWISE, torch.float64),
        ("tensor", PAPER, torch.float32),
        ("ddp", PAPER, torch.float32),
        ("fsdp", PAPER, torch.float32),
    ],
}
CASES = [(world, *case) for world, cases in TRAJECTORIES.items() for case in cases]


def name_of(case):
    return "-".join(str(part).replace("torch.", "") for part in case if not isinstance(part, sel.SELConfig))


@pytest.fixture(scope="module")
def whole():
    """The same trajectories in one process."""
    cases = {case[2:] for case in CASES}
    return {case: sharded.trajectory("whole", *case, **SETTINGS) for case in cases}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What came of each trajectory in the first process; the others must have the same."""
    folder = tmp_path_factory.mktemp("trajectories")
    results = {}
    for world, cases in TRAJECTORIES.items():
        calls = [("trajectory", case, SETTINGS) for case in cases]
        for case, first, *others in zip(cases, *run(world, folder, sharded.several, calls), strict=True):
            assert not any(differing(other[1], first[1]) for other in others)
            results[world, *case] = first
    return results


def differing(a, b):
    """The names of tensors that have not the same bits."""
    assert a.keys() == b.keys()
    return [key for key in b if not torch.equal(a[key], b[key])]


def distances(a, b):
    """Per tensor ||a - b|| / ||b||."""
    assert a.keys() == b.keys()
    return {key: float((a[key] - b[key]).norm() / b[key].norm().clamp(min=1e-30)) for key in b}


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_processes_follow_the_trajectory_of_one(found, whole, case):
    """DESIGN's bounds: float64 1e-9; float32 ten times what an ulp at the start becomes, losses within 1e-4."""
    weights, state, losses, figures = found[case]
    logger.info(
        "%s: weights %.1e, state %.1e", name_of(case),
        max(distances(weights, whole[case[2:]][0]).values()), max(distances(state, whole[case[2:]][1]).values()),
    )  # fmt: skip
    expected, expected_state, expected_losses, expected_figures = whole[case[2:]]
    assert losses[-1] < 0.7 * losses[0]
    if case[3] == torch.float64:
        assert max(distances(weights, expected).values()) < 1e-9
        assert max(distances(state, expected_state).values()) < 1e-9
        assert losses == pytest.approx(expected_losses, abs=1e-9)
        assert figures == pytest.approx(expected_figures, rel=1e-9, abs=1e-10)  # a spread near 0 cancels
        return
    twin = sharded.trajectory("whole", *case[2:], one_ulp=True, **SETTINGS)
    noise = distances(twin[0], expected)
    for key, far in distances(weights, expected).items():
        # An ulp may be rounded away again, and its twin end with the same bits: it counts for one rounding at least.
        assert far <= 10 * max(noise[key], _ROUNDING), (key, far, noise[key])
    assert losses == pytest.approx(expected_losses, abs=1e-4)
    assert figures == pytest.approx(expected_figures, rel=1e-4)


def test_the_gradients_are_clipped(whole):
    free = sharded.trajectory("whole", PAPER, torch.float64, **SETTINGS, max_grad_norm=None)
    assert max(distances(free[0], whole[PAPER, torch.float64][0]).values()) > 1e-3


# From how many processes to how many, how they are split, and how the state is saved.
MOVES = {
    "4 to 2": (("fsdp", 4), ("fsdp", 2), {}),
    "4 to 1": (("fsdp", 4), ("whole", 1), {}),
    "1 to 4": (("whole", 1), ("fsdp", 4), {}),
    "4 to 4": (("fsdp", 4), ("fsdp", 4), {}),
    "wrapped to split": (("ddp", 2), ("fsdp", 2), {}),
    "4 to 2, flat": (("fsdp", 4), ("fsdp", 2), {"flat": True}),
    "4 to 1, gathered": (("fsdp", 4), ("whole", 1), {"full_state": True}),
    "1 to 4, gathered": (("whole", 1), ("fsdp", 4), {"full_state": True}),
    "replicas to columns": (("hsdp", 4), ("columns", 2), {}),
    "2 x 2 to 2 x 2": (("tensor", 4), ("tensor", 4), {}),
    "2 x 2 to 4": (("tensor", 4), ("fsdp", 4), {}),
    "2 x 2 to 2": (("tensor", 4), ("fsdp", 2), {}),
    "2 x 2 to 1": (("tensor", 4), ("whole", 1), {}),
    "1 to 2 x 2": (("whole", 1), ("tensor", 4), {}),
    "1 to 4, 8 bits": (("whole", 1), ("fsdp", 4), {"moment_bits": 8}),
    "4 to 2, 8 bits": (("fsdp", 4), ("fsdp", 2), {"moment_bits": 8}),
    "4 to 4, 8 bits": (("fsdp", 4), ("fsdp", 4), {"moment_bits": 8}),
}
# Both dtypes from each number of processes, and to each.
HALF = {"2 x 2 to 2 x 2", "4 to 2", "4 to 1", "4 to 4", "1 to 4, gathered", "wrapped to split"}
BOTH = {"4 to 4", "wrapped to split"}
MOVED = [(name, torch.bfloat16) for name in MOVES if name in HALF]
MOVED += [(name, torch.float32) for name in MOVES if name not in HALF - BOTH]


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """(as saved, end of the uninterrupted run), (as loaded, end of the resumed run) of every move."""
    folder = tmp_path_factory.mktemp("moves")
    results = {case: [None, None] for case in MOVED}
    # No move is from two processes to four or to one: each number of processes is joined once.
    for world, sides in ((1, [0]), (4, [0, 1]), (2, [0, 1]), (1, [1])):
        cases = [(case, side) for side in sides for case in MOVED if MOVES[case[0]][side][1] == world]
        calls = [
            (
                ("saved", "resumed")[side],
                (MOVES[name][side][0], ELEMENTWISE, folder / f"{name}-{dtype}", dtype),
                {**MOVES[name][2], **SETTINGS, "decay_towards": "initial"},  # one more tensor to move: the anchor
            )
            for (name, dtype), side in cases
        ]
        first = sharded.several(calls) if world == 1 else run(world, folder, sharded.several, calls)[0]
        for (case, side), result in zip(cases, first, strict=True):
            results[case][side] = result
    return results


@pytest.mark.parametrize("case", MOVED, ids=lambda case: f"{case[0]}, {case[1]}")
def test_a_run_moves_to_another_number_of_processes(moved, case):
    ((weights, state), end), ((loaded_weights, loaded_state), resumed_end) = moved[case]
    assert not differing(loaded_weights, weights)
    assert not differing(loaded_state, state)  # raw weights among them
    codes = {torch.uint8} if "moment_bits" in MOVES[case[0]][2] else set()
    assert {value.dtype for value in loaded_state.values()} == {torch.float32} | codes
    if MOVES[case[0]][0] == MOVES[case[0]][1]:
        assert not differing(resumed_end[1], end[1])
        assert resumed_end[2] == end[2]
    elif case[1] == torch.float32:
        assert resumed_end[2] == pytest.approx(end[2], abs=1e-4)
        assert max(distances(resumed_end[0], end[0]).values()) < 1e-3


DETAILS = {
    "collectives": ("collectives", ("fsdp", OFFSET), {}),
    "written": ("written", ("fsdp", PAPER), {}),
    "out of reach": ("written", ("fsdp", PAPER), {"far": True}),
    "not finite": ("written", ("fsdp", PAPER), {"value": float("nan")}),
    "clamped": ("clamped", ("fsdp", PAPER), {}),
    "spoilt": ("spoilt", ("fsdp", PAPER), {}),
    "snapshots": ("snapshots", ("fsdp", OFFSET), {}),
    "peeked": ("peeked", ("fsdp", PAPER), {}),
    "mixed": ("trajectory", ("mixed", PAPER), SETTINGS),
    **{case: ("refused", (case,), {}) for case in ("zero", "strides", "flattened later", "fsdp1")},
}


@pytest.fixture(scope="module")
def details(tmp_path_factory):
    """What each of four processes has to say of each case."""
    results = run(4, tmp_path_factory.mktemp("details"), sharded.several, list(DETAILS.values()))
    return {case: [said[i] for said in results] for i, case in enumerate(DETAILS)}


def test_a_step_takes_one_all_reduce_and_state_is_split_as_the_parameter(details):
    for rank, (count, kinds) in enumerate(details["collectives"]):
        assert count == 1
        rows = (1, 1, 1, 0)[rank]  # three rows in four processes
        assert kinds["raw"] == kinds["exp_avg"] == ((3, 16), (rows, 16))
        assert kinds["panel0"] == kinds["panel0_exp_avg_sq"] == ((3, 11), (rows, 11))
        assert kinds["panel1"] == kinds["panel1_exp_avg"] == ((12, 16), None)
        assert kinds["step"] == kinds["scale_step"] == ((), None)


def test_mixed_precision_keeps_everything_of_the_optimizer_in_fp32(details, whole):
    """Weights are cast to bfloat16 for the forward and backward passes alone."""
    weights, state, losses, _ = details["mixed"][0]
    assert {value.dtype for value in (*weights.values(), *state.values())} == {torch.float32}
    expected = whole[PAPER, torch.float32][2]
    assert losses[:5] == pytest.approx(expected[:5], rel=0.02)  # then the roundings of bfloat16 go their own way
    assert losses[:5] != pytest.approx(expected[:5], rel=1e-5)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_a_write_into_one_process_is_taken_over_at_the_next_step(details):
    found, trail, *_ = details["written"][0]
    for _, other, agrees, _, told in details["written"]:
        assert agrees
        assert not told
        assert torch.equal(other[1], trail[1])
    assert found[4, :2].tolist() == [0.25, -0.125]  # the first row of the second process
    torch.testing.assert_close(
        trail[0][4, :2], found[4, :2], rtol=0, atol=0.05
    )  # a step from there, of lr 1e-3 and k 50
    assert not torch.equal(trail[0][4, :2], found[4, :2])


def test_writes_after_every_step_leave_every_step_in_force(details):
    for weights in details["clamped"]:
        assert max(distances(weights, sharded.clamped("whole", PAPER)).values()) < 1e-9


def test_scales_out_of_reach_start_anew_in_every_process(details):
    found, trail, _, panels, _ = details["out of reach"][0]
    for _, other, agrees, others, told in details["out of reach"]:
        assert agrees
        assert len(told) == 1
        assert torch.equal(others["panel1"], panels["panel1"])
        assert torch.equal(other[1], trail[1])
    assert torch.equal(trail[1][4:8], found[4:8])


def test_a_nan_in_one_process_is_an_error_in_all(details):
    assert all("3.weight: " in said and "are not finite" in said for said in details["not finite"])
    refusals = details["spoilt"]
    assert "the weights must be finite" in refusals[1]
    assert all(said == "3.weight: another process refuses its part" for said in refusals[:1] + refusals[2:])


def test_the_state_of_a_process_can_be_saved_and_loaded_and_is_no_larger_than_its_part(details):
    assert details["snapshots"] == [(True, True)] * 4


def test_a_look_at_the_state_before_the_first_step_changes_nothing(details):
    for undisturbed, looked in details["peeked"]:
        assert looked == undisturbed


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("zero", "For an optimizer over a part of the model.*ZeroRedundancyOptimizer"),
        ("strides", r"3\.weight is placed as .* on its mesh, .* strides of 2: shards of whole rows or columns"),
        ("flattened later", r"3\.weight must have its shape \(16, 17\), got \(272,\): parameters flattened .* are not"),
        ("fsdp1", "FSDP1"),
    ],
)
def test_what_cannot_be_right_is_refused(details, case, message):
    for said in details[case]:
        assert re.search(message, said), said
