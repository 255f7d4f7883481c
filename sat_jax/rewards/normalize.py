"""One spelling for answers that differ in typography only. Nothing here decides whether two values are equal."""

from __future__ import annotations

import re
import unicodedata

_REPLACEMENTS = (
    ("\u2212", "-"), ("\u2013", "-"), ("\u2014", "-"), ("\u00d7", r"\times "), ("\u00b7", r"\cdot "), ("\u00f7", "/"),
    ("\u221e", r"\infty "), ("\u03c0", r"\pi "), ("\u03b8", r"\theta "), ("\u222a", r"\cup "), ("\u2229", r"\cap "),
    ("\u2208", r"\in "), ("\u2205", r"\emptyset "), ("\u00b0", r"^\circ "), ("\u2264", r"\le "), ("\u2265", r"\ge "),
    ("\u2260", r"\ne "), ("\u00b1", r"\pm "), ("\u00a0", " "), ("{,}", ""), (r"\!", ""), (r"\%", "%"), (r"\$", "$"),
    (r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\leq", r"\le"), (r"\geq", r"\ge"), (r"\neq", r"\ne"),
    (r"\ldots", "..."), (r"\dots", "..."), (r"\degree", r"^\circ"), (r"^{\circ}", r"^\circ"), (r"\lvert", "|"),
    (r"\rvert", "|"), (r"\vert", "|"), (r"\varnothing", r"\emptyset"), (r"\cdot", r"\times"), ("**", "^"),
)  # fmt: skip

_SPACING = re.compile(
    r"(?<!\\)\\[,;: ]|\\(?:quad|qquad|displaystyle|textstyle|limits|nolimits|hspace\{[^}]*\})(?![a-zA-Z])|~"
)
_SIZES = re.compile(r"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|Biggl?|Biggr)(?![a-zA-Z])\.?")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_ARGUMENT = r"(?:\{([^{}]*)\}|(\d|[a-zA-Z]|\\[a-zA-Z]+))"
_BARE_ARGUMENT = re.compile(rf"\\(frac|binom)\s*{_ARGUMENT}\s*{_ARGUMENT}")
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z]|\\[a-zA-Z]+)")
_UNICODE_ROOT = re.compile("\u221a\\s*(?:(\\d+|[a-zA-Z])|\\(([^()]*)\\))")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf|mbox|operatorname)\s*\{([^{}]*)\}")


def normalize(text: str) -> str:
    """``text`` with one spelling of signs, fractions, roots, spacing and brackets; ``\\text{...}`` is kept."""
    text = _VULGAR.sub(_vulgar, text.strip())
    text = _SUPERSCRIPTS.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m[0]).replace("\u2212", "-") + "}", text)
    text = _UNICODE_ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    text = unicodedata.normalize("NFKC", text)
    text = text.replace(r"\{", "\0").replace(r"\}", "\1")  # so that a set's braces are not taken for an argument's
    text = _SIZES.sub("", _SPACING.sub(" ", text)).replace("$", " ").replace(r"\(", "").replace(r"\)", "")
    text = _FRACTIONS.sub(r"\\frac", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", _BARE_ARGUMENT.sub(_braced, text))
    text = re.sub(r"\s+", " ", text.replace("\0", r"\{").replace("\1", r"\}")).strip()
    if whole := _TEXT.fullmatch(text):
        text = whole[1].strip()
    return text.rstrip(".").strip() if not text.endswith("...") else text


def join_thousands(text: str) -> str:
    """``1,234,567`` as one number: a first group of one to three digits, and all others of exactly three."""
    return _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)


def plain_words(text: str) -> str:
    """``\\text{East}`` and its kin as their content, blanks and case folded: for comparing answers that are words."""
    return re.sub(r"\s+", " ", _TEXT.sub(r"\1", text)).strip().casefold()


def split_unit(text: str) -> tuple[str, str]:
    """A quantity as (value, unit): ``5\\text{ cm}`` is ``("5", "cm")``; the unit is empty where there is none.

    Words count as a unit only behind a number or a closed expression: in ``\\text{ ... }``, or bare and longer than a
    letter, so that ``2 x`` stays algebra.
    """
    match = re.fullmatch(
        r"(.*[\d)}])\s*\\(?:text|mathrm|mbox|textbf|textrm)\s*\{\s*([^{}]*?)\s*\}\s*(\^\{?\d\}?)?", text
    )
    if match is None:
        match = re.fullmatch(r"([-+]?[\d.,/ ]*\d)\s*([a-zA-Z]{2,}[a-zA-Z /]*?)(\^\{?\d\}?)?", text)
    if match is None or re.fullmatch(r"or|and|[eE]", match[2]):
        return text, ""
    unit = re.sub(r"[{}\s.]", "", match[2] + (match[3] or "")).casefold()
    return match[1].strip(), unit


def _vulgar(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _braced(match: re.Match[str]) -> str:
    name, top, bare_top, bottom, bare_bottom = match.groups()
    first, second = (a if a is not None else b for a, b in ((top, bare_top), (bottom, bare_bottom)))
    return rf"\{name}{{{first}}}{{{second}}}"
