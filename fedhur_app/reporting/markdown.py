"""A small, safe part of Markdown as HTML: what the reports of this project are written in.

Headings, paragraphs, lists (nested by indentation), tables, code, quotes, emphasis, links and images. Everything else,
HTML above all, is text and escaped.
"""

import html
import re
from collections.abc import Callable

# Takes the address and the alternative text of an image; returns HTML for it, or None if there is no such image.
Images = Callable[[str, str], str | None]

_ITEM = re.compile(r"(\s*)([-*+]|\d{1,9}[.)])\s+(.*)")
_RULE = re.compile(r"\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*")
_HEADING = re.compile(r"(#{1,6})\s+(.*?)\s*#*\s*")
_NUMBER = re.compile(r"[^\w.+-]*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")
_BREAK = re.compile(r"\s*([-*_])(\s*\1){2,}\s*")
_SPAN = re.compile(
    r"(?P<code>(?P<ticks>`+)(?P<inside>.+?)(?<!`)(?P=ticks)(?!`))"
    r"|\\(?P<escaped>[\\`*_{}\[\]()#+\-.!|<>])"
    r"|!\[(?P<alt>[^\]]*)\]\((?P<src>[^()\s]+)\)"
    r"|\[(?P<label>[^\[\]]+)\]\((?P<href>[^()\s]+)\)"
    r"|(?P<url>https?://[^\s<>()\"']*[^\s<>()\"'.,;:])"
    r"|\*\*(?P<strong>[^*\s](?:[^*]*[^*\s])?)\*\*"
    r"|(?<![\w*])\*(?P<em>[^*\s](?:[^*]*[^*\s])?)\*(?![\w*])"
)


def to_html(text: str, images: Images, top: int = 3) -> str:
    """HTML of a text.

    Args:
        text: Markdown.
        images: Finds images.
        top: Level of the heading that `#` becomes.
    """
    lines = text.replace("\0", "").expandtabs(4).splitlines()
    try:
        return "\n".join(_blocks(lines, images, top))
    except RecursionError:  # quotes in quotes, thousands deep
        return f"<pre>{html.escape(text)}</pre>"


def _blocks(lines: list[str], images: Images, top: int) -> list[str]:
    found: list[str] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if not line.strip():
            at += 1
        elif line.lstrip().startswith("```"):
            end = next((i for i in range(at + 1, len(lines)) if lines[i].lstrip().startswith("```")), len(lines))
            found.append(f"<pre><code>{html.escape(chr(10).join(lines[at + 1 : end]))}</code></pre>")
            at = end + 1
        elif heading := _HEADING.fullmatch(line):
            level = min(6, len(heading[1]) - 1 + top)
            found.append(f"<h{level}>{_inline(heading[2], images)}</h{level}>")
            at += 1
        elif _BREAK.fullmatch(line):
            found.append("<hr>")
            at += 1
        elif _is_table(lines, at):
            end = next((i for i in range(at, len(lines)) if "|" not in lines[i]), len(lines))
            found.append(_table(lines[at:end], images))
            at = end
        elif line.lstrip().startswith(">"):
            end = next((i for i in range(at, len(lines)) if not lines[i].lstrip().startswith(">")), len(lines))
            inner = [each.lstrip()[1:].removeprefix(" ") for each in lines[at:end]]
            found.append(f"<blockquote>{''.join(_blocks(inner, images, top))}</blockquote>")
            at = end
        elif _ITEM.fullmatch(line):
            end = _end_of_list(lines, at)
            found.append(_list(lines[at:end], images, top))
            at = end
        else:
            end = at + 1
            while end < len(lines) and lines[end].strip() and not _starts(lines, end):
                end += 1
            inside = _inline(" ".join(each.strip() for each in lines[at:end]), images)
            found.append(inside if inside.startswith("<figure") else f"<p>{inside}</p>")
            at = end
    return found


def _starts(lines: list[str], at: int) -> bool:
    """Whether a line ends the paragraph before it."""
    line = lines[at]
    opens = line.lstrip().startswith(("```", ">"))
    return opens or bool(_HEADING.fullmatch(line) or _ITEM.fullmatch(line)) or _is_table(lines, at)


def _is_table(lines: list[str], at: int) -> bool:
    rule = lines[at + 1] if at + 1 < len(lines) else ""
    return "|" in lines[at] and "|" in rule and bool(_RULE.fullmatch(rule))


def _end_of_list(lines: list[str], at: int) -> int:
    """The first line that is neither an item nor indented; a blank line ends the list unless it goes on after it."""
    end = at
    while end < len(lines):
        line = lines[end]
        after = next((each for each in lines[end:] if each.strip()), "")
        if line.strip() and not (_ITEM.fullmatch(line) or line.startswith("  ")):
            break
        if not line.strip() and not (_ITEM.fullmatch(after) or after.startswith("  ")):
            break
        end += 1
    return end


def _list(lines: list[str], images: Images, top: int) -> str:
    """One list; what is indented below an item belongs to the item."""
    first = _ITEM.fullmatch(lines[0])
    assert first is not None
    indent, ordered = len(first[1]), first[2][0].isdigit()
    items: list[list[str]] = []
    for line in lines:
        item = _ITEM.fullmatch(line)
        if item and len(item[1]) <= indent:
            items.append([item[3]])
        else:
            items[-1].append(line)
    parts = []
    for head, *rest in items:
        depth = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
        inner = _blocks([head, *(line[depth:] for line in rest)], images, top)
        # A paragraph alone needs no element of its own.
        if inner and inner[0].startswith("<p>"):
            inner[0] = inner[0][3:-4]
        parts.append(f"<li>{''.join(inner)}</li>")
    tag = "ol" if ordered else "ul"
    return f"<{tag}>{''.join(parts)}</{tag}>"


def _table(lines: list[str], images: Images) -> str:
    head, rule, *rows = (_cells(line) for line in lines)
    right = [cell.strip().endswith(":") for cell in rule]

    right = (right + [False] * len(head))[: len(head)]
    heads = "".join(
        f'<th scope="col" aria-sort="none"{_number_class(number)}>'
        f'<button type="button">{_inline(cell, images)}</button></th>'
        for cell, number in zip(head, right, strict=True)
    )
    body = []
    for cells in rows:
        padded = (cells + [""] * len(head))[: len(head)]
        texts = [
            f"<td{_number_class(number)}{_sort_value(cell) if number else ''}>{_inline(cell, images)}</td>"
            for cell, number in zip(padded, right, strict=True)
        ]
        body.append(f"<tr>{''.join(texts)}</tr>")
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table">{table}</div>'


def _number_class(number: bool) -> str:
    return ' class="n"' if number else ""


def _sort_value(cell: str) -> str:
    """The first number of a cell such as `**0.31 ± 0.02**` or `[0.1, 0.2]`: what the table is sorted by (page.js)."""
    found = _NUMBER.match(cell.replace(",", "") if re.fullmatch(r"[\d,.]+", cell) else cell)
    return f' data-v="{float(found[1])!r}"' if found else ""


def _cells(line: str) -> list[str]:
    """Cells of a line; an escaped bar is no border."""
    line = line.strip().removeprefix("|")
    if line.endswith("|") and not line.endswith("\\|"):
        line = line[:-1]
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)]


def _inline(text: str, images: Images) -> str:
    parts: list[str] = []
    at = 0
    for found in _SPAN.finditer(text):
        parts.append(html.escape(text[at : found.start()]))
        parts.append(_span(found, images))
        at = found.end()
    return "".join([*parts, html.escape(text[at:])])


def _span(found: re.Match[str], images: Images) -> str:
    if found["code"]:
        return f"<code>{html.escape(found['inside'].strip())}</code>"
    if found["escaped"]:
        return html.escape(found["escaped"])
    if found["src"]:
        image, name = images(found["src"], found["alt"]), found["alt"] or found["src"]
        return image if image is not None else f"<em>[no such picture: {html.escape(name)}]</em>"
    if found["href"]:
        return _link(found["href"], _inline(found["label"], images))
    if found["url"]:
        return _link(found["url"], html.escape(found["url"]))
    if found["strong"]:
        return f"<strong>{_inline(found['strong'], images)}</strong>"
    return f"<em>{_inline(found['em'], images)}</em>"


def _link(href: str, label: str) -> str:
    """A link to the web. Any other address means nothing where the page lies, or would run something."""
    if not href.startswith(("http://", "https://")):
        return label
    return f'<a href="{html.escape(href)}" rel="noreferrer noopener">{label}</a>'
