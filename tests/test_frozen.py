"""`@frozen` makes a frozen, keyword-only dataclass in all that its users can see."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace

import msgspec
import pytest

from broker.frozen import frozen


@frozen
class Point:
    """A place."""

    x: int
    y: int = 0
    names: dict[str, str] = field(default_factory=dict)
    note: str = field(default="", repr=False)


@frozen
class Single:
    value: int


@dataclass(frozen=True, kw_only=True)
class Plain:
    x: int
    y: int = 0
    names: dict[str, str] = field(default_factory=dict)
    note: str = field(default="", repr=False)


def test_it_reads_as_a_dataclass_does() -> None:
    point, plain = Point(x=1, note="hidden"), Plain(x=1, note="hidden")
    assert repr(point) == repr(plain).replace("Plain", "Point")
    assert asdict(point) == asdict(plain)
    assert [(each.name, each.default) for each in fields(Point)] == [
        (each.name, each.default) for each in fields(Plain)
    ]
    assert Point.y == 0 and Point.__doc__ == "A place."


def test_equal_values_are_equal_and_hash_alike() -> None:
    assert Point(x=1, y=2) == Point(y=2, x=1) and Point(x=1) != Point(x=2)
    assert Single(value=1) == Single(value=1) and len({Single(value=1), Single(value=1), Single(value=2)}) == 2
    assert Point(x=1) != Plain(x=1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point(x=1))  # it holds a dict


def test_frozen_object_cannot_be_changed() -> None:
    point = Point(x=1)
    with pytest.raises(FrozenInstanceError):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del point.x
    assert point == Point(x=1)


def test_each_instance_gets_its_own_dict() -> None:
    first, second = Point(x=1), Point(x=1)
    first.names["a"] = "b"
    assert second.names == {}


@pytest.mark.parametrize(("given", "wrong"), [({}, "requires x"), ({"x": 1, "z": 2}, "has no field z")])
def test_error_names_unknown_and_missing_fields(given: dict[str, int], wrong: str) -> None:
    with pytest.raises(TypeError, match=f"Point {wrong}"):
        Point(**given)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Point(1)  # type: ignore[misc]


def test_copy_of_a_frozen_object_is_equal() -> None:
    point = Point(x=1, names={"a": "b"})
    assert replace(point, x=2) == Point(x=2, names={"a": "b"})
    for other in (copy.deepcopy(point), pickle.loads(pickle.dumps(point))):  # noqa: S301 - our own bytes
        assert other == point and other.names is not point.names
    assert msgspec.json.decode(msgspec.json.encode(point), type=Point) == point
    assert msgspec.json.decode(b'{"x": 3}', type=Point) == Point(x=3)
