"""Responses to rows of verl's sources `numina_...`, in sentences and boxes, with gold answers of such rows."""

from __future__ import annotations

from random import Random

from tests.oracles.cases.answer_cases import MATHS, NUMBERS, AnswerCase, Drawn
from tests.oracles.cases.slime_cases import EXPRESSIONS

PRIME_MATH = "prime_math"
_N_CASES = 1200
_ARGUABLE = ("AB",)
"""Texts for a segment, or for its length."""
_SOURCES = tuple(
    f"numina_{name}" for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
)
_NUMINA = (
    Drawn(("\\frac{3}{4}",), ("\\frac{3}{4}", "3/4", "0.75", "\\dfrac34"), ("\\frac{4}{3}", "6/8x", "4/3"), ("75\\%",)),
    Drawn(("\\frac{6}{8}",), ("\\frac{6}{8}",), ("\\frac{8}{6}",), ("\\frac{3}{4}", "3/4", "6/8")),
    Drawn(("25\\%",), ("25\\%", "25%"), ("26\\%", "2.5\\%"), ("25", "0.25", "\\frac{1}{4}")),
    Drawn(("0.5",), ("0.5", ".5", "\\frac{1}{2}", "1/2", "0.50"), ("0.6", "5.1"), ("50", "50\\%", "0.50001", "0.005")),
    Drawn(
        ("1234.5",),
        ("1234.5", "1,234.5", "1{,}234.5", "\\$1234.5"),
        ("1234.9", "12345.9"),
        ("1234.55", "$1234.55", "$1234.55 in all", "123450", "12.345"),
    ),
    Drawn(("2\\pi",), ("2\\pi", "2 \\pi", "\\pi \\cdot 2"), ("\\pi", "3\\pi"), ("6.28", "6.2832", "6.283185307")),
    Drawn(
        ("\\pi",), ("\\pi",), ("2\\pi", "\\pi^2"), ("3.14", "3.1416", "3.15", "314", "\\pi/0", "(\\pi", "1e400", "nan")
    ),
    Drawn(("\\pi(1+\\pi)",), ("\\pi(1+\\pi)",), ("\\pi(2+\\pi)",), ("13.01", "2(\\pi+3)", "\\pi\\pi")),
    Drawn(("\\frac{\\pi}{6}",), ("\\frac{\\pi}{6}", "\\pi/6", "\\dfrac{\\pi}{6}"), ("\\pi/3", "\\pi"), ("0.5236",)),
    Drawn(
        ("(0, 2\\pi)",),
        ("(0, 2\\pi)", "(0,2\\pi)"),
        ("(0, \\pi)", "[0, 2\\pi]"),
        ("(0, 6.28)", "(0,6.2832)", "0, 6.2832", "(0,2\\pi,1)"),
    ),
    Drawn(("[1, 3)",), ("[1, 3)", "[1,3)", "\\left[1, 3\\right)"), ("(1, 3)", "[1, 3]", "[1, 4)"), ("1 \\le x < 3",)),
    Drawn(("(-\\infty, 2]",), ("(-\\infty, 2]", "(-\\infty,2]"), ("(-\\infty, 2)", "(2, \\infty)"), ("x \\le 2",)),
    Drawn(("[0, 1]",), ("[0, 1]", "[0,1]"), ("[0, 2]", "(0, 1)"), ("Interval(0, 1)", "Interval.open(0, 1)", "0, 1")),
    Drawn(("(1, -2, 3)",), ("(1, -2, 3)", "(1,-2,3)"), ("(1, 2, 3)", "(1, -2)"), ("Point(1, -2, 3)", "1, -2, 3")),
    Drawn(("(\\frac{1}{2}, 0.25)",), ("(\\frac{1}{2}, 0.25)",), ("(1, 0.25)",), ("(0.5, 0.25)", "(1/2, 1/4)")),
    Drawn(
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
        ("\\begin{pmatrix} 1 & 3 \\\\ 2 & 4 \\end{pmatrix}", "1"),
        ("Matrix([[1, 2], [3, 4]])", "Matrix([[1, 2], [3, 5]])", "[[1, 2], [3, 4]]", "Matrix([[1, 2], [3]])"),
    ),
    Drawn(
        ("\\begin{pmatrix} 1/2 \\\\ 5 \\end{pmatrix}",),
        ("\\begin{pmatrix} 1/2 \\\\ 5 \\end{pmatrix}",),
        ("\\begin{pmatrix} 1/2 \\\\ 6 \\end{pmatrix}",),
        (
            "Matrix([1/2, 5])",
            "Matrix([[2/4], [5.0]])",
            "Matrix(5)",
            "Matrix 5",
            "Matrix([[1/2, 5]])",
            "Matrix([0.5, 5])",
            "[0.5, 5]",
        ),
    ),
    Drawn(("\\begin{pmatrix} 7 \\end{pmatrix}",), ("\\begin{pmatrix} 7 \\end{pmatrix}",), ("8",), ("[7]", "7", "[8]")),
    Drawn(
        ("12 \\text{ cm}",), ("12 \\text{ cm}", "12\\text{ cm}"), ("13 \\text{ cm}",), ("12", "12 cm", "12\\text{ m}")
    ),
    Drawn(("5 \\text{ liters}",), ("5 \\text{ liters}",), ("6 \\text{ liters}",), ("5 liters", "5", "5 liter")),
    Drawn(("60^\\circ",), ("60^\\circ", "60^{\\circ}"), ("30^\\circ",), ("60", "60 degrees", "\\frac{\\pi}{3}")),
    Drawn(("\\$18.90",), ("\\$18.90", "$18.90$"), ("\\$18.09",), ("18.90", "18.9", "$18.90")),
    Drawn(("3\\sqrt{2}",), ("3\\sqrt{2}", "3 \\sqrt{2}", "\\sqrt{18}"), ("2\\sqrt{3}", "\\sqrt{2}"), ("4.2426",)),
    Drawn(
        ("2+\\sqrt{3}",), ("2+\\sqrt{3}", "\\sqrt{3}+2", "2 + \\sqrt{3}"), ("2-\\sqrt{3}",), ("\\sqrt{7+4\\sqrt{3}}",)
    ),
    Drawn(("\\text{Yes}",), ("\\text{Yes}", "Yes", "yes"), ("No", "\\text{No}"), ("Yes, it does",)),
    Drawn(("\\text{isosceles triangle}",), ("\\text{isosceles triangle}", "isosceles triangle"), ("right triangle",)),
    Drawn(("x = 3, y = 4",), ("x = 3, y = 4", "x=3, y=4"), ("x = 4, y = 3",), ("3, 4", "(3, 4)")),
    Drawn(("-1, 2",), ("-1, 2", "-1,2"), ("1, 2", "-1"), ("2, -1", "-1 and 2", "-1 \\text{ or } 2", "x=-1, x=2")),
    Drawn(("1, 2.5, \\frac{1}{3}",), ("1, 2.5, \\frac{1}{3}",), ("1, 2.5",), ("1, 5/2, 1/3", "1,2.5,1/3", "1,2.5,1_3")),
    Drawn(("1010_2",), ("1010_2", "1010_{2}"), ("1011_2",), ("1010", "10")),
    Drawn(("f(x) = x^2 + 1",), ("f(x) = x^2 + 1", "f(x)=x^2+1"), ("f(x) = x^2 - 1",), ("x^2+1", "1+x^2")),
    Drawn(("2^n - 1",), ("2^n - 1", "2^n-1", "2^{n} - 1"), ("2^n", "2^n + 1"), ("-1+2^n", "2^{n}-1")),
    Drawn(("n(n+1)/2",), ("n(n+1)/2", "\\frac{n(n+1)}{2}"), ("n(n-1)/2",), ("\\frac{n^2+n}{2}", "n*(n+1)/2")),
    Drawn(("a_1",), ("a_1",), ("a_2",), ("a_{1}", "1")),
    Drawn(("2 x + 3 y - 6 = 0",), ("2 x + 3 y - 6 = 0", "2x+3y-6=0"), ("2x-3y-6=0",), ("3y + 2x - 6 = 0",)),
    Drawn(
        ("1000000",), ("1000000", "1,000,000", "10^6", "1 million"), ("100000", "10^7"), ("1{,}000{,}000", "1000001")
    ),
    Drawn(("C",), ("C", "\\text{C}", "(C)", "\\textbf{(C)}"), ("D", "(D)"), ("\\text{(C) } 5", "C)")),
    Drawn(("(5)",), ("(5)",), ("(6)",), ("Point(5)", "Point(6)", "5", "[5]", "Interval.open(5)")),
    Drawn(("\\sqrt{5}",), ("\\sqrt{5}", "\\sqrt5"), ("\\sqrt{6}", "5"), ("5\\sqrt", "2.236", "\\sqrt{\\{5}")),
    Drawn(("\\emptyset",), ("\\emptyset",), ("\\{0\\}",), ("\\varnothing", "\u2205")),
    Drawn(("\\{1, 2\\}",), ("\\{1, 2\\}", "\\{1,2\\}"), ("\\{1, 3\\}",), ("{1,2}", "1, 2", "\\{2, 1\\}")),
)
_SENTENCES = (
    *(
        "\\fbox{{{}}}",
        "\\boxed{{x = {}}}",
        "So {}.",
        "",
        "{} is answer 1",
        "{} are answers 1 and 2",
        "<think>\\boxed{{9}}</think>{}",
    ),
    *("The answer is {}", "The answer is {}.", "The answer is ${}$.", "The answers are {}", "{}"),
    *("{} is the answer", "{} are the answers.", "Thus {} is the answer, as said.", "We get {}", "It must be {}"),
    *(
        "So x = {}",
        "the sum: {}\n",
        "The result is:\n{}",
        "# Answer\n\n{}",
        "**Answer:** {}",
        "Hence it is {}. So it goes",
    ),
    *("\\boxed{{9}} no, \\boxed{{{}}}", "\\boxed{{9}}. The answer is {}", "The answer is 9. Or \\boxed{{{}}}"),
    *(
        "\\boxed{{{}",
        "\\boxed {{{}}}",
        "\\boxed }} {{{}}}",
        "\\boxed{{}} {}",
        "ANSWER IS: {}",
        "The answer is \\({}\\).",
    ),
    *("\u0130t is. The answer is {}", "\\boxed{{\\text{{{}}}}}", "I know: it is not 9 = {}. "),
)
_PLAIN = (
    "\\boxed{{{}}}",
    "So \\boxed{{{}}}.",
    "Step 2: add.\n$\\boxed{{{}}}$",
    "Answer: \\boxed{{{}}}\n",
    "Answer: {}",
)
"""Sentences that state the answer explicitly."""


def prime_math_cases() -> list[AnswerCase]:
    """Return the cases, generated with the name of the rule as the seed."""
    random = Random(PRIME_MATH)
    return [_case(random) for _ in range(_N_CASES)]


def _case(random: Random) -> AnswerCase:
    drawn = random.choice((*_NUMINA * 3, *EXPRESSIONS, *MATHS, *NUMBERS))
    kind = random.choice(("equal", "equal", "other", "arguable", "arguable"))
    answers = getattr(drawn, kind) or drawn.equal
    form = random.choice(_PLAIN if random.random() < 0.4 else _SENTENCES)
    row = {
        "data_source": random.choice(_SOURCES),
        "reward_model": {"style": "rule", "ground_truth": drawn.golds[0]},
    }
    answer = random.choice(answers)
    sure = form in _PLAIN and answers is not drawn.arguable and answer not in _ARGUABLE
    response = form.format(*[answer] * form.count("{}"))
    return AnswerCase(PRIME_MATH, response, drawn.golds, right=answers is drawn.equal if sure else None, row=row)
