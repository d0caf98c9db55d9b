"""The annotations of settings."""

from __future__ import annotations

import dataclasses
from typing import Annotated, get_args, get_origin, get_type_hints

from mlxrun.config.setting_annotations import Bytes, Range, Secret
from mlxrun.config.settings import Config


def test_settings_have_no_other_annotations_and_their_defaults_are_in_range() -> None:
    seen = set()
    for section in dataclasses.fields(Config()):
        value = getattr(Config(), section.name)
        if not dataclasses.is_dataclass(value):
            continue
        for name, hint in get_type_hints(type(value), include_extras=True).items():
            for mark in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
                seen.add(type(mark))
                default = getattr(value, name)
                if isinstance(mark, Range) and default is not None:
                    assert mark.low is None or default >= mark.low, name
                    assert mark.high is None or default <= mark.high, name
    assert seen == {Bytes, Range, Secret}
