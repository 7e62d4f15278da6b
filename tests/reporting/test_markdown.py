import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhur_app.reporting.markdown import to_html


def plain(text: str) -> str:
    return to_html(text, lambda source, alt: None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Big\n### Small", "<h3>Big</h3>\n<h5>Small</h5>"),
        ("one\ntwo\n\nthree", "<p>one two</p>\n<p>three</p>"),
        ("*a* **b** `c*d*`", "<p><em>a</em> <strong>b</strong> <code>c*d*</code></p>"),
        ("2 * 3 * 4, a_b_c, 5*6", "<p>2 * 3 * 4, a_b_c, 5*6</p>"),
        ("- a\n- b\n  - c\n\nafter", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>\n<p>after</p>"),
        ("1. a\n2. b\n   more", "<ol><li>a</li><li>b more</li></ol>"),
        ("```py\nx < 1 # *no*\n```", "<pre><code>x &lt; 1 # *no*</code></pre>"),
        ("> said\n> twice", "<blockquote><p>said twice</p></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p>\n<hr>\n<p>b</p>"),
        (r"\*no\* a\|b", "<p>*no* a|b</p>"),
        ("[x](https://a.org/?q=1&r=2)", '<p><a href="https://a.org/?q=1&amp;r=2" rel="noreferrer noopener">x</a></p>'),
        ("see http://a.org/b.", '<p>see <a href="http://a.org/b" rel="noreferrer noopener">http://a.org/b</a>.</p>'),
        ("[x](javascript:alert) [y](../other.md)", "<p>x y</p>"),
        ("<script>alert(1)</script> &amp;", "<p>&lt;script&gt;alert(1)&lt;/script&gt; &amp;amp;</p>"),
        ("![plot](nothing.png)", "<p><em>[no such picture: plot]</em></p>"),
    ],
)
def test_what_reports_are_written_in(text: str, expected: str) -> None:
    assert plain(text) == expected


def test_tables_sort_by_the_first_number_of_a_cell() -> None:
    table = plain("| arm | ndcg | ci |\n|---|--:|--:|\n| a\\|b | **0.31 ± 0.02** | [-0.1, 0.2] |\n| c | - |\n\nafter")
    assert re.findall(r"<th .*?</th>", table) == [
        '<th scope="col" aria-sort="none"><button type="button">arm</button></th>',
        '<th scope="col" aria-sort="none" class="n"><button type="button">ndcg</button></th>',
        '<th scope="col" aria-sort="none" class="n"><button type="button">ci</button></th>',
    ]
    assert re.findall(r"<td.*?</td>", table) == [
        "<td>a|b</td>",
        '<td class="n" data-v="0.31"><strong>0.31 ± 0.02</strong></td>',
        '<td class="n" data-v="-0.1">[-0.1, 0.2]</td>',
        "<td>c</td>",
        '<td class="n">-</td>',
        '<td class="n"></td>',
    ]
    assert table.endswith("<p>after</p>")


def test_an_image_alone_is_no_paragraph() -> None:
    asked = []

    def figure(source: str, alt: str) -> str:
        asked.append((source, alt))
        return "<figure></figure>"

    assert to_html("![A plot](a.png)\n\ntext", figure) == "<figure></figure>\n<p>text</p>"
    assert asked == [("a.png", "A plot")]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes |= {name for name, _ in attrs}


ALLOWED = {
    *("h3", "h4", "h5", "h6", "p", "em", "strong", "code", "pre", "ul", "ol", "li", "a", "hr", "blockquote", "div")
}
ALLOWED |= {"table", "thead", "tbody", "tr", "th", "td", "button"}
PIECES = ["*", "**", "`", "[", "](", ")", "!", "<script>", "<b onclick='x'>", "javascript:x", "https://a.org/",
          "|", "\n", "---", "- ", "1. ", "> ", "# ", "```", "&", '"', "'", "a", " ", "\\"]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_no_text_brings_elements_or_attributes_of_its_own(text: str) -> None:
    tags = Tags()
    tags.feed(plain(text))
    assert tags.found <= ALLOWED
    assert tags.attributes <= {
        "href",
        "rel",
        "class",
        "tabindex",
        "role",
        "aria-label",
        "aria-sort",
        "scope",
        "type",
        "data-v",
    }


@pytest.mark.parametrize("text", [">" * 5000, "[" * 5000, "`" * 5000 + "a", "*a " * 3000, "- " * 3000])
def test_hostile_texts_take_no_time_and_do_not_fail(text: str) -> None:
    assert plain(text)
