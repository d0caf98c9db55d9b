"""The types of values and the hash of a config (config/setting_fields.py)."""

from __future__ import annotations

from tests.helpers.config_files import load


def test_values_have_the_type_of_their_field() -> None:
    config = load(
        "scheduler: {aging: 5, chunk: 64.0}\nmedia: {max_bytes: 1.5kB}\nsampling: {top_p: 1e-1}\n"
    ).config
    assert [type(value) for value in (config.scheduler.aging, config.scheduler.chunk)] == [float, int]
    assert config.media.max_bytes == 1500
    assert config.sampling.top_p == 0.1


def test_the_digest_is_of_what_is_in_force() -> None:
    plain = load("").digest
    assert load("scheduler: {policy: fcfs}\n").digest == plain
    assert load("scheduler: {policy: fair}\n").digest != plain
    assert load("media: {max_bytes: 20MB}\n").digest == load("media: {max_bytes: 20000000}\n").digest
    assert len(plain) == 64
