"""A field is one definition of an option: type, default, limits, help. What is out of them is told by its flag."""

import dataclasses
import math

import pytest

from accel_sft import option
from accel_sft.api.options import problems, settings


@dataclasses.dataclass(kw_only=True)
class Sample:
    """One field of each kind."""

    many: int = option(3, min=1, max=9, help="How many.", section="Numbers")
    rate: float | None = option(None, min=0, help="A rate.")
    style: str = option("plain", choices=("plain", "fancy"), help="Look.")
    loud: bool = False
    file_name: str = option(help="Has no default.")
    derived: list = dataclasses.field(init=False, default=None)


def flags_of(**values):
    return problems(Sample(**{"file_name": "f", **values}))


def test_a_setting_reads_its_field():
    many, rate, style, loud, file_name = settings(Sample)
    assert (many.name, many.type, many.optional, many.default) == ("many", int, False, 3)
    assert (many.min, many.max, many.help, many.section) == (1, 9, "How many.", "Numbers")
    assert (rate.type, rate.optional, rate.default) == (float, True, None)
    assert style.choices == ("plain", "fancy")
    assert (loud.type, loud.help, loud.required) == (bool, "", False)
    assert (file_name.flag, file_name.required) == ("--file-name", True)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"many": 0}, "--many 0: must be at least 1"),
        ({"many": 10}, "--many 10: must be at most 9"),
        ({"many": True}, "--many True: expected a whole number"),
        ({"rate": "x"}, "--rate 'x': expected a number"),
        ({"rate": math.inf}, "--rate inf: not a finite number"),
        ({"style": "odd"}, "--style odd: not one of plain, fancy"),
        ({"style": "a\nb"}, "--style 'a\\nb': not one of plain, fancy"),
        ({"style": "x" * 99}, f"--style '{'x' * 80}'...: not one of plain, fancy"),
        ({"file_name": "a\0"}, "--file-name 'a\\x00': has a NUL or bytes that are not UTF-8; remove them"),
        ({"file_name": "\udcff"}, "--file-name '\\udcff': has a NUL or bytes that are not UTF-8; remove them"),
        ({"many": 1 << 20_000}, "--many: the number has 20001 bits; the maximum is 63"),
        ({"loud": 1}, "--loud 1: expected true or false"),
        ({"file_name": None}, "--file-name: a value is needed"),
    ],
)
def test_a_value_out_of_its_definition_is_told_by_flag(values, expected):
    assert flags_of(**values) == [expected]


def test_what_is_within_the_definition_is_no_problem_and_all_else_is_told():
    assert flags_of() == flags_of(many=9, rate=0.0, style="fancy", loud=True) == []
    assert len(flags_of(many=0, rate=-1, style="odd", loud="yes")) == 4


@pytest.mark.parametrize("hint", ["list[int]", "int | str | None", "None"])
def test_type_without_a_flag_is_refused_with_the_fields_name(hint):
    cls = dataclasses.make_dataclass("Odd", [("field", hint, dataclasses.field(default=None))])
    with pytest.raises(TypeError, match=r"Odd\.field: an option is a str, int, float or bool"):
        settings(cls)


def test_a_default_that_runs_would_share_is_refused():
    with pytest.raises(TypeError, match="a default is shared between runs"):
        option([], help="A list.")
    cls = dataclasses.make_dataclass("Made", [("field", int, dataclasses.field(default_factory=int))])
    with pytest.raises(TypeError, match=r"Made\.field: an option's default is a plain value, not a factory"):
        settings(cls)
