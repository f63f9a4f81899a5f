"""Flags that constrain the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmkit import SamplingParams
from llmkit.errors import InvalidRequestError
from llmkit_cli.structured_options import structured_outputs


def given(**flags: Any) -> dict[str, Any]:
    absent: dict[str, Any] = {"json_schema": None, "json_object": False, "regex": None, "choice": None, "grammar": None}
    return absent | flags


def test_flags_become_the_field_of_the_parameters(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "null"}')
    grammar.write_text('start: "a"')
    assert structured_outputs(given()) is None
    assert structured_outputs(given(choice=[])) is None
    for flags, expected in (
        ({"json_schema": schema}, {"json": '{"type": "null"}'}),
        ({"grammar": grammar}, {"grammar": 'start: "a"'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ):
        found = structured_outputs(given(**flags))
        assert found == expected
        assert SamplingParams(structured_outputs=found).constraint is not None


def test_two_constraints_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        SamplingParams(structured_outputs=structured_outputs(given(regex="a", choice=["a"])))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"nowhere\.json cannot be read"):
        structured_outputs(given(json_schema=tmp_path / "nowhere.json"))
