"""Markdown tables, as written by hand."""

from echokv.bench.markdown import table


def test_words_are_on_the_left_and_numbers_on_the_right() -> None:
    rows = [["a", "b", 1234], ["c", None, 1234.56]]
    assert table(["x", "y", "z"], rows, words=2).splitlines() == [
        "| x | y | z |",
        "|---|---|---:|",
        "| a | b | 1234 |",
        "| c |  | 1,234.6 |",
    ]


def test_a_table_may_have_no_rows_and_no_words() -> None:
    assert table(iter(["x", "y"]), iter(()), words=0) == "| x | y |\n|---:|---:|"
