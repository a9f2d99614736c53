"""Names of the data sources for rows of data sets."""

from __future__ import annotations

ANSWER, PROGRAMS, SWE, ENVIRONMENT, FUNCTION, MATH = "answer", "programs", "swe-bench", "environment", "code", "math"
