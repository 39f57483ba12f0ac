import pytest

from symexplin.cli.parser import Parser, add_keys, given
from symexplin.lab.config import RunConfig
from symexplin.lab.settings import build, keys


def parse(*words, schema=RunConfig, leave_out=()):
    parser = Parser(prog="test")
    add_keys(parser, schema, leave_out)
    return given(parser.parse_args(words), schema)


def test_flags_are_the_keys_of_the_schema():
    parser = Parser(prog="test")
    add_keys(parser, RunConfig)
    flags = {option for option in parser._option_string_actions if option.startswith("--")}
    expected = {"--" + key.name.replace("_", "-") for key in keys(RunConfig)}
    assert expected <= flags
    assert flags - expected <= {"--help", *("--no-" + flag[2:] for flag in expected)}


def test_only_what_is_given_is_set_in_its_table():
    assert parse() == {}
    assert parse("--width", "64", "--lr", "1e-3", "--no-bias", "--data", "d") == {
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
    assert build(RunConfig, parse(*words.split())) == build(RunConfig, table)


def test_values_of_a_map_are_those_of_toml_or_text():
    found = parse("--map", "mode=congruent", "normalize=true", "beta=2.5", "exclude=['a*']", "e.pattern=row")["sel"][
        "map"
    ]
    assert found == {"mode": "congruent", "normalize": True, "beta": 2.5, "exclude": ["a*"], "e": {"pattern": "row"}}


def test_keys_can_be_left_out():
    with pytest.raises(ValueError, match="unknown argument '--lr'"):
        parse("--lr", "1", leave_out=("lr",))


def test_abbreviations_are_no_flags():
    with pytest.raises(ValueError, match=r"unknown argument '--wid'; did you mean --width\?"):
        parse("--wid", "3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--width 1.5", "--width: must be a whole number, got '1.5'"),
        ("--lr fast", "--lr: must be a number, got 'fast'"),
        ("--betas 0.9", "--betas: expected 2 arguments"),
        ("--start macthed", r"--start must be one of 'matched', 'mismatched', got 'macthed'; did you mean 'matched'\?"),
        ("--map =3", "--map: must be KEY=VALUE"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(ValueError, match=message):
        parse(*words.split())
