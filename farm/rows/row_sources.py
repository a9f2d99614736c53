"""Names of the data sources that rows of data sets go to."""

from __future__ import annotations

ANSWER, PROGRAMS, SWE, ENVIRONMENT, FUNCTION, MATH = "answer", "programs", "swe-bench", "environment", "code", "math"
