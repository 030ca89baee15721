"""docs/notices.md says what the tests say."""

from tests import notices


def test_the_page_has_the_rows_of_the_tests() -> None:
    page = notices.PAGE.read_text()
    assert page == notices.written(page), "docs/notices.md is not what the marks say: run `make notices`"


def test_every_test_that_is_named_exists_once_in_its_row() -> None:
    for row, tests in notices.marked().items():
        assert len(tests) == len(set(tests)), row
