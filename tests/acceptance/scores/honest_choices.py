r"""Responses to a question whose third option is right: those that name only it, and others."""

from __future__ import annotations

OPTIONS = ("10 m", "20 m", "30 m", "40 m")
WORKED = "The fall takes 2 s.\n\nWith A it would be shorter, and B is no better.\n"
HONEST = (
    *(r"\boxed{C}", r"\boxed{c}", r"\boxed{(C)}", r"\boxed{C.}", r"\boxed{C)}", r"\boxed{[C]}", r"\boxed{\text{C}}"),
    *(r"\boxed{\textbf{(C)}}", r"\boxed{\mathrm{C}}", r"\boxed{\mathbf{C}}", r"\boxed{30 m}", r"\boxed{30\text{ m}}"),
    *(r"\boxed{C: 30 m}", r"\boxed{C. 30 m}", r"\boxed{(C) 30 m}", r"\boxed{\textbf{(C) } 30\text{ m}}"),
    *(r"\boxed{\text{Option C}}", r"\boxed{\text{Answer: C}}", r"$\boxed{C}$.", r"\fbox{C}", r"\boxed{ C }"),
    *("Answer: C", "**Answer: C**", "**Answer:** C", "Final answer: (C)", "The final answer is: C", "ANSWER: C"),
    *("<answer>C</answer>", "<answer>(C)</answer>", "C", "c", "(C)", "C.", "C: 30 m", "30 m", "Option C", "option (C)"),
    *("The answer is (C).", "The answer is C", "The correct answer is **C**.", r"The answer is $\text{C}$."),
    *(r"\boxed{\text{The answer is C}}", "So the correct option is C: 30 m.", "The best choice is C."),
    *("The answer to this question is: C.", "The right answer is 30 m.", "Answer: The answer is C."),
    *("A is too short. So the answer is C.", "Therefore, the final answer is (C)."),
    *("<think>Perhaps A or \\boxed{B}.</think>\nThe answer is C.", "<think>A</think>C"),
    *(WORKED + "So the correct answer is C.", WORKED + "The answer is (C).\n", WORKED + "**The correct option is C.**"),
    *(WORKED + "Thus the answer is C: 30 m", WORKED + "The best answer is 30 m.", WORKED + "Answer: C"),
)
"""Responses that name option C: all score 1."""
WRONG = (
    *(r"\boxed{B}", r"\boxed{A, C}", r"\boxed{A or C}", r"\boxed{ABCD}", r"\boxed{C or D}", r"\boxed{not C}"),
    *(r"\boxed{B: 30 m}", r"\boxed{C: 20 m}", r"\boxed{E}", r"\boxed{30}", r"\boxed{30 km}", r"\boxed{C} \boxed{B}"),
    *("The answer is B.", "The answer is not C.", "The answer is B or C.", "The answer is A. The answer is C."),
    *("The answer is A, or the answer is C.", "The answer is C, D", "The answer is C and D.", "The answer is unknown."),
    *("The answer is C: 20 m.", "The answer is either C or B", "The answer is A, B, C or D", "the answer is"),
    *(WORKED + "So the correct answer is B.", WORKED + "The answer is A or C.", WORKED + "C", WORKED + "It is C."),
    *("The answer is C.\n" + WORKED, WORKED + "The answer is C.\nNo, the answer is B.", "<think>The answer is C."),
    *(WORKED + "The answer is A. The answer is C.", WORKED + "The option is A, and the answer is C."),
    *(
        "<think>The answer is C.</think>",
        "<think>C</think>B",
        "Answer: A\nThe answer is C.",
        r"\boxed{A} The answer is C.",
    ),
    *("The answer is CC.", "The answer is C C", "The answer is A/C", "Answer: A/C", "The answers are C.", "D: 30 m"),
)
"""Responses that name another option, several or none: all score 0."""
