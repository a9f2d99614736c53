"""Evaluation: runs problems k times each, and computes statistics of the scores.

    problems ──submit──► batch `eval:NAME` ──ends──► scores of instances ──► avg@k, pass@k, intervals by data source
                                                           └── two of them ──► differences, and a paired test

Submitting an evaluation again returns the same batch, so an interrupted one continues and runs nothing twice. The
sampling unit is the instance: all means are over instances, and intervals come from resampling instances.

A rollout that failed through the farm's fault has no score. It is reported with its cause, never as a zero: an
instance's mean is over its scored samples, and an instance without any is left out. pass@j is the estimate over the n
scored samples, and an instance with n < j is left out of it; the report counts both.
"""

from farm.evaluation.evaluation_report import Comparison, EvaluationReport, compare, evaluate, pass_at_k, report_of

__all__ = ["Comparison", "EvaluationReport", "compare", "evaluate", "pass_at_k", "report_of"]
