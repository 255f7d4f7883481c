"""Whether two written answers mean the same.

Exact by default: ``1/2^{99}`` is not ``1/2^{98}``, ``10000000000000001`` is not ``10000000000000000``. These liberties
are taken, and no others:

* a decimal of six or more significant digits stands for the fraction or irrational number that it is the rounding of;
* a percentage equals both its hundredth and its bare number (``10%`` is ``0.1``, and is ``10``);
* the ratio ``3:4`` is the fraction ``3/4``;
* a unit may be left out, but two units must agree; degrees and currency signs count for nothing;
* ``x = 5`` may be given as ``5``, and ``x \\in [0, 1]`` as ``[0, 1]``;
* sets, and lists without brackets, have no order; tuples and intervals do, and their brackets count;
* words are compared without case.

Numbers are compared as fractions here; whatever is not a number goes to SymPy through math-verify, unless it is so
large that evaluating it could take for ever: then only the same spelling is the same answer.
"""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig

from sat_jax.rewards.normalize import join_thousands, normalize, plain_words, split_unit

# math-verify's own time limits are signals, for main threads only; the grader's replace them, so no warnings please.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_LATEX = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
)

_DIGITS = 40
_LONGEST_TEXT = 20_000
_MOST_CHARACTERS = 400
_DEEPEST = 24
_ROUNDED_DIGITS = 6

_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_SCIENTIFIC = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))\s*(?:\\times\s*10\s*\^\s*\{?\s*([-+]?\d+)\s*\}?|[eE]([-+]?\d+))")
_FRACTION = re.compile(r"([-+]?)\s*(?:\\frac\{\s*([-+]?[\d.]+)\s*\}\{\s*([-+]?[\d.]+)\s*\}|([\d.]+)\s*/\s*(-?[\d.]+))")
_MIXED = re.compile(r"([-+]?)(\d+)\s*(?:\\frac\{(\d+)\}\{(\d+)\}|\s(\d+)/(\d+))")
_NAME = r"(?:[a-zA-Z]|\\(?:theta|alpha|beta|lambda|phi))(?:_\{?\w+\}?)?(?:\([a-zA-Z]\))?"
_LEFT_SIDE = re.compile(rf"({_NAME})\s*=\s*([^=<>]+)")
_MEMBER_OF = re.compile(rf"{_NAME}\s*\\in(?![a-zA-Z])\s*(.+)")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_RATIO = re.compile(r"([\d.]+)\s*:\s*([\d.]+)")
_OPEN, _CLOSE = "([{", ")]}"


def equal_answers(given: str, reference: str) -> bool:
    """True where ``given`` means what ``reference`` means, under the liberties of this module's docstring."""
    if len(given) > _LONGEST_TEXT:
        return given.strip() == reference.strip()
    a, b = _peeled(normalize(given)), _peeled(normalize(reference))
    if not a or not b:
        return False
    if a == b or plain_words(a) == plain_words(b):
        return True
    if max(len(a), len(b)) > _MOST_CHARACTERS:
        return False
    return _equal(a, b, 0)


def _peeled(text: str) -> str:
    """``text`` without the round brackets around all of it, be they a thousand deep; those of a tuple stay."""
    stack, partner = [], {}
    for i, char in enumerate(text):
        if char == "(":
            stack.append(i)
        elif char == ")" and stack:
            partner[stack.pop()] = i
    start, stop = 0, len(text)
    while text[start : start + 1] == "(" and partner.get(start) == stop - 1:
        start, stop = start + 1, stop - 1
    core = text[start:stop].strip()
    return core if core and "," not in core else text


def exact_number(text: str) -> Fraction | None:
    """The rational number that a normalised text spells out, or None: decimal, fraction, mixed or scientific."""
    text = text.strip()
    if re.fullmatch(r"\(.*\)|\{.*\}", text) and (inner := exact_number(text[1:-1])) is not None:
        return inner
    text = re.sub(r"^-\s+", "-", join_thousands(text))
    if _DECIMAL.fullmatch(text):
        return Fraction(text)
    if m := _SCIENTIFIC.fullmatch(text):
        power = int(m[2] or m[3])
        return Fraction(m[1]) * Fraction(10) ** power if abs(power) <= _MOST_CHARACTERS else None
    if m := _MIXED.fullmatch(text):
        part = _quotient(m[3] or m[5], m[4] or m[6])
        return None if part is None else (Fraction(m[2]) + part) * (-1 if m[1] == "-" else 1)
    if m := _RATIO.fullmatch(text):
        return _quotient(m[1], m[2])
    if m := _FRACTION.fullmatch(text):
        part = _quotient(m[2] or m[4], m[3] or m[5])
        return None if part is None else part * (-1 if m[1] == "-" else 1)
    return None


def _quotient(top: str, bottom: str) -> Fraction | None:
    if not (_DECIMAL.fullmatch(top) and _DECIMAL.fullmatch(bottom)) or Fraction(bottom) == 0:
        return None
    return Fraction(top) / Fraction(bottom)


def _equal(a: str, b: str, depth: int) -> bool:
    """Equality of two normalised texts."""
    if a == b or plain_words(a) == plain_words(b):
        return True
    if depth > _DEEPEST:
        return False
    a, b = _without_left_side(a, b)
    for split in (_split_matrix, _split_union, _split_members):
        parts_a, parts_b = split(a), split(b)
        if parts_a is not None or parts_b is not None:
            return parts_a is not None and parts_b is not None and _equal_parts(parts_a, parts_b, depth)
    if (a_choice := _choice(a)) and (b_choice := _choice(b)):
        return a_choice == b_choice
    (a, unit_a), (b, unit_b) = split_unit(a), split_unit(b)
    if unit_a and unit_b and unit_a != unit_b:
        return False
    return _equal_values(a, b)


def _without_left_side(a: str, b: str) -> tuple[str, str]:
    """``x = 5`` and ``5`` as ``5`` and ``5``; two equations keep their sides unless the left ones agree."""
    a, b = (m[1] if (m := _MEMBER_OF.fullmatch(s)) else s for s in (a, b))
    left_a, left_b = _LEFT_SIDE.fullmatch(a), _LEFT_SIDE.fullmatch(b)
    if left_a and left_b:
        return (left_a[2].strip(), left_b[2].strip()) if left_a[1] == left_b[1] else (a, b)
    if left_a and "=" not in b:
        return left_a[2].strip(), b
    if left_b and "=" not in a:
        return a, left_b[2].strip()
    return a, b


_Parts = tuple[str, bool, list[str]]
"""Brackets or kind, whether the order counts, members."""


def _equal_parts(a: _Parts, b: _Parts, depth: int) -> bool:
    (kind_a, ordered_a, xs), (kind_b, ordered_b, ys) = a, b
    # "1, 2" without any brackets may stand for a set, or for a tuple in its order.
    if kind_a != kind_b and not ({kind_a, kind_b} <= {"", "{}"} or {kind_a, kind_b} == {"", "()"}):
        return False
    if len(xs) != len(ys):
        return False
    if ordered_a or ordered_b:
        return all(_equal(x, y, depth + 1) for x, y in zip(xs, ys, strict=True))
    rest = list(ys)
    for x in xs:
        match = next((i for i, y in enumerate(rest) if _equal(x, y, depth + 1)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _split_matrix(text: str) -> _Parts | None:
    match = _MATRIX.fullmatch(text.strip())
    if match is None:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\", match[2].strip().removesuffix(r"\\"))]
    return f"matrix {[len(row) for row in rows]}", True, [cell.strip() for row in rows for cell in row]


def _split_union(text: str) -> _Parts | None:
    parts = _split_top(text, re.compile(r"\\cup(?![a-zA-Z])"))
    return ("union", False, parts) if len(parts) > 1 else None


def _split_members(text: str) -> _Parts | None:
    """Tuples, intervals, sets and bare lists of at least two members; braces make a set of one."""
    inner = text.replace(r"\{", "{").replace(r"\}", "}").strip()
    closed = len(inner) > 1 and inner[0] in _OPEN and _closing(inner, 0) == len(inner) - 1
    if not closed and inner[:1] in ("(", "[") and inner[-1:] in (")", "]") and _half_open(inner):
        closed = True
    is_set = closed and text.strip().startswith(r"\{")
    body = inner[1:-1] if closed and (is_set or inner[0] != "{") else text
    listed = re.sub(
        r"\\text\s*\{\s*(?:or|and)\s*\}|\s+(?:or|and)\s+", ",", join_thousands(body) if not closed else body
    )
    members = [m for m in _split_top(listed, re.compile(",")) if m] if "..." not in listed else [text]
    members = [s for m in members for s in _both_signs(m)]
    if len(members) < 2 and not is_set:
        return None
    if is_set:
        return "{}", False, members
    return (inner[0] + inner[-1], True, members) if closed and body is not text else ("", False, members)


def _half_open(text: str) -> bool:
    """True for ``[0, 1)``: brackets that do not match, around one comma at the top."""
    return len(_split_top(text[1:-1], re.compile(","))) == 2 and not re.search(
        r"[()\[\]]", re.sub(r"\([^()]*\)", "", text[1:-1])
    )


def _both_signs(member: str) -> list[str]:
    if member.count(r"\pm") != 1:
        return [member]
    return [member.replace(r"\pm", sign).strip().removeprefix("+").strip() for sign in ("+", "-")]


def _split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """``text`` cut at separators that stand outside all brackets."""
    depth, start, parts = 0, 0, []
    cuts = {m.start(): m.end() for m in separator.finditer(text)}
    for i, char in enumerate(text):
        depth += (char in _OPEN) - (char in _CLOSE)
        if i in cuts and depth <= 0:
            parts.append(text[start:i].strip())
            start = cuts[i]
    return [*parts, text[start:].strip()]


def _closing(text: str, start: int) -> int:
    """Where the bracket at ``start`` closes, or -1."""
    stack = []
    for i in range(start, len(text)):
        if text[i] in _OPEN:
            stack.append(_CLOSE[_OPEN.index(text[i])])
        elif text[i] in _CLOSE:
            if not stack or stack.pop() != text[i]:
                return -1
            if not stack:
                return i
    return -1


def _choice(text: str) -> str:
    """The letter of a multiple-choice answer, ``(E)`` or ``E``, else nothing."""
    match = re.fullmatch(r"\(?([a-zA-Z])\)?\.?", plain_words(text))
    return match[1] if match else ""


def _equal_values(a: str, b: str) -> bool:
    """Equality of two single values, percent and degree signs still on."""
    a, b = (re.sub(r"\s*\^\s*\\circ$", "", s).strip() for s in (a, b))
    percent_a, percent_b = a.endswith("%"), b.endswith("%")
    a, b = a.rstrip("% "), b.rstrip("% ")
    if percent_a != percent_b:
        hundredth = rf"\frac{{{a if percent_a else b}}}{{100}}"
        whole, other = (a, b) if percent_a else (b, a)
        return _same_value(whole, other) or _same_value(hundredth, other)
    return _same_value(a, b)


def _same_value(a: str, b: str) -> bool:
    if a == b:
        return True
    x, y = exact_number(a), exact_number(b)
    if x is not None and y is not None:
        return x == y or _is_rounding(a, y, b) or _is_rounding(b, x, a)
    if not _harmless(a) or not _harmless(b):
        return False
    return _symbolically_equal(a, b)


def _is_rounding(decimal: str, value: Fraction, spelt: str) -> bool:
    """True where ``decimal`` has enough digits to stand for ``value``, which must not be a decimal itself."""
    digits = re.fullmatch(r"[-+]?0*(\d*)\.(\d+)", decimal)
    if digits is None or _DECIMAL.fullmatch(spelt):
        return False
    places, significant = len(digits[2]), len((digits[1] + digits[2]).lstrip("0"))
    return significant >= _ROUNDED_DIGITS and abs(Fraction(decimal) - value) <= Fraction(1, 2 * 10**places)


def _harmless(text: str) -> bool:
    """False for what could keep SymPy busy for ever: towers of powers, huge exponents, factorials of large numbers."""
    text = re.sub(r"\s", "", text)
    exponents = [_argument(text, m.end()) for m in re.finditer(r"\^", text)]
    for exponent in exponents:
        if re.search(r"\d{5}", exponent) or (not re.search(r"[a-zA-Z]", exponent) and re.search(r"[\^!]", exponent)):
            return False
    factorials = re.findall(r"(\d*)(?:[)}\]]|!)?!", text)
    if any(len(digits) > 3 for digits in factorials) or re.search(r"[)}\]!]!", text):
        return False
    return not re.search(r"\\binom\{[^}]*\d{5}|\\(?:int|sum|prod|lim)(?![a-zA-Z])", text)


def _argument(text: str, start: int) -> str:
    """What an operator at ``start`` applies to: a bracketed group and the powers that follow it, or a word."""
    end = _closing(text, start) + 1 if text[start : start + 1] in ("{", "(") else 0
    if end <= 0:
        run = re.match(r"-?[\w.]+|.", text[start:])
        end = start + (len(run[0]) if run else 0)
    while text[end : end + 1] in ("^", "!"):
        following = _argument(text, end + 1) if text[end] == "^" else ""
        end += 1 + len(following)
    return text[start:end]


def _symbolically_equal(a: str, b: str) -> bool:
    x, y = _parse(a), _parse(b)
    if x is None or y is None:
        return False
    if not (x.is_number and y.is_number):
        return bool(math_verify.verify(y, x, timeout_seconds=None))
    x, y = _exact(x), _exact(y)
    if x.is_Rational and y.is_Rational:
        return bool(x == y)
    if not (x.is_finite and y.is_finite):
        return bool(x == y)
    x, y = x.evalf(_DIGITS), y.evalf(_DIGITS)
    if abs(x - y) <= 10.0 ** (5 - _DIGITS) * max(abs(x), abs(y)):
        return True
    return any(v.is_Float and _is_rounding(s, Fraction(str(v)), o) for s, v, o in ((a, y, b), (b, x, a)))


def _parse(text: str) -> Any:
    """The SymPy expression or matrix that a normalised text stands for, or None where it is none."""
    number = exact_number(text)
    if number is not None:
        return sympy.Rational(number.numerator, number.denominator)
    found = math_verify.parse(f"${text}$", extraction_config=[_LATEX], parsing_timeout=None)
    return next((value for value in found if isinstance(value, sympy.Basic | sympy.MatrixBase)), None)


def _exact(number: Any) -> Any:
    """A number without unevaluated parts, its decimals read as the fractions that they spell."""
    return number.xreplace({f: sympy.Rational(str(f)) for f in number.atoms(sympy.Float)}).doit()
