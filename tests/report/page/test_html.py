from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from gpipe_cli.report.formatting import printable
from gpipe_cli.report.page.html import join, tag


class Reader(HTMLParser):
    """What a browser makes of a page: elements, their attributes, and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(), st.text())
def test_whatever_is_given_as_text_or_value_is_read_back_as_such(text: str, value: str) -> None:
    reader = Reader()
    reader.feed(tag("p", {"class": value}, text).source)
    reader.close()
    assert reader.elements == [("p", {"class": printable(value)})]
    assert reader.text == printable(text)


def test_what_was_made_by_tag_is_not_escaped_again() -> None:
    inner = tag("b", None, "<")
    assert join([inner, None, ">"]).source == "<b>&lt;</b>&gt;"
    assert tag("p", None, inner).source == "<p><b>&lt;</b></p>"


def test_numbers_of_attributes_are_short() -> None:
    assert (
        tag("rect", {"x": 1 / 3, "y": 20.0, "width": 0}).source == '<rect x="0.33" y="20" width="0"></rect>'
    )
