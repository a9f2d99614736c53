r"""Right answers in unusual notations, by kind, and wrong ones in the same notations: gold answer, then boxed answers.

An entry is right by the rule of the data sets' own scorers: math-verify, or a reader of the question.
"""

from __future__ import annotations

HONEST: dict[str, dict[str, tuple[str, ...]]] = {
    "numbers": {
        "42": ("42", "42.", "+42", "42.0", "42.000", "$42$", r"\(42\)", r"\[42\]", r"$$42$$", " 42 ", r"\mathbf{42}"),
        "1000000": (r"1\,000\,000", "1,000,000", "1{,}000{,}000", r"10^6", r"1\times10^6", "1e6", r"1 \cdot 10^{6}"),
        "12345": (r"12\,345", "12,345", r"12{,}345", "12 345", r"12\ 345", "12\u202f345", "12\u00a0345", r"12\;345"),
        "-7": ("-7", "\u22127", r"-7.0", "{-7}", "- 7", r"\text{-7}", "(-7)", r"\left(-7\right)"),
        "0.5": (".5", "0.50", r"\frac12", "½", "1/2", "5e-1", r"5\times10^{-1}"),
        "3.14": ("3.14", "3.140", r"3.14\ldots", r"\approx 3.14", "≈ 3.14", "~3.14"),
        "x=5": ("5", "x = 5", "x=5.0"),
        "2^{10}": ("1024", "2^{10}", "1{,}024"),
        "0.000001": ("1e-6", r"10^{-6}", r"1\times10^{-6}"),
    },
    "fractions": {
        r"\frac{3}{4}": (
            *("0.75", ".75", "3/4", r"\dfrac{3}{4}", r"\tfrac34", r"\frac34", r"\frac 3 4", r"{3}/{4}", "¾"),
            *(r"\frac{6}{8}", r"\frac{-3}{-4}", r"3 \over 4", r"\cfrac{3}{4}", r"75\%", r"\left(\frac{3}{4}\right)"),
        ),
        r"-\frac{1}{2}": (r"\frac{-1}{2}", r"\frac{1}{-2}", "-0.5", "-1/2", r"-\frac12", "\u22120.5", "-.5", "-½"),
        r"\frac{7}{3}": (r"2\frac{1}{3}", r"2\tfrac13", r"2 \frac{1}{3}", "7/3", r"\frac{14}{6}", "2⅓", r"2 1/3"),
        r"\frac{1}{3}": (r"0.\overline{3}", r"0.\dot{3}", r"0.333333", "⅓", "1/3", r"\frac{1}{3}.", r"0.\bar{3}"),
        r"0.\overline{3}": (r"\frac13", "1/3", r"0.\overline{3}", r"0.3\overline{3}"),
        r"0.1\overline{6}": (r"\frac16",),
        r"\frac{\sqrt{2}}{2}": (r"\frac{1}{\sqrt{2}}", r"\sqrt{2}/2", r"\sqrt{\frac12}", r"2^{-1/2}", r"\sqrt{0.5}"),
        r"3:4": ("3:4", "3 : 4", r"\frac34", "3/4"),
    },
    "units": {
        r"5\text{ cm}": (
            "5",
            "5 cm",
            r"5\text{ cm}",
            r"5\,\text{cm}",
            r"5\ \mathrm{cm}",
            "5cm",
            r"5~\text{cm}",
            "5.0 cm",
        ),
        "90": (r"90^\circ", r"90^{\circ}", "90°", r"90 \text{ degrees}", "90 degrees", r"90\degree"),
        r"90^\circ": ("90", r"90^{\circ}", "90°", r"90 \text{ degrees}"),
        "25\\%": ("25%", r"25\%", r"25 \%", "0.25", r"\frac{1}{4}", r"25\text{ percent}", "25 percent"),
        "12": (r"\$12", r"12 \text{ dollars}", r"\$12.00", r"12\text{ apples}", r"12 \text{ ways}", "12 m"),
        "18 m/s": (
            r"18\ \mathrm{m/s}",
            r"18\,\text{m}\,\text{s}^{-1}",
            r"18\text{ m/s}",
            "18 m/s",
            "18 meters per second",
        ),
        "9.8 m/s^2": (r"9.8\text{ m/s}^2", r"9.8 \mathrm{m\,s^{-2}}", "9.8 m/s²", r"9.8\,\mathrm{m/s^2}"),
        r"36\pi": (r"36\pi", r"36\pi\text{ cm}^2", r"36 \pi \text{ square units}", "36π", r"36\cdot\pi"),
        "300 K": (r"300\,\mathrm{K}", "300K", "300 kelvin"),
        "5 kg": ("5kg", r"5\,\mathrm{kg}", "5 kilograms", r"5\ \text{kg}"),
    },
    "sets and intervals": {
        r"\{1, 2, 3\}": (
            *("1, 2, 3", "3, 2, 1", r"\{3,2,1\}", r"\left\{1,2,3\right\}", r"x=1, x=2, x=3", r"x = 1, 2, 3", "{1,2,3}"),
            *(r"1,2,\text{ and }3", "1, 2, and 3", r"x \in \{1, 2, 3\}", r"1, 2\text{ and } 3", "1;2;3"),
        ),
        r"(-\infty, 2]": (
            *(r"x \le 2", r"x\leq2", r"\left(-\infty, 2\right]", r"(-\infty,2]", r"x \leqslant 2", r"2 \ge x", "x ≤ 2"),
            *(r"x\in(-\infty,2]", "(-∞, 2]"),
        ),
        r"x \le 2": (r"(-\infty, 2]", r"x\leq 2", r"2 \geq x", r"x \in (-\infty, 2]"),
        r"(-\infty,0)\cup(1,\infty)": (
            *(r"(1,\infty)\cup(-\infty,0)", r"(-\infty, 0) \cup (1,\infty)", "(-∞,0)\u222a(1,∞)"),
            *(r"(-\infty, 0) \cup (1, +\infty)", r"x \in (-\infty,0)\cup(1,\infty)"),
        ),
        r"[0,1)": (r"0 \le x < 1", r"\left[0,1\right)", "[0, 1)", r"x \in [0,1)"),
        r"\emptyset": (r"\varnothing", r"\{\}", r"\emptyset", "∅"),
        r"(1,2)": (r"(1, 2)", r"\left(1,2\right)", r"(1.0, 2.0)", r"x=1, y=2", r"(x,y)=(1,2)"),
    },
    "expressions": {
        r"x^2+2x+1": (
            *("(x+1)^2", "1+2x+x^2", r"x^{2}+2x+1", r"x^2 + 2\cdot x + 1", "x²+2x+1", r"(1+x)^2", r"(x+1)(x+1)"),
            *(r"\left(x+1\right)^2", r"x(x+2)+1", "y = x^2+2x+1", "f(x) = (x+1)^2", r"x^2+2x+1."),
        ),
        r"\ln 2": (r"\ln(2)", r"\ln{2}", r"\ln 2", r"\frac{\ln 4}{2}", r"-\ln\frac12"),
        r"2\sqrt{3}": (r"\sqrt{12}", r"2 \sqrt 3", r"2\cdot\sqrt{3}", r"\sqrt{3}\cdot 2", r"2\times\sqrt{3}", "2√3"),
        r"e^{-x}": (r"\frac{1}{e^x}", r"\exp(-x)", r"e^{-x}", r"\frac{1}{e^{x}}"),
        r"\sin^2 x": (r"(\sin x)^2", r"\sin^2(x)", r"\sin^{2}{x}"),
        r"\frac{x}{x+1}": (r"1-\frac{1}{x+1}", r"x/(x+1)", r"\frac{x}{1+x}", r"x(x+1)^{-1}"),
        r"n(n+1)/2": (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", r"\frac12 n(n+1)"),
        r"y = 2x + 3": ("y=2x+3", "y = 3+2x", "2x+3", "y - 2x = 3", "2x - y + 3 = 0"),
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}": (
            r"\begin{bmatrix}1\\2\end{bmatrix}",
            r"\begin{pmatrix}1\\2\end{pmatrix}",
        ),
        "3+4i": ("4i+3", "3 + 4i", r"3+4\,i", r"3 + 4\mathrm{i}"),
    },
    "words": {
        "Paris": (
            "paris",
            "PARIS",
            "Paris.",
            r"\text{Paris}",
            r"\textbf{Paris}",
            r"\mathrm{Paris}",
            " Paris ",
            "**Paris**",
        ),
        "the Nile": ("Nile", "The Nile", "the nile", "Nile.", r"\text{the Nile}", r"\text{The } \text{Nile}"),
        "Yes": ("yes", "YES", "Yes.", r"\text{yes}", r"\text{Yes}"),
        "no": ("No", "NO", r"\text{No}", "no."),
        "True": ("true", "TRUE", r"\text{True}", "True."),
        "Alice and Bob": (
            "Alice and Bob",
            "alice and bob",
            r"\text{Alice and Bob}",
            r"\text{Alice} \text{ and } \text{Bob}",
        ),
        "an electron": ("electron", "Electron", "the electron", "An electron.", "a  electron"),
        "Newton's second law": ("newton's second law", "Newton\u2019s second law", "Newton's Second Law"),
        "right triangle": (
            "Right triangle",
            "a right triangle",
            r"\text{right triangle}",
            r"\text{right}\ \text{triangle}",
        ),
        "Tuesday": ("tuesday", "Tuesday.", r"\text{Tuesday}", r"\textit{Tuesday}", r"\emph{Tuesday}"),
        "中国": ("中国", r"\text{中国}", "中国."),
        ">5": (">5", "$>5$"),
    },
}
"""Right answers: all score 1."""

TWINS: dict[str, dict[str, tuple[str, ...]]] = {
    "numbers": {
        "42": ("43", "4.2", "-42", r"42\times10", "42, 43", "4 2 1", "420"),
        "1000000": (r"1\,000\,001", r"1\,000", "1,000,00", r"10\,000\,000", "1e5", r"100\,0000"),
        "12345": (r"12\,346", "12,34", "12 34 6", r"1\,23\,46"),
        "-7": ("7", r"\pm 7", "--7"),
        "0.5": ("⅓", "0,6", "5", "0.05", "½ or ⅓"),
        "1000": (r"1\,00", r"1\,0000", "1 1000", r"1,\ 000"),
        "12": ("1, 2", r"1\,2", "1 2"),
        "42,": ("43", "1e400", "-1e400", r"10^{400}", "1e99999"),
    },
    "fractions": {
        r"\frac{3}{4}": ("4/3", r"\frac43", "0.34", "⅘", "7.5", r"75", "3.4", r"3\frac14"),
        r"\frac{7}{3}": ("2⅔", r"2\frac{2}{3}", "21/3", r"2\cdot\frac13", "⅓"),
        r"0.\overline{3}": ("0.3", r"0.\overline{4}", r"0.3\overline{4}", r"0.\overline{33}4"),
        r"\frac{1}{3}": ("0.3", r"0.\overline{4}", "⅔", r"0.\dot{4}"),
        "3:4": ("4:3", "3:5"),
        r"\frac{2}{3}": ("2 1/3", "2⅓", r"1\frac23", "2 3"),
        "1": (r"0.\overline{8}", r"0.\overline{09}", "1½"),
    },
    "units": {
        r"5\text{ cm}": (r"5\text{ m}", "5 mm", "6 cm"),
        r"90^\circ": (r"90^2", "91", r"9^\circ"),
        "25\\%": ("2.5", "0.025", r"24\%", "20 percent"),
        "12": (r"\$13", r"\$12.50", r"13\text{ dollars}"),
        "9.8 m/s^2": ("9.8 m/s", r"9.8\text{ km/s}^2"),
        "5 kg": ("5 g", "5 kilometers"),
    },
    "sets and intervals": {
        r"\{1, 2, 3\}": ("1, 2", "1, 2, 4", "1, 2, 3, 4", r"1, 2 \text{ or } 4", "123", "1 and 2"),
        r"(-\infty, 2]": (r"x < 2", r"x \ge 2", r"(-\infty, 2)", r"[2, \infty)", r"x \le 3"),
        r"x \le 2": (r"(-\infty, 2)", r"[2, \infty)", r"(-\infty, 3]", r"]-\infty, 2["),
        r"(-\infty,0)\cup(1,\infty)": (
            *(r"x<0 \text{ and } x>1", r"x\le0 \text{ or } x>1", r"x<1 or x>0", r"x<0", r"x>1", r"x<0 or x>2"),
            r"x<0 or y>1",
        ),
        r"[0,1)": (r"0 < x < 1", r"(0,1]", r"0 \le x \le 1", r"]0,1]", "]0,1["),
        r"\emptyset": (r"\{0\}", "0", r"\{\emptyset\}", r"\mathbb{R}", r"\phi"),
        "(1,2)": ("(2,1)", "x=2, y=1", "1"),
    },
    "expressions": {
        r"x^2+2x+1": ("(x-1)^2", "x^2+2x", "(y+1)^2", "x2+2x+1", "y = x^2+2x+2"),
        r"\ln 2": (r"\ln 3", r"\log_{10} 2", r"-\ln 2", "2"),
        r"2\sqrt{3}": (r"3\sqrt{2}", r"\sqrt{6}", "3√2", "2√3√3"),
        r"\sin^2 x": (r"\sin x", r"\cos^2 x", r"\sin x^2"),
        r"y = 2x + 3": ("y = 2x - 3", "x = 2y + 3", "2x + y = 3"),
        "3+4i": ("4+3i", "3-4i", "7i"),
    },
    "words": {
        "Paris": ("London", "not Paris", "Paris or London", "Pari", "Paris, London", "siraP"),
        "the Nile": ("the Niles", "the Amazon"),
        "Yes": ("no", "yes and no", "sey", "not yes"),
        "True": ("false", "not true", "True or False"),
        "Alice and Bob": ("Alice", "Bob", "Alice or Bob", "Alice and Carol", "Alice, Bob and Carol"),
        "Tuesday": ("Thursday", "Tuesday or Thursday", "Monday"),
        "中国": ("日本", "7", "中"),
        "x∈A": ("x∈B", "x", "A"),
        ">5": ("<5", "5", ">6"),
    },
}
"""Wrong answers in the same notations: all score 0."""
