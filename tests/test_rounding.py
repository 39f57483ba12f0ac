"""Stochastic rounding: unbiased, uniform noise, the same bits for any shard."""

import itertools
import math

import pytest
import torch

from reference import noise
from symexplin.rounding import key_of, noise_of, round_, span

KEY = key_of(0, 3, 70)


def rounded(values, key=1, place=None):
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_(out, values, key, *(place or span(values.shape, values.shape, [0] * values.ndim)))
    return out


@pytest.mark.parametrize("which", ["index", "seed", "position", "step"])
def test_the_noise_is_uniform_over_places_seeds_parameters_and_steps(which):
    n = 2**15
    if which == "index":
        draws = noise_of(torch.arange(n), KEY, 0, n, 0)
    else:  # of one place, up to a mix of all keys
        draws = torch.tensor([key_of(**{"seed": 7, "position": 2, "step": 1, which: k}) & 0xFFFF for k in range(n)])
    counts = torch.bincount(draws // 256, minlength=256).double()
    chi2 = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    # Neighbors are uncorrelated: 1/12 is the variance of a uniform number.
    u = draws.double() / 65536 - 0.5
    assert abs((u[1:] * u[:-1]).mean().item()) < 5 / 12 / math.sqrt(n)


def test_rounding_adds_the_noise_to_the_bits_and_cuts_them():
    values = torch.randn(4, 5)
    bits = [word & 0xFFFFFFFF for word in values.flatten().view(torch.int32).tolist()]
    # 4 rows of 5, 210,000 places apart, beyond index 2^32; the low bits of one value sum to 2^16 and to one less
    first = 2**32 - 300_000
    for key, change in itertools.product((key_of(1, 2, step) for step in range(8)), (0, 1)):
        bits[0] = (0x3F800000 | 0x10000 - noise(key, first)) - change
        signed = torch.tensor([word - (word >> 31 << 32) for word in bits], dtype=torch.int32)
        expected = [(word + noise(key, first + k // 5 * 210_000 + k % 5)) >> 16 for k, word in enumerate(bits)]
        out = rounded(signed.view(torch.float32).view(4, 5), key, (first, 5, 210_000))
        assert [word & 0xFFFF for word in out.flatten().view(torch.int16).tolist()] == expected


def test_keys_of_swapped_arguments_differ():
    keys = {key_of(*parts) for parts in [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2), (0, 0, 0), (0, 0, 2**32)]}
    assert len(keys) == 6
    assert all(0 <= key < 2**32 for key in keys)


def test_what_bfloat16_represents_stays_and_so_do_nan_and_infinity():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    for step in range(3):
        assert torch.equal(rounded(finite.float(), key_of(0, 0, step)).view(torch.int16), finite.view(torch.int16))
    low_nan = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)  # bits that a cut would lose
    odd = torch.cat([torch.tensor([math.inf, -math.inf, math.nan]), low_nan])
    for step in range(3):
        out = rounded(odd, key_of(0, 0, step))
        assert torch.equal(out[:2].float(), odd[:2])
        assert bool(out[2:].isnan().all())


@pytest.mark.parametrize(
    ("whole", "dims"),
    [
        *[((7,), (0,)), ((7, 5), (0,)), ((7, 5), (1,)), ((3, 7, 5), (1,)), ((3, 4, 2, 5), (2,)), ((7, 5), (0, 1))],
        *[((6, 4, 5), (0, 1)), ((6, 4, 5), (0, 2)), ((1, 4, 5), (1, 2)), ((7, 5), ()), ((), ())],
        ((3, 700_001), (0, 1)),  # too large to be rounded at once
    ],
)
def test_shards_have_the_bits_of_the_whole(whole, dims):
    values = torch.randn(whole, generator=torch.Generator().manual_seed(0))
    key = key_of(5, 1, 9)
    expected = rounded(values, key)
    cuts = [[0, 1, size // 2 + 1, size] if d in dims else [0, size] for d, size in enumerate(whole)]
    for bounds in itertools.product(*map(itertools.pairwise, cuts)):
        starts, part = [first for first, _ in bounds], tuple(itertools.starmap(slice, bounds))
        local = values[part].contiguous()
        assert torch.equal(rounded(local, key, span(local.shape, whole, starts)), expected[part]), starts


def test_other_memory_formats_and_empty_shards():
    values = torch.randn(4, 6, 3, 5)
    strided = values.to(memory_format=torch.channels_last)
    out = torch.empty_like(strided, dtype=torch.bfloat16)
    round_(out, strided, 3, *span(values.shape, values.shape, [0] * 4))
    assert torch.equal(out, rounded(values, 3))
    assert rounded(values[:, :0], 3, span((4, 0, 3, 5), values.shape, (0, 6, 0, 0))).numel() == 0


@pytest.mark.parametrize(
    ("local", "whole"), [((2, 2, 2), (4, 4, 4)), ((3, 2, 2), (3, 4, 4)), ((2, 2, 3, 1), (4, 2, 6, 2))]
)
def test_other_shards_are_refused(local, whole):
    with pytest.raises(ValueError, match="equal runs at one stride"):
        span(local, whole, [0] * len(whole))
