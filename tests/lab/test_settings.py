import dataclasses
import math
import re
import shlex
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from cyclopts import App

from symexplin.experiments.reproduce import ReproduceConfig
from symexplin.lab.compare.grid import CompareConfig
from symexplin.lab.config import RunConfig
from symexplin.lab.data.prepare import PrepareConfig
from symexplin.lab.settings import (
    FLAGS,
    Count,
    Fraction,
    NotNegative,
    Pairs,
    Positive,
    Schema,
    Whole,
    dump_toml,
    from_table,
    load_toml,
    to_table,
    with_flags,
)

SCHEMAS = (CompareConfig, PrepareConfig, ReproduceConfig)


def odd(name, value):
    if value % 2 == 0:
        raise ValueError(f"{name} must be odd, got {value}")


@dataclass(frozen=True)
class Inner(Schema):
    """A table."""

    size: Annotated[Count, odd] = 3
    low: float = 0.0
    scale: Positive = 1.0
    share: Fraction = 0.5
    decay: NotNegative = 0.0
    pair: tuple[Fraction, Fraction] = (0.1, 0.2)
    seeds: tuple[Whole, ...] = ()
    kind: Literal["left", "right"] | None = None
    hidden: Count = field(default=7, metadata={"derived": True})


@dataclass(frozen=True)
class Outer(Schema):
    """A configuration.

    Args:
        path: where it is.
    """

    path: str
    inner: Inner = field(default_factory=Inner)
    switch: bool = False
    limit: Whole | None = None
    extra: Pairs = field(default_factory=dict)


def test_a_file_becomes_the_configuration_and_back(tmp_path):
    """Numbers to the bit."""
    inner = Inner(5, 2.6516504294455533, math.pi * 1e20, pair=(0.3, 1e-300), seeds=(4, 0), kind="left")
    config = Outer("x", inner, switch=True, limit=2, extra={"e": {"k": [0.1, 2]}})
    path = tmp_path / "c.toml"
    path.write_text(dump_toml(to_table(config)))
    assert from_table(Outer, load_toml(path)) == config
    assert from_table(Outer, to_table(Outer("x"))) == Outer("x")
    assert "limit" not in to_table(Outer("x"))
    assert "hidden" not in to_table(Outer("x"))["inner"]


def test_whole_numbers_serve_as_numbers_and_lists_as_tuples():
    inner = Inner(low=2, pair=[0, 0.5], seeds=[3])
    assert (inner.pair, inner.seeds) == ((0.0, 0.5), (3,))
    assert [type(number) for number in (inner.low, *inner.pair)] == [float] * 3
    assert from_table(Outer, {"path": "x", "inner": {"low": 2, "pair": [0, 0.5], "seeds": [3]}}).inner == inner


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({}, "path must be given: where it is"),
        ({"path": "x", "swich": True}, "unknown key 'swich'; did you mean 'switch'?"),
        ({"path": "x", "inner": {"sise": 1}}, r"unknown key 'sise' in \[inner\]; did you mean 'size'?"),
        ({"path": "x", "size": 1}, r"unknown key 'size', which belongs in \[inner\]"),
        ({"path": "x", "inner": {"hidden": 1}}, "unknown key 'hidden'"),
        ({"path": "x", "inner": 3}, r"\[inner\] must be a table, got 3"),
        ({"path": 3}, "path must be a string, got 3"),
        ({"path": "x", "switch": 1}, "switch must be true or false, got 1"),
        ({"path": "x", "extra": 1}, "extra must be a table, got 1"),
    ],
)
def test_mistakes_in_a_table_are_named(table, words):
    with pytest.raises(ValueError, match=words):
        from_table(Outer, table)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"size": 1.5}, "size must be a whole number, got 1.5"),
        ({"size": True}, "size must be a whole number, got True"),
        ({"size": 0}, "size must be a whole number >= 1, got 0"),
        ({"size": 4}, "size must be odd, got 4"),
        ({"low": 10**400}, "low must be a number, got 1000"),
        *(({"scale": value}, "scale must be a positive finite number") for value in (0, math.nan, math.inf)),
        *(({"share": value}, r"share must be a number in \[0, 1\)") for value in (1, -0.1, math.nan)),
        *(({"decay": value}, "decay must be a finite number >= 0") for value in (-0.1, math.inf)),
        ({"pair": [0.5]}, r"pair must be a list of 2, got \[0.5\]"),
        ({"pair": 0.5}, "pair must be a list, got 0.5"),
        ({"pair": (0.5, 1.0)}, r"pair must be a number in \[0, 1\), got 1.0"),
        ({"seeds": (1, -1)}, "seeds must be a whole number >= 0, got -1"),
        ({"kind": "rihgt"}, "kind must be one of 'left', 'right', got 'rihgt'; did you mean 'right'?"),
    ],
)
def test_values_are_checked_in_a_table_and_in_python(values, words):
    for make in (lambda: Inner(**values), lambda: from_table(Outer, {"path": "x", "inner": values})):
        with pytest.raises(ValueError, match=words):
            make()


# --- Flags -----------------------------------------------------------------------------------------------------------


def app_of(schema):
    command = with_flags(lambda table: table, schema)
    return App(default_command=command, default_parameter=FLAGS, result_action="return_value")


def parse(words, schema=RunConfig):
    """Return the table that flags describe."""
    return app_of(schema)(shlex.split(words), exit_on_error=False, print_error=False)


def flags_of(schema):
    return [*app_of(schema).assemble_argument_collection()]


def names_of(schema):
    """Return the keys of a schema and of its tables, as `dataclasses` tells them."""
    for entry in dataclasses.fields(schema):
        if dataclasses.is_dataclass(entry.type):
            yield from names_of(entry.type)
        elif not entry.metadata:
            yield entry.name


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_key_has_one_flag_with_a_help(schema):
    """If two tables had a key of the same name, its flag would need the table's name."""
    flags = flags_of(schema)
    assert sorted(flag.name for flag in flags) == sorted("--" + name.replace("_", "-") for name in names_of(schema))
    assert [flag.name for flag in flags if not flag.parameter.help] == []


@pytest.mark.parametrize("schema", SCHEMAS)
def test_no_flag_rounds_a_number(schema):
    """cyclopts itself would make 2 of 1.5."""
    for flag in flags_of(schema):
        if "int" in re.findall(r"\w+", str(flag.hint)):
            with pytest.raises(Exception, match=f"{flag.name}: must be a whole number, got '1.5'"):
                parse(f"{flag.name} 1.5", schema)


def test_only_what_is_given_is_set_in_its_table_and_lists_take_several_values():
    assert parse("") == {}
    words = "--data d --width 64 --no-bias --betas 0.8 0.95 --lrs 1e-3 3e-3 --seeds 4 5 --variants AdamW SEL"
    assert parse(words, CompareConfig) == {
        "data": "d",
        "model": {"width": 64, "bias": False},
        "train": {"betas": (0.8, 0.95)},
        "compare": {"lrs": (1e-3, 3e-3), "seeds": (4, 5), "variants": ("AdamW", "SEL")},
    }


def test_values_of_a_table_are_those_of_toml_or_text_and_flags_are_merged():
    words = "--map mode=congruent normalize=true \"exclude=['a*']\" --map e.pattern=row e.k=[5,1]"
    assert parse(words)["sel"]["map"] == {
        "mode": "congruent",
        "normalize": True,
        "exclude": ["a*"],
        "e": {"pattern": "row", "k": [5, 1]},
    }
