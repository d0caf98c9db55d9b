"""Scalars are read as in YAML 1.2 and written so that they are read back (config/yaml_source.py)."""

from __future__ import annotations

from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.config.loading import load_config
from mlxrun.config.yaml_source import parse_scalar, render_yaml


def test_yaml_1_2_scalars() -> None:
    found = [
        parse_scalar(text)
        for text in ("no", "12:30", "0x1F", "0o17", "017", "-2", "1.", "~", "", "null", "True", "2024-01-01")
    ]
    assert found == ["no", "12:30", 31, 15, 17, -2, 1.0, None, None, None, True, "2024-01-01"]


@given(
    st.one_of(
        st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_values_survive_being_written(value: str | int | bool | None | float) -> None:
    text = render_yaml([value])
    assert len(text.splitlines()) == 1
    Path("v.yaml").write_text(f"model: {{names: {text}}}\n", encoding="utf-8", newline="")
    if isinstance(value, str) and value and "${" not in value:
        assert load_config(Path("v.yaml")).config.model.names == (value,)
    else:
        assert yaml.safe_load(text) == [value] or isinstance(value, float)
