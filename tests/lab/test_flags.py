import shlex

import pytest
from cyclopts import App, Parameter

from symexplin.lab.compare.grid import CompareConfig
from symexplin.lab.config import RunConfig
from symexplin.lab.flags import with_flags
from symexplin.lab.settings import build, keys


def parse(words, schema=RunConfig, leave_out=()):
    """Return the table that flags describe."""
    app = App(
        default_command=with_flags(lambda **given: given, schema, leave_out),
        default_parameter=Parameter(negative_iterable=()),
        result_action="return_value",
    )
    return app(shlex.split(words), exit_on_error=False, print_error=False)


@pytest.mark.parametrize("schema", [RunConfig, CompareConfig])
def test_flags_are_the_keys_of_the_schema(schema):
    app = App(default_command=with_flags(lambda **_: None, schema), default_parameter=Parameter(negative_iterable=()))
    flags = {name for argument in app.assemble_argument_collection() for name in argument.names}
    expected = {"--" + key.name.replace("_", "-") for key in keys(schema)}
    assert expected <= flags
    assert flags - expected == {"--no-" + key.name.replace("_", "-") for key in keys(schema) if key.kind is bool}


def test_only_what_is_given_is_set_in_its_table():
    assert parse("") == {}
    assert parse("--width 64 --lr 1e-3 --no-bias --data d") == {
        "data": "d",
        "model": {"width": 64, "bias": False},
        "train": {"lr": 1e-3},
    }


def test_flags_mean_what_the_file_means():
    words = "--data d --betas 0.8 0.95 --home module --preset paper --map beta=5 e.k=[50,8] --threads 1 --wandb mine"
    table = {
        "data": "d",
        "train": {"betas": [0.8, 0.95]},
        "sel": {"home": "module", "preset": "paper", "map": {"beta": 5, "e": {"k": [50, 8]}}},
        "compute": {"threads": 1},
        "log": {"wandb": "mine"},
    }
    assert build(RunConfig, parse(words)) == build(RunConfig, table)


def test_values_of_a_table_are_those_of_toml_or_text_and_flags_are_merged():
    words = "--map mode=congruent normalize=true beta=2.5 \"exclude=['a*']\" --map e.pattern=row e.k=[5,1]"
    assert parse(words)["sel"]["map"] == {
        "mode": "congruent",
        "normalize": True,
        "beta": 2.5,
        "exclude": ["a*"],
        "e": {"pattern": "row", "k": [5, 1]},
    }


def test_lists_take_several_values():
    words = "--lrs 1e-3 3e-3 --seeds 4 5 --arms AdamW SEL"
    assert parse(words, CompareConfig) == {"compare": {"lrs": (1e-3, 3e-3), "seeds": (4, 5), "arms": ("AdamW", "SEL")}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--width 1.5", "--width: must be a whole number, got '1.5'"),
        ("--seeds 1 b", "--seeds: must be a whole number, got 'b'"),
        ("--map =3", "--map: must be KEY=VALUE"),
        ("--lr 1", "--lr.* Did you mean --lrs"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(Exception, match=message):
        parse(words, CompareConfig, leave_out=("lr",))
