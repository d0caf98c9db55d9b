"""Pages have the same name only if all tokens up to their end, and the adapter, are the same."""

from __future__ import annotations

from mlxrun.model.paged.kernel_source import PAGE
from mlxrun.model.paged.page_keys import compute_page_keys

TOKENS = [n * 7 % 1000 for n in range(4 * PAGE + 3)]


def test_a_name_covers_all_tokens_before_it() -> None:
    keys = compute_page_keys(TOKENS, 0)
    assert len(set(keys)) == 4
    assert compute_page_keys(TOKENS[: 2 * PAGE + 1], 0) == keys[:2]
    changed = [*TOKENS[:PAGE], 5, *TOKENS[PAGE + 1 :]]
    other = compute_page_keys(changed, 0)
    assert other[0] == keys[0] and not set(other[1:]) & set(keys)
    assert not set(compute_page_keys(TOKENS, 1)) & set(keys)


def test_the_newest_token_is_in_no_named_page() -> None:
    assert len(compute_page_keys(TOKENS[: 2 * PAGE], 0)) == 1
    assert compute_page_keys(TOKENS[:1], 0) == compute_page_keys([], 0) == ()


def test_only_whole_chunks_are_named_where_the_rest_may_differ() -> None:
    assert len(compute_page_keys(TOKENS, 0, grid=3 * PAGE)) == 3
    assert len(compute_page_keys(TOKENS, 0, grid=64)) == 4
    assert len(compute_page_keys(TOKENS[: 2 * PAGE + 70], 0, grid=3 * PAGE)) == 0
